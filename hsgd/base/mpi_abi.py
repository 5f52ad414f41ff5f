"""MPI's binary interfaces (ABIs): what each is called, and which of them this hsgd was built for.

Owns the names of the native libraries that need MPI: one of each kind per ABI, as a program that
was compiled for one cannot call another. Never loads MPI. The names are mpi4py's (MPI4PY_MPIABI).
"""

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
# By DT_SONAME, the name by which programs ask for the library; bindings/mpi_preload/engine.cpp has
# the same.
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
    """The ABI of a library that is asked for by that name; None where the name is a vendor's own;
    local."""
    return ABIS.get(soname or "")


def of_version(version: str) -> str:
    """The ABI that a library has whose MPI_Get_library_version says this, unless it is one of the
    standard ABI: these say the same as the library beside them; local."""
    return OPEN_MPI if version.startswith("Open MPI") else MPICH


def present() -> list[str]:
    """The ABIs that this hsgd was built for, that of the MPI beside the build first; local."""
    return [abi for abi in built.read().mpis if abi in _TITLES]


def describe(abis: list[str]) -> str:
    """Their names for people; local."""
    return ", ".join(_TITLES[abi] for abi in abis) or "no MPI"


def path(kind: str, abi: str) -> Path:
    """Of the native library of that kind ("mpi", "pmpi" or "preload"), which may not be there;
    local."""
    return Path(__file__).resolve().parents[1] / f"libhsgd_{kind}_{abi}.so"
