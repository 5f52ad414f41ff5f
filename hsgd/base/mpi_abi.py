"""MPI's binary interfaces (ABIs), with mpi4py's names (MPI4PY_MPIABI), and libraries for each."""

from __future__ import annotations

from pathlib import Path

from hsgd.base import built

__all__ = [
    "ABIS",
    "MPICH",
    "OPEN_MPI",
    "REBUILD",
    "STANDARD",
    "describe",
    "of_soname",
    "of_version",
    "path",
    "present",
]

OPEN_MPI, MPICH, STANDARD = "openmpi", "mpich", "mpiabi"
# By DT_SONAME, which programs link to; bindings/mpi_preload/engine.cpp has the same names.
ABIS = {"libmpi.so.40": OPEN_MPI, "libmpi.so.12": MPICH, "libmpi_abi.so.1": STANDARD}
_TITLES = {
    OPEN_MPI: "Open MPI 4 and 5",
    MPICH: "MPICH and Intel MPI",
    STANDARD: "the standard ABI of MPI 5",
}
REBUILD = (
    "install hsgd again from its sources, with the compiler of the MPI that is to be used: "
    "MPICC=/path/to/mpicc pip install --force-reinstall --no-deps "
    "--no-cache-dir SOURCES"
)


def of_soname(soname: str | None) -> str | None:
    """Return the ABI of a library with that DT_SONAME; None for a vendor's own name; local."""
    return ABIS.get(soname or "")


def of_version(version: str) -> str:
    """Return the ABI of a library by the text of its MPI_Get_library_version; local.

    A library of the standard ABI must be recognized before: its text is that of the library beside
    it.
    """
    return OPEN_MPI if version.startswith("Open MPI") else MPICH


def present() -> list[str]:
    """Return the ABIs that this hsgd was built for, that of the build's own MPI first; local."""
    return [abi for abi in built.read().mpis if abi in _TITLES]


def describe(abis: list[str]) -> str:
    """Return their names for people; local."""
    return ", ".join(_TITLES[abi] for abi in abis) or "no MPI"


def path(kind: str, abi: str) -> Path:
    """Return the native library's path (kind "mpi", "pmpi" or "preload"), or its place; local."""
    return Path(__file__).resolve().parents[1] / f"libhsgd_{kind}_{abi}.so"
