"""One hsgd over several MPIs: MPICH and the standard ABI beside the MPI of this environment.

The programs are C (mpi_programs/) and mpi4py; run under mpiexec, this file is the latter:
`python test_other_mpis.py CASE`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsgd
from hsgd.base import mpi_abi
from hsgd.jobs.launch import preload
from hsgd.metrics import interposer_counters
from mpi_programs import (
    EXPECTED_CALLS,
    EXPECTED_TAKEN,
    assert_almost_all_taken,
    calls,
    compile_programs,
    taken_and_passed,
)
from other_mpis import InstalledMpi, install_mpi

__all__: list[str] = []

WRAPPERS = {mpi_abi.MPICH: "mpicc", mpi_abi.STANDARD: "mpicc_abi"}


@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> InstalledMpi:
    """MPICH, and the programs for each of its two ABIs, in folders of these names."""
    installed = install_mpi("mpich", tmp_path_factory.mktemp("mpich"))
    for abi, wrapper in WRAPPERS.items():
        (installed.folder / abi).mkdir()
        compile_programs(str(installed.folder / "bin" / wrapper), installed.folder / abi)
    return installed


@pytest.mark.long
@pytest.mark.parametrize("abi", WRAPPERS)
@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        ("results", ["1024"], (EXPECTED_TAKEN, EXPECTED_CALLS - EXPECTED_TAKEN)),
        ("passing", [], (0, 28)),
        ("lives", [], (266, 21)),
        ("threads", [], (132, 0)),
        ("progress", [], (2, 0)),
        ("passive", [], (5, 0)),
        ("large_types", [], (4, 0)),  # of MPI 4
    ],
)
def test_the_interposer_works(
    mpich: InstalledMpi, abi: str, program: str, words: list[str], expected: tuple[int, int]
) -> None:
    env = {"LD_PRELOAD": str(preload.library(abi))}
    if program in ("large_types", "lives", "threads"):  # on communicators that are not worth it
        env["HSGD_MIN_BYTES"] = "0"
    assert calls(mpich.run(2, str(mpich.folder / abi / program), *words, **env)) == expected


@pytest.mark.long
@pytest.mark.parametrize("abi", WRAPPERS)
def test_every_collective_works(mpich: InstalledMpi, abi: str) -> None:
    env = {"LD_PRELOAD": str(preload.library(abi)), "HSGD_MIN_BYTES": "0"}
    words = [str(mpich.folder / abi / "collectives"), "200", "2", "1", "mixed"]
    assert_almost_all_taken(mpich.run(3, *words, **env))


@pytest.mark.parametrize("preloaded", mpi_abi.present())
@pytest.mark.parametrize("abi", WRAPPERS)
def test_the_mpi_that_a_program_runs_decides(mpich: InstalledMpi, abi: str, preloaded: str) -> None:
    """Whichever library was preloaded takes the engine for that MPI."""
    env = {"LD_PRELOAD": str(preload.library(preloaded)), "HSGD_MIN_BYTES": "0"}
    words = [str(mpich.folder / abi / "collectives"), "200", "2", "1", "mixed"]
    assert_almost_all_taken(mpich.run(2, *words, **env))


@pytest.mark.parametrize("abi", WRAPPERS)
def test_a_program_whose_mpi_hsgd_was_not_built_for_stays_with_it(
    mpich: InstalledMpi, tmp_path: Path, abi: str
) -> None:
    alone = shutil.copy(preload.library(abi), tmp_path)
    words = [str(mpich.folder / abi / "collectives"), "50", "2", "1", "alike"]
    done = mpich.run(2, *words, LD_PRELOAD=str(alone))
    assert all(taken == 0 for taken, _ in taken_and_passed(done).values())
    lines = [line for line in done.stderr.splitlines() if "hsgd: " in line]
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert re.search(
            rf"libhsgd_pmpi_{abi}.so is missing, which the MPI of this program \(\S+libmpi", line
        )


@pytest.mark.parametrize("case", ["interposed", "communicator"])
def test_mpi4py_chooses_its_mpi_and_hsgd_follows(mpich: InstalledMpi, case: str) -> None:
    """An MPICH that only mpi4py sees."""
    interposed = {"LD_PRELOAD": str(preload.library(mpi_abi.MPICH))}
    env = interposed if case == "interposed" else {}
    done = mpich.run(2, sys.executable, __file__, case, **env)
    assert (done.returncode, done.stdout) == (0, "fine\nfine\n"), done.stdout + done.stderr
    assert "hsgd: " not in done.stderr


def test_an_mpi_that_hsgd_was_not_built_for_is_refused_in_one_line(
    mpich: InstalledMpi, tmp_path: Path
) -> None:
    package = Path(hsgd.__file__).parent
    skipped = shutil.ignore_patterns("csrc", "*mpich.so", "__pycache__")
    shutil.copytree(package, tmp_path / "hsgd", ignore=skipped)
    facts = tmp_path / "hsgd" / "_build.json"
    facts.write_text(facts.read_text().replace('"mpich"', '"none"'))
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    done = mpich.run(1, sys.executable, __file__, "communicator", PYTHONPATH=path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "LaunchError: hsgd was built for " in last and "MPICH Version" in last
    assert "MPICC=/path/to/mpicc pip install" in last


# --- the programs of the ranks ---


def interposed(world: Any) -> None:
    sums = np.empty(3000, np.float32)
    world.Allreduce(np.full(3000, world.rank + 1, np.float32), sums)
    assert (sums == 3).all()
    counters = interposer_counters()
    assert counters is not None and counters.calls == 1
    print("fine\n", end="", flush=True)  # in one piece, also unbuffered


def communicator(world: Any) -> None:
    from mpi4py import MPI

    assert MPI.Get_library_version().startswith("MPICH")
    with hsgd.Comm() as comm:
        sums = comm.allreduce(np.full(3000, world.rank + 1, np.float32), op="sum")
        assert (sums == 3).all()
    print("fine\n", end="", flush=True)


if __name__ == "__main__":
    from mpi4py import MPI

    globals()[sys.argv[1]](MPI.COMM_WORLD)
