"""Finds the MPI of an environment by its compiler wrapper, and says what to compile and link with.

Owns the order in which MPI is looked for and the reading of `mpicc -show` and mpi.h. Never starts
MPI, and imports the standard library only: build scripts load it before anything is installed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MpiCompiler", "find_mpi", "find_wrapper"]


@dataclass(frozen=True)
class MpiCompiler:
    """An MPI installation as its `mpicc` describes it."""

    mpicc: str
    name: str  # "Open MPI", "MPICH" or "unknown MPI"
    version: str  # "" when mpi.h does not tell
    compile_flags: tuple[str, ...]  # -I, -D and -pthread
    link_flags: tuple[str, ...]  # -L and -l; no run-time search path
    library_dir: str | None  # where libmpi lies; None when only the linker knows

    @property
    def description(self) -> str:
        return f"{self.name} {self.version}".rstrip()


def find_wrapper(tool: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Path of `mpicc` or `mpicxx`: $MPICC or $MPICXX, then beside the interpreter, then on PATH."""
    env = os.environ if environ is None else environ
    asked = env.get(tool.upper())
    if asked:
        return shutil.which(asked, path=env.get("PATH"))
    beside = os.path.join(sys.prefix, "bin")
    return shutil.which(tool, path=beside) or shutil.which(tool, path=env.get("PATH"))


def find_mpi(environ: Mapping[str, str] | None = None) -> MpiCompiler | None:
    """The MPI to build for, or None when there is no `mpicc` that answers."""
    mpicc = find_wrapper("mpicc", environ)
    if mpicc is None:
        return None
    shown = subprocess.run(
        [mpicc, "-show"], capture_output=True, text=True, timeout=60, check=False
    )
    if shown.returncode != 0:
        return None
    words = shlex.split(shown.stdout)[1:]
    compile_flags = tuple(w for w in words if w.startswith(("-I", "-D")) or w == "-pthread")
    link_flags = tuple(w for w in words if w.startswith(("-L", "-l")))
    name, version = _read_header([w[2:] for w in compile_flags if w.startswith("-I")])
    library_dir = _library_dir(link_flags)
    return MpiCompiler(mpicc, name, version, compile_flags, link_flags, library_dir)


def _read_header(include_dirs: list[str]) -> tuple[str, str]:
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
                return "Open MPI", ".".join(parts)
            if "MPICH_VERSION" in defined:
                return "MPICH", defined["MPICH_VERSION"].strip('"')
            return "unknown MPI", ""
    return "unknown MPI", ""


def _library_dir(link_flags: tuple[str, ...]) -> str | None:
    names = [w[2:] for w in link_flags if w.startswith("-lmpi")]
    for folder in (w[2:] for w in link_flags if w.startswith("-L")):
        if any(Path(folder, f"lib{name}.so").exists() for name in names):
            return os.path.abspath(folder)
    return None
