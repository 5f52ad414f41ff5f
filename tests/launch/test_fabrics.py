"""What `hsgd info` finds between nodes: read from trees of files like those of other machines."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from hsgd.base import elf
from hsgd.tools.doctor import fabrics

__all__: list[str] = []

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture(autouse=True)
def memory_may_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: UNLIMITED)


class Machine:
    """A node as /sys, /dev and an MPI's folder show it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sys, self.dev, self.lib = root / "sys", root / "dev", root / "lib"
        for folder in (self.sys, self.dev, self.lib):
            folder.mkdir(parents=True)
        self.libmpi = self.lib / "libmpi.so.40"
        self.needs: tuple[str, ...] = ("libc.so.6",)
        self.libmpi.touch()
        monkeypatch.setattr(
            elf, "read_library", lambda path: elf.Library(str(path), "", self.needs, "")
        )

    def add(self, path: str, text: str = "") -> None:
        file = self.sys / "class" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def add_adapter(self, name: str) -> None:
        self.add(f"infiniband/{name}/ports/1/state", "4: ACTIVE\n")

    def add_verbs(self) -> None:
        (self.dev / "infiniband").mkdir()
        (self.dev / "infiniband" / "uverbs0").touch()

    def find(self, **environ: str) -> fabrics.Fabrics:
        return fabrics.find(str(self.libmpi), environ, self.sys, self.dev)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_node_with_ethernet_alone_uses_tcp(machine: Machine) -> None:
    machine.add("net/lo/operstate", "unknown\n")
    machine.add("net/eth0/operstate", "up\n")
    machine.add("net/eth0/speed", "25000\n")
    machine.add("net/eth1/operstate", "down\n")
    machine.add("net/veth0/operstate", "up\n")
    machine.add("net/veth0/speed", "-1\n")
    machine.needs = ("libucp.so.0", "libfabric.so.1", "libc.so.6")
    found = machine.find()
    assert [str(link) for link in found.links] == ["eth0 (25 Gbit/s)", "veth0 (speed unknown)"]
    assert (found.libraries, found.carrier) == (["UCX", "libfabric"], "MPI, over TCP")
    assert list(found.problems()) == []


def test_a_node_with_infiniband_uses_what_mpi_was_built_with(machine: Machine) -> None:
    machine.add_adapter("mlx5_0")
    machine.add_verbs()
    machine.needs = ("libucp.so.0",)
    found = machine.find(UCX_TLS="rc,sm", HOME="/root")
    assert found.carrier == "MPI, over UCX and mlx5_0"
    assert found.choices == {"UCX_TLS": "rc,sm"}
    assert list(found.problems()) == []


def test_components_that_are_files_are_found(machine: Machine) -> None:
    (machine.lib / "openmpi" / "libfabric").mkdir(parents=True)
    (machine.lib / "openmpi" / "mca_mtl_ofi.so").touch()
    (machine.lib / "openmpi" / "libfabric" / "libefa-fi.so").touch()
    found = machine.find()
    assert (found.libraries, found.providers) == (["libfabric"], ["efa"])


def test_slingshot_needs_no_verbs(machine: Machine) -> None:
    machine.add("cxi/cxi0/device", "")
    machine.needs = ("libfabric.so.1",)
    assert machine.find().rdma


def test_an_adapter_that_mpi_cannot_use_is_told(machine: Machine) -> None:
    machine.add_adapter("mlx5_0")
    machine.add_verbs()
    found = machine.find()
    assert found.carrier == "MPI, over TCP"
    assert [text for text, _ in found.problems()] == [
        "this node has mlx5_0, but MPI has neither UCX nor libfabric: it uses TCP"
    ]


def test_an_adapter_whose_devices_a_container_hides_is_told(machine: Machine) -> None:
    machine.add_adapter("mlx5_0")
    machine.needs = ("libucp.so.0",)
    found = machine.find()
    assert found.carrier == "MPI, over TCP"
    assert [text for text, _ in found.problems()] == [
        "this node has mlx5_0, but /dev/infiniband is not here: MPI uses TCP"
    ]


def test_a_small_limit_of_locked_memory_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    machine.needs = ("libucp.so.0",)
    assert list(machine.find().problems()) == []
    machine.add_adapter("mlx5_0")
    machine.add_verbs()
    assert ["may lock 64 KiB" in text for text, _ in machine.find().problems()] == [True]


def test_the_mpi_of_this_machine_is_read_without_loading_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    assert fabrics.find(str(tmp_path / "missing.so"), os.environ).libraries == []
    before = elf.loaded_libraries()
    found = fabrics.find(_libmpi(), os.environ)
    assert set(found.libraries) <= {"UCX", "libfabric", "PSM2"}
    assert not [path for path in elf.loaded_libraries() if "libmpi" in path and path not in before]


def _libmpi() -> str:
    from hsgd.tools.doctor import probe

    return probe.libmpi_of_hsgd().libmpi
