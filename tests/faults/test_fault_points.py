"""A rank is killed or stopped at each fault point of the core, at 2, 3 and 4 ranks.

The points are read from the sources, so none can be added without a scenario here. A scenario says
which rank comes to the point, and in which call. The bounds in seconds are promises of the core,
not measurements.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import fault_points
import holdings
import test_box_faults
import test_fault_mpi
import test_fault_nodes
import test_fault_tcp
import test_shrink
from hsgd import Comm, HsgdError
from hsgd.config import Config
from ranks import Ranks, Seat, meeting_point
from tiers import short_form

__all__: list[str] = []

pytestmark = pytest.mark.long  # builds the core once more
DETECTED_S = 2.0
TIMEOUT_S = 1.0
PATIENT_S = 30.0
FIXED = Config(chunk_bytes=4096, oneshot_bytes=1024, store="ordinary")  # measures nothing
SIZES = (2, 3, 4)
MANY = 12_000  # float64: dozens of steps; even shares for all sizes
ROOT = 1  # of broadcasts


@dataclass(frozen=True)
class Scenario:
    """How a rank comes to a point."""

    call: str  # what all ranks do: "set-up" or a name in do_call()
    victim: int = -1  # the rank at the point; -1 is the last
    visit: int = 1  # how often it has come there
    late: bool = False  # the others learn of a death by the deadline alone
    measures: bool = False  # in the set-up, by collectives
    crowded: bool = False  # all ranks on one core, so that they claim parts of sums
    grouped: bool = False  # three ranks that are counted in two groups


EITHER = ("PeerLost", "CollectiveTimeout")


SCENARIOS: dict[str, Sequence[Scenario]] = {
    "set-up: segment made": [Scenario("set-up", victim, late=True) for victim in (0, -1)],
    "set-up: door open": [Scenario("set-up", 0, late=True)],
    "set-up: connected": [Scenario("set-up", late=True)],
    "set-up: introduced": [Scenario("set-up"), Scenario("set-up", 1)],
    "set-up: all have come": [Scenario("set-up", 0)],
    "set-up: all but one are told": [Scenario("set-up", 0)],
    "set-up: mapped": [Scenario("set-up", victim) for victim in (0, 1, -1)],
    "header: not open yet": [
        Scenario("small allreduce", 0),
        Scenario("small broadcast"),
        Scenario("barrier", 1),
        Scenario("large allreduce"),
        Scenario("small allgather", 0),
    ],
    "header: open": [
        *(Scenario(call, ROOT, visit=3) for call in ("barrier", "small allreduce")),
        *(Scenario(call, 0, visit=2) for call in ("small alltoall", "large broadcast")),
        Scenario("set-up", 0, measures=True),
    ],
    "pipeline: through": [Scenario(call, 0) for call in ("large allreduce", "large allgather")],
    # At the first chunk, and between chunks.
    "pipeline: staged, not told": [
        Scenario("large allreduce", visit=6),
        *(Scenario("large broadcast", ROOT, visit) for visit in (1, 6)),
        Scenario("large reduce_scatter", visit=6),
        Scenario("large allgather"),
    ],
    "pipeline: staged": [
        Scenario("large allreduce", 0),
        *(Scenario("large broadcast", ROOT, visit) for visit in (1, 6)),
        Scenario("large reduce_scatter", 0),
        Scenario("large alltoall", 0, visit=6),
    ],
    "pipeline: reduced, not told": [
        *(Scenario("large allreduce", 1, visit) for visit in (1, 6)),
        Scenario("large reduce_scatter", 1),
    ],
    "pipeline: reduced": [
        *(Scenario("large reduce_scatter", visit=visit) for visit in (1, 6)),
        Scenario("large allreduce"),
    ],
    "pipeline: gathered, not told": [
        Scenario("large allreduce", 0),
        *(Scenario("large broadcast", 0, visit) for visit in (1, 6)),
        Scenario("large alltoall", 1),
    ],
    "pipeline: gathered": [
        Scenario("large allreduce", 1, visit=6),
        *(Scenario("large broadcast", 0, visit) for visit in (1, 6)),
        Scenario("large allgather", 0, visit=6),
    ],
    "empty: appointed": [Scenario("empty", victim) for victim in (0, -1)],
    "empty: shared": [Scenario("empty", 1)],
    "in place: done, not told": [
        Scenario("allreduce in place"),
        Scenario("broadcast in place", 0),
        Scenario("reduce_scatter in place"),
    ],
    "in place: done": [
        Scenario("allreduce in place", 0),
        Scenario("allgather in place"),
        Scenario("alltoall in place", 0),
    ],
    "claimed: done, not told": [
        Scenario("allreduce in place", crowded=True),
        Scenario("large allreduce", 0, visit=6, crowded=True, grouped=True),
    ],
    "claimed: told": [
        Scenario("allreduce in place", 0, crowded=True),
        Scenario("large allreduce", crowded=True, grouped=True),
    ],
    "claimed: staged, not told": [
        Scenario("large allreduce", visit=visit, crowded=True, grouped=True) for visit in (1, 6)
    ],
    "claimed: gathered, not told": [
        Scenario("large allreduce", 0, visit=6, crowded=True, grouped=True)
    ],
    # Rank 0 is a group, ranks 1 and 2 another: who counts last is chance, call by call.
    "header: counted, group not counted": [
        *(Scenario(call, grouped=True) for call in ("small allreduce", "large broadcast")),
    ],
    "header: all counted, not told": [
        *(Scenario(call, grouped=True) for call in ("small allgather", "large reduce_scatter")),
    ],
    "close: begun": [Scenario("close", 0)],
    "close: marked": [Scenario("close")],
}


class Told(NamedTuple):
    """How a rank learned that something is wrong."""

    kind: str
    line: str
    rank: int
    when: float


def do_call(comm: Comm, call: str, data: np.ndarray) -> None:
    if call == "empty":
        comm.empty(MANY)
    if call in ("barrier", "close", "set-up", "empty"):
        comm.barrier()
        return
    some = data[:12] if "small" in call else data
    if "broadcast" in call:
        comm.broadcast(some, root=ROOT)
    elif "allgather" in call:
        comm.allgather(some[: len(some) // comm.size])
    elif "alltoall" in call:
        comm.alltoall(some)
    elif "reduce_scatter" in call:
        comm.reduce_scatter(some)
    else:
        comm.allreduce(some, out=some)


def do_until_told(
    seat: Seat, path: str, size: int, config: Config, point: str, scenario: Scenario
) -> tuple[Told | None, list[str]]:
    """What this rank is told, and what it still holds after closing. The victim says that it is at
    the point, and goes on when it hears something.
    """
    fault_points.use()
    is_victim = seat.rank == scenario.victim % size
    at_point = lambda: (seat.tell("reached"), seat.pipe.recv())  # noqa: E731
    if scenario.crowded:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    held = holdings.descriptors()
    comm = None
    report = None
    seat.wait_for_all()
    try:
        if is_victim and scenario.call == "set-up":
            fault_points.on_visit(point, scenario.visit, at_point)
        comm = Comm.local(path, seat.rank, size, config)
        data = comm.empty(MANY, "float64") if "in place" in scenario.call else np.zeros(MANY)
        comm.barrier()
        if is_victim and scenario.call != "set-up":
            fault_points.on_visit(point, scenario.visit, at_point)
        if is_victim and scenario.call == "close":
            comm.close()
        while not comm.closed:
            do_call(comm, scenario.call, data)
    except HsgdError as error:
        report = Told(type(error).__name__, str(error), error.rank, time.monotonic())
    if comm is not None:
        comm.close()
    data = None  # a shared array keeps its memory
    return report, holdings.descriptors_since(held) + holdings.mappings()


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    fault_points.build()


def sizes_for(scenario: Scenario) -> list[int]:
    """Ranks that have a core each reduce slices of their own where the data lies."""
    if scenario.grouped:
        return [3]
    with_cores = scenario.call == "allreduce in place" and not scenario.crowded
    cores = len(os.sched_getaffinity(0))
    return [size for size in SIZES if size <= cores or not with_cores]


class Job(NamedTuple):
    """Ranks of which one fell at a point."""

    scenario: Scenario
    pool: Ranks
    victim: int
    fell: float


@contextlib.contextmanager
def fallen(
    point: str, timeout_s: Callable[[Scenario], float], number: signal.Signals
) -> Iterator[list[Job]]:
    """Ranks of every scenario and size, beside one another; each victim gets a signal there."""
    with contextlib.ExitStack() as stack:
        jobs = []
        for scenario in SCENARIOS[point]:
            config = replace(
                Config() if scenario.measures else FIXED,
                timeout_s=timeout_s(scenario),
                flat_ranks=1 if scenario.grouped else Config.flat_ranks,
            )
            for size in sizes_for(scenario):
                pool = stack.enter_context(Ranks(size))
                args = (meeting_point(), size, config, point, scenario)
                pool.start(do_until_told, *args)
                jobs.append(Job(scenario, pool, scenario.victim % size, 0.0))
        for index, (scenario, pool, victim, _) in enumerate(jobs):
            pool.let_go()
            assert pool.hear(victim) == "reached"
            jobs[index] = Job(scenario, pool, victim, fell=time.monotonic())
            pool.signal(victim, number)
        yield jobs


def survivors_told(pool: Ranks, victim: int) -> list[Told]:
    reports = []
    for outcome in pool.finish(on=[rank for rank in range(len(pool)) if rank != victim]):
        assert outcome.error is None, outcome.trace
        line, left = outcome.value
        assert left == []
        reports.append(line)
    return reports


def check_names(told: Told, victim: int) -> None:
    assert told.rank == victim, told
    assert f"rank {victim} " in told.line or f"rank(s) {victim} " in told.line, told
    assert "\n" not in told.line


@pytest.mark.parametrize("point", short_form("chaos", SCENARIOS))
def test_a_rank_killed_at_a_point_is_named_by_every_survivor(point: str) -> None:
    timeout_s = lambda scenario: TIMEOUT_S if scenario.late else PATIENT_S  # noqa: E731
    with fallen(point, timeout_s, signal.SIGKILL) as jobs:
        for scenario, pool, victim, killed in jobs:
            for report in survivors_told(pool, victim):
                check_names(report, victim)
                assert report.kind in (EITHER if scenario.late else ("PeerLost",)), report
                bound_s = DETECTED_S + (TIMEOUT_S if scenario.late else 0)
                assert report.when - killed < bound_s, (len(pool), report)


@pytest.mark.parametrize("point", short_form("chaos", SCENARIOS))
def test_a_rank_stopped_at_a_point_is_named_at_the_deadline_and_learns_of_it(point: str) -> None:
    with fallen(point, lambda _: TIMEOUT_S, signal.SIGSTOP) as jobs:
        try:
            for scenario, pool, victim, stopped in jobs:
                for report in survivors_told(pool, victim):
                    check_names(report, victim)
                    kinds = EITHER if scenario.call == "close" else ("CollectiveTimeout",)
                    assert report.kind in kinds, report
                    bound_s = TIMEOUT_S + DETECTED_S
                    assert report.when - stopped < bound_s, (len(pool), report)
        finally:
            for _, pool, victim, _ in jobs:
                pool.signal(victim, signal.SIGCONT)
                pool.send(victim, "go on")
        for scenario, pool, victim, _ in jobs:
            (outcome,) = pool.finish(on=[victim])
            assert outcome.error is None, outcome.trace
            report, left = outcome.value
            assert left == []
            assert (report is None) == (scenario.call == "close"), report


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_does_not_share_its_memory_is_waited_for_once(victim: int) -> None:
    """What is told is that it did not come there, not that it missed the vote on that."""
    scenario = Scenario("empty", victim)
    config = replace(FIXED, timeout_s=TIMEOUT_S)
    with Ranks(3) as pool:
        pool.start(do_until_told, meeting_point(), 3, config, "empty: appointed", scenario)
        pool.let_go()
        assert pool.hear(victim) == "reached"
        pool.signal(victim, signal.SIGSTOP)
        try:
            for report in survivors_told(pool, victim):
                assert report.kind == "CollectiveTimeout" and report.rank == victim
                assert report.line.startswith(f"empty: rank {victim} (pid {pool.pid(victim)}, ")
                assert "did not share its memory within 1 s" in report.line
        finally:
            pool.signal(victim, signal.SIGCONT)
            pool.send(victim, "go on")
        (outcome,) = pool.finish(on=[victim])
        assert outcome.error is None, outcome.trace


def test_every_point_of_the_sources_has_a_scenario() -> None:
    others = (test_box_faults.POINTS, test_shrink.POINTS, test_fault_tcp.SCENARIOS)
    tables = (SCENARIOS, test_fault_mpi.SCENARIOS, test_fault_nodes.SCENARIOS, *others)
    assert fault_points.named_in_sources() == {point for table in tables for point in table}


def test_only_the_build_for_tests_has_points() -> None:
    import hsgd

    traces = [b"reach_fault_point", *(name.encode() for name in fault_points.named_in_sources())]
    binaries = sorted(Path(hsgd.__file__).parent.glob("*.so"))
    assert len(binaries) >= 2
    for path in binaries:
        content = path.read_bytes()
        assert [trace for trace in traces if trace in content] == [], path.name
    content = b"".join(path.read_bytes() for path in fault_points.FOLDER.glob("libhsgd_*.so"))
    assert [trace for trace in traces if trace not in content] == []
