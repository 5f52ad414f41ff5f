"""A rank is killed or stopped at each fault point of the set-up over MPI, on virtual nodes.

The launcher is told to let the others live: they end in time, each with one line. Run under mpirun,
this file is the program of the ranks. Jobs of one signal run beside one another, because they
mostly wait.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import fault_points
from test_fault_nodes import (
    JOB_S,
    RANKS,
    Reports,
    at_points,
    executioner,
    report,
    reports_of,
    wait_for_reports,
)
from tiers import short_form
from toolkit.cluster import Cluster
from toolkit.processes import CommandTimeout

__all__ = ["SCENARIOS"]

pytestmark = pytest.mark.long

# Deaths are told by MPI's launcher; who is stopped is missed at the deadline, of one step of the
# set-up and, on its node, of the meeting there.
TIMEOUT_S = {"SIGKILL": 60.0, "SIGSTOP": 2.0}
BOUND_S = {"SIGKILL": 20.0, "SIGSTOP": 2 * 2.0 + 4.0}
UNCAUGHT = 1  # exit code of an exception
# Open MPI 5.0 may abort the job when a rank dies in a nonblocking collective of its own, which the
# first two steps are: the job ends, but without our line. Such a job is run again.
ABORTED_BY_MPI = "An error occurred in Send error after request freed"
MOST_RUNS = 4


class Scenario(NamedTuple):
    victim: int


SCENARIOS = {
    "over MPI: begun": Scenario(1),
    "over MPI: all have come": Scenario(3),
    "over MPI: own communicator made": Scenario(0),
    "over MPI: settings compared": Scenario(1),
    "over MPI: door open": Scenario(2),
    "over MPI: node found": Scenario(3),
    "over MPI: place found": Scenario(0),
    "over MPI: met": Scenario(2),
}


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest,
    cluster: Callable[..., Cluster],
    tmp_path_factory: pytest.TempPathFactory,
) -> Reports:
    """By point, what all ranks but the victim were told; the victim's entry says when it fell."""
    fault_points.build()
    nodes, how, base = cluster(2), request.param, tmp_path_factory.mktemp("reports")

    def job(point: str, run: int = 1) -> list[dict[str, object]] | str:
        folder = base / f"{point.replace(' ', '-')}-{run}"
        folder.mkdir()
        argv = [sys.executable, __file__, how, point, str(folder)]
        try:
            done = nodes.mpirun(RANKS, argv, options=("--with-ft", "ulfm"), timeout_s=JOB_S)
            assert done.returncode > 0, done.returncode
            if ABORTED_BY_MPI in done.stderr and run < MOST_RUNS:
                return job(point, run + 1)
            return reports_of(done)
        except (CommandTimeout, AssertionError) as error:
            return str(error)

    return at_points(request, job)


@pytest.mark.parametrize("point", short_form("chaos", SCENARIOS))
@pytest.mark.parametrize("reports", ["SIGKILL", "SIGSTOP"], indirect=True)
def test_no_rank_waits_for_ever_for_one_that_falls_in_the_set_up_over_mpi(
    reports: Reports, point: str, request: pytest.FixtureRequest
) -> None:
    how = "SIGKILL" if "SIGKILL" in request.node.name else "SIGSTOP"
    lines, victim = reports[point], SCENARIOS[point].victim
    assert not isinstance(lines, str), lines
    for line in lines[:victim] + lines[victim + 1 :]:
        assert line["kind"] == ("PeerLost" if how == "SIGKILL" else "CollectiveTimeout"), line
        assert "\n" not in line["line"]
        assert line["when"] - lines[victim]["when"] < BOUND_S[how], line
        if how == "SIGKILL":
            assert line["rank"] == victim and f"rank {victim} " in line["line"], line


# --- the program of the ranks ---


def main() -> None:
    how, point, name = sys.argv[1:]
    scenario, folder = SCENARIOS[point], Path(name)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if rank == scenario.victim:
        pipe = executioner(signal.Signals[how], rank, folder)
    fault_points.use()
    from mpi4py import MPI  # noqa: F401

    from hsgd import Comm, HsgdError
    from hsgd.config import Config

    if rank == scenario.victim:
        fall = lambda: (os.write(pipe, b"x"), time.sleep(JOB_S))  # noqa: E731
        fault_points.on_visit(point, 1, fall)
    try:
        Comm(config=Config(oneshot_bytes=1024, store="ordinary", timeout_s=TIMEOUT_S[how]))
    except HsgdError as error:
        report(folder, rank, kind=type(error).__name__, line=str(error), rank=error.rank)
    wait_for_reports(folder)
    os._exit(UNCAUGHT)


if __name__ == "__main__":
    main()
