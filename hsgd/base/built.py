"""Facts of the build, from hsgd/_build.json: compiler, flags, MPIs of the native libraries."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from hsgd.errors import LaunchError

__all__ = ["Build", "BuiltMpi", "compile_flags", "read"]


@dataclass(frozen=True)
class BuiltMpi:
    """An MPI whose headers the build read; hsgd runs over all MPIs of the same ABI."""

    name: str = ""  # "Open MPI" or "MPICH"
    version: str = ""
    library_dir: str = ""  # "" if the linker knows it, or in a wheel for other machines

    @property
    def description(self) -> str:
        return f"{self.name} {self.version}".rstrip()


@dataclass(frozen=True)
class Build:
    """Facts of one build; empty if they are unknown, or the file is missing."""

    compiler: str = ""
    flags: str = ""
    mpis: dict[str, BuiltMpi] = field(default_factory=dict)  # by ABI; see hsgd.base.mpi_abi


def compile_flags() -> str:
    """Return what compiles and links a program with the C interface, csrc/include; local.

    Raises LaunchError if the path has a blank: shells split what `$(hsgd info --flags)` gives.
    """
    package = str(Path(__file__).parents[1])
    if len(package.split()) != 1:
        raise LaunchError(f"{package}: a blank in the path; compilers get it in parts")
    return f"-I{package}/csrc/include -L{package} -Wl,-rpath,{package} -lhsgd_core"


def read() -> Build:
    """Read the facts of the installed build; local."""
    try:
        text = (Path(__file__).parents[1] / "_build.json").read_text(encoding="utf-8")
    except OSError:
        return Build()
    known = json.loads(text)
    mpis = {abi: BuiltMpi(**facts) for abi, facts in known.get("mpis", {}).items()}
    return Build(str(known.get("compiler", "")), str(known.get("flags", "")), mpis)
