"""What the build wrote down about itself: compiler, flags, and the MPI that the native libraries
are linked with.

Owns the reading of hsgd/_build.json, which setup.py writes. Never looks at the machine: what is
found there now is for hsgd.doctor.info to compare.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Build", "read"]


@dataclass(frozen=True)
class Build:
    """Facts of one build; empty strings where the build did not know, or is not there."""

    compiler: str = ""
    flags: str = ""
    mpi_name: str = ""  # "Open MPI" or "MPICH"; "" when hsgd was built without MPI
    mpi_version: str = ""
    mpi_library_dir: str = ""


def read() -> Build:
    """Read the facts of the installed build; local."""
    try:
        text = Path(__file__).with_name("_build.json").read_text(encoding="utf-8")
    except OSError:
        return Build()
    known = json.loads(text)
    return Build(**{name: str(known.get(name) or "") for name in Build.__dataclass_fields__})
