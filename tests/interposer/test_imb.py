"""The Intel MPI Benchmarks give the same verdicts with the interposer as without it.

They come with Intel MPI's wheel, compiled for MPICH's ABI, and so run on MPICH as well. The wheel's
are compiled without their own checks of results (CHECK), so that a verdict is: every benchmark
has run, at every size, and the program ends with 0.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hsgd.jobs.launch import preload
from mpi_programs import taken_by_rank
from other_mpis import InstalledMpi, install_mpi
from tiers import short_form

__all__: list[str] = []

pytestmark = pytest.mark.long

RANKS = 3
SUITES = ("IMB-MPI1", "IMB-NBC", "IMB-RMA", "IMB-MT", "IMB-P2P")
SMALL = ("-iter", "5", "-msglog", "0:15", "-npmin", str(RANKS))
OPTIONS = {
    "IMB-MPI1": SMALL,
    "IMB-NBC": SMALL,
    "IMB-RMA": SMALL,
    "IMB-MT": ("-repeat", "5", "-count", "1,4096"),
    "IMB-P2P": ("-iter", "5", "-msglog", "0:15"),
}


@pytest.fixture(scope="module")
def intel(tmp_path_factory: pytest.TempPathFactory) -> InstalledMpi:
    return install_mpi("intel", tmp_path_factory.mktemp("intel"))


@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> InstalledMpi:
    return install_mpi("mpich", tmp_path_factory.mktemp("mpich"))


def verdict(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """By benchmark how many sizes it has run."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, int] = {}
    name = ""
    for line in done.stdout.splitlines():
        if match := re.match(r"#\s*Benchmarking:?\s+(.+?)\s*$", line):
            name = match[1]
            found.setdefault(name, 0)
        elif name and re.match(r"\s+\d+(\s+[\d.]+)+\s*$", line):
            found[name] += 1
    return found


@pytest.mark.parametrize(
    ("where", "suite"),
    short_form(
        "suites", [(where, suite) for where in ("intel", "mpich") for suite in SUITES], keep=[]
    ),
)
def test_every_benchmark_runs_as_without_it(
    request: pytest.FixtureRequest, intel: InstalledMpi, where: str, suite: str
) -> None:
    mpi: InstalledMpi = request.getfixturevalue(where)
    words: list[str | Path] = [intel.folder / "bin" / suite, *OPTIONS[suite]]
    found = f"{mpi.folder / 'lib'}:{intel.folder / 'lib'}"  # IMB-MT needs Intel's OpenMP
    alone = verdict(mpi.run(RANKS, *words, LD_LIBRARY_PATH=found))
    assert len(alone) > 3 and all(alone.values()), alone
    env = {"LD_PRELOAD": str(preload.library(mpi.abi)), "HSGD_MIN_BYTES": "0", "HSGD_REPORT": "1"}
    done = mpi.run(RANKS, *words, LD_LIBRARY_PATH=found, **env)
    assert verdict(done) == alone
    assert "hsgd: warning" not in done.stderr
    least = {"IMB-MPI1": 1000, "IMB-MT": 10}  # the others call few collectives, or none
    assert sum(taken_by_rank(done)) >= least.get(suite, 0)
    if suite not in least:
        assert done.stderr.count("hsgd: rank ") in (0, RANKS)  # no report without a collective
