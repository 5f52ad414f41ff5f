"""Fabrics between nodes: facts of /sys, MPI's library files and settings; nothing is loaded."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hsgd.base import elf
from hsgd.onesided import networks

__all__ = ["Fabrics", "Link", "find"]

# Libraries by which an MPI uses fabrics, and the suffix of MPI's component for one if that is a
# file (Open MPI: mca_pml_ucx.so, mca_mtl_ofi.so).
_LIBRARIES = {
    "UCX": ("libucp.so", "_ucx.so"),
    "libfabric": ("libfabric.so", "_ofi.so"),
    "PSM2": ("libpsm2.so", "_psm2.so"),
}
# Variables with which users choose among transports.
_CHOICES = (
    *("OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include"),
    *("UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "MPIR_CVAR_CH4_NETMOD", "I_MPI_FABRICS"),
    *("I_MPI_OFI_PROVIDER",),
)
_LEAST_LOCKED_BYTES = 64 << 20


@dataclass(frozen=True)
class Link:
    """A network interface that is up."""

    name: str
    mbit_per_s: int  # 0: unknown, as for most virtual ones

    def __str__(self) -> str:
        speed = f"{self.mbit_per_s / 1000:g} Gbit/s" if self.mbit_per_s else "speed unknown"
        return f"{self.name} ({speed})"


@dataclass(frozen=True)
class Fabrics:
    """The facts of one node."""

    adapters: list[str]  # for RDMA, with an active port
    can_open: bool  # the kernel's devices for verbs exist, or no adapter needs them
    links: list[Link]
    libraries: list[str]  # those that MPI was built with: "UCX", "libfabric", "PSM2"
    providers: list[str]  # of libfabric, if they are files beside it
    choices: dict[str, str]
    locked_bytes: int  # limit of a process; -1: none

    @property
    def rdma(self) -> bool:
        """Whether MPI can reach an adapter, as far as files show."""
        return bool(self.adapters and self.libraries and self.can_open)

    @property
    def carrier(self) -> str:
        """The carrier of an MPI job's data between nodes."""
        if self.rdma:
            return f"MPI, over {' or '.join(self.libraries)} and {', '.join(self.adapters)}"
        return "MPI, over TCP"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield what prevents the use of adapters, each with a remedy."""
        names = ", ".join(self.adapters)
        if self.adapters and not self.libraries:
            yield (
                f"this node has {names}, but MPI has neither UCX nor libfabric: it uses TCP",
                "Load your cluster's MPI module instead, then install hsgd and mpi4py again",
            )
        if self.adapters and not self.can_open:
            yield (
                f"this node has {names}, but /dev/infiniband is not here: MPI uses TCP",
                "Give the container the devices (docker run --device=/dev/infiniband)",
            )
        if self.rdma and 0 <= self.locked_bytes < _LEAST_LOCKED_BYTES:
            yield (
                f"a process may lock {self.locked_bytes >> 10} KiB of memory only: adapters for "
                "RDMA need much more",
                "ulimit -l unlimited, in /etc/security/limits.conf or the scheduler's service",
            )


def find(
    libmpi: str, environ: Mapping[str, str], sys: Path = Path("/sys"), dev: Path = Path("/dev")
) -> Fabrics:
    """Read the facts of this node; local. `libmpi` is hsgd's MPI library, or ""."""
    adapters = networks.rdma_adapters(sys / "class")
    verbs = any((sys / "class" / "infiniband" / name).exists() for name in adapters)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Fabrics(
        adapters=adapters,
        can_open=not verbs or any((dev / "infiniband").glob("uverbs*")),
        links=_links(sys / "class" / "net"),
        libraries=_libraries(libmpi),
        providers=_providers(libmpi),
        choices={name: environ[name] for name in _CHOICES if name in environ},
        locked_bytes=-1 if soft == resource.RLIM_INFINITY else soft,
    )


def _links(devices: Path) -> list[Link]:
    found = []
    for device in sorted(devices.glob("*")):
        with contextlib.suppress(OSError, ValueError):
            if device.name == "lo" or (device / "operstate").read_text().strip() == "down":
                continue
            speed = 0
            with contextlib.suppress(OSError, ValueError):  # virtual ones have none: EINVAL, or -1
                speed = max(0, int((device / "speed").read_text()))
            found.append(Link(device.name, speed))
    return found


def _homes(libmpi: str) -> list[Path]:
    if not libmpi:
        return []
    folder = Path(libmpi).resolve().parent
    return [home for name in ("openmpi", "mpich") if (home := folder / name).is_dir()]


def _libraries(libmpi: str) -> list[str]:
    needed: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        needed += elf.read_library(libmpi).needed
    components = [path.name for home in _homes(libmpi) for path in home.glob("mca_*.so")]
    return [
        title
        for title, (library, component) in _LIBRARIES.items()
        if any(name.startswith(library) for name in needed)
        or any(name.endswith(component) for name in components)
    ]


def _providers(libmpi: str) -> list[str]:
    files = [path for home in _homes(libmpi) for path in home.glob("libfabric/lib*-fi.so")]
    return sorted(path.name.removeprefix("lib").removesuffix("-fi.so") for path in files)
