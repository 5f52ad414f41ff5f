"""A rank is killed or stopped at each fault point between nodes, on virtual nodes over MPI.

The launcher is told to let the others live. Those that share the victim's node name it in time;
those of the other node learn that something is wrong there. Run under mpirun, this file is the
program of the ranks. Jobs of one signal run beside one another, because they mostly wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

import fault_points
from tiers import points_wanted, short_form
from toolkit.cluster import Cluster
from toolkit.processes import crashes_of

__all__ = [
    "JOB_S",
    "RANKS",
    "SCENARIOS",
    "Reports",
    "at_points",
    "executioner",
    "report",
    "reports_of",
    "wait_for_reports",
]

pytestmark = pytest.mark.long

DETECTED_S = 2.0
TIMEOUT_S = {"SIGKILL": 60.0, "SIGSTOP": 1.0}
RANKS = 4  # two nodes of two
MANY = 500_000  # float64: dozens of steps
JOBS_AT_ONCE = 3
JOB_S = 120.0
REPORTED_S = 30.0  # how long ranks stay to hear that all have reported


class Scenario(NamedTuple):
    call: str
    victim: int
    visit: int


SCENARIOS = {
    "between nodes: header sent": Scenario("small allreduce", 2, 3),
    "between nodes: result not published": Scenario("small allreduce", 0, 3),
    "between nodes: result published": Scenario("small broadcast", 2, 3),
    "between nodes: permission published": Scenario("large allreduce", 0, 2),
    "between nodes: slice sent": Scenario("large allreduce", 3, 5),
    "between nodes: sum sent": Scenario("large allreduce", 1, 5),
    "between nodes: section sent": Scenario("large reduce_scatter", 2, 5),
    "pipeline: gathered, not told": Scenario("large reduce_scatter", 1, 5),
    "between nodes: block sent": Scenario("large allgather", 3, 5),
    "between nodes: chunk passed on": Scenario("large broadcast", 0, 5),
    "close: other nodes told": Scenario("close", 2, 1),
}
Reports = dict[str, list[dict[str, Any]]]
Done = TypeVar("Done")


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest,
    cluster: Callable[..., Cluster],
    tmp_path_factory: pytest.TempPathFactory,
) -> Reports:
    """By point, what all ranks but the victim were told; the victim's entry says when it fell."""
    fault_points.build()
    nodes, how, base = cluster(2), request.param, tmp_path_factory.mktemp("reports")

    def job(point: str) -> subprocess.CompletedProcess[str]:
        folder = base / point.replace(" ", "-")
        folder.mkdir()
        return nodes.mpirun(
            RANKS,
            [sys.executable, __file__, how, point, str(folder)],
            options=("--with-ft", "ulfm"),
            timeout_s=JOB_S,
        )

    return {point: reports_of(done) for point, done in at_points(request, job).items()}


def at_points(request: pytest.FixtureRequest, job: Callable[[str], Done]) -> dict[str, Done]:
    """What job(point) gives for each point that is asked for."""
    points = points_wanted(request, "point")
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        return dict(zip(points, pool.map(job, points), strict=True))


def reports_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What the ranks of a job reported, by rank."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    crashes = crashes_of(done.stderr)
    assert len(lines) == RANKS, f"{done.args}: {done.stdout}{done.stderr[-3000:]}{crashes}"
    return sorted(map(json.loads, lines), key=lambda line: line["of"])


@pytest.mark.parametrize("point", short_form("chaos", SCENARIOS))
@pytest.mark.parametrize("reports", ["SIGKILL", "SIGSTOP"], indirect=True)
def test_survivors_of_its_node_name_a_rank_that_falls_between_nodes(
    reports: Reports, point: str, request: pytest.FixtureRequest
) -> None:
    killed = "SIGKILL" in request.node.name
    lines, victim = reports[point], SCENARIOS[point].victim
    fell = lines[victim]["when"]
    bound_s = DETECTED_S + (0 if killed else TIMEOUT_S["SIGSTOP"])
    for line in lines[:victim] + lines[victim + 1 :]:
        assert line["kind"] in ("PeerLost", "CollectiveTimeout"), line
        assert line["when"] - fell < bound_s, line
        if line["of"] // 2 == victim // 2:
            # One that was stopped while it left may have been heard.
            heard = not killed and SCENARIOS[point].call == "close" and line["kind"] == "PeerLost"
            assert line["kind"] == ("PeerLost" if killed or heard else "CollectiveTimeout"), line
            assert line["rank"] == victim and f"rank {victim} (pid " in line["line"], line


# --- the program of the ranks ---


def report(folder: Path, of: int, **facts: Any) -> None:
    print(json.dumps({"of": of, "when": time.monotonic(), **facts}), flush=True)
    (folder / str(of)).touch()


def wait_for_reports(folder: Path, victim: int | None = None) -> None:
    """A rank that ends may have the launcher end the others: all of them report first, unless
    `victim` is gone, whose parent has ended it then.
    """
    deadline = time.monotonic() + REPORTED_S
    while len(list(folder.iterdir())) < RANKS and time.monotonic() < deadline:
        if victim is not None and not Path(f"/proc/{victim}").exists():
            return
        time.sleep(0.02)


def executioner(number: signal.Signals, rank: int, folder: Path) -> int:
    """A process that lets this one fall when a byte is written to the pipe that it returns."""
    here, there = os.pipe()
    victim = os.getpid()
    if os.fork():
        os.close(here)
        return there
    os.close(there)
    if os.read(here, 1):
        report(folder, rank)
        os.kill(victim, number)
        wait_for_reports(folder, victim)
        with contextlib.suppress(ProcessLookupError):  # one that was killed may be gone
            os.kill(victim, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    how, point, name = sys.argv[1:]
    scenario, folder = SCENARIOS[point], Path(name)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if rank == scenario.victim:
        pipe = executioner(signal.Signals[how], rank, folder)
    fault_points.use()
    from hsgd import Comm, HsgdError
    from hsgd.config import Config

    fixed = Config(wire_chunk_bytes=65536, oneshot_bytes=1024, store="ordinary")
    comm = Comm(config=replace(fixed, timeout_s=TIMEOUT_S[how]))
    data = np.zeros(MANY)
    if rank == scenario.victim:
        fall = lambda: (os.write(pipe, b"x"), time.sleep(JOB_S))  # noqa: E731
        fault_points.on_visit(point, scenario.visit, fall)
    some = data[:5] if "small" in scenario.call else data
    try:
        while True:
            if scenario.call == "close" and rank == scenario.victim:
                comm.close()
            if "broadcast" in scenario.call:
                comm.broadcast(some, root=scenario.victim)
            elif "reduce_scatter" in scenario.call:
                comm.reduce_scatter(some)
            elif "allgather" in scenario.call:
                comm.allgather(some[: MANY // RANKS])
            else:
                comm.allreduce(some, out=some)
    except HsgdError as error:
        report(folder, rank, kind=type(error).__name__, line=str(error), rank=error.rank)
    wait_for_reports(folder)
    os._exit(0)


if __name__ == "__main__":
    main()
