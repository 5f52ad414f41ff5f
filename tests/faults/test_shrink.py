"""Comm.shrink(): the ranks that are left agree on who they are, and go on.

Whoever dies, stops, or comes late, at whatever point, all who return from shrink() have the same
members; who is left out is told so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import fault_points
import holdings
from hsgd import Comm, HsgdError, PeerLost
from hsgd.config import Config
from hsgd.errors import CollectiveTimeout
from ranks import PATIENT, Ranks, Seat, meeting_point
from tiers import short_form

__all__ = ["POINTS"]

pytestmark = pytest.mark.long

DETECTED_S = 2.0
HASTY = Config(timeout_s=1.0, chunk_bytes=65536, oneshot_bytes=1024, store="ordinary")
SIZES = (2, 3, 4)

# Points that a rank passes within shrink(), and who passes them at the first time.
FIRST, LAST = 0, -1
POINTS = {
    "shrink: came": LAST,
    "shrink: about to decide": FIRST,
    "shrink: decided": LAST,
    "shrink: made": FIRST,
    "shrink: joined": LAST,
    "shrink: settled": FIRST,
}
OF_ONE = {"shrink: about to decide", "shrink: decided"}  # which only the quickest rank passes
SET_UP_POINTS = {
    "set-up: segment made": FIRST,
    "set-up: door open": FIRST,
    "set-up: connected": LAST,
    "set-up: introduced": LAST,
    "set-up: all have come": FIRST,
    "set-up: all but one are told": FIRST,
    "set-up: mapped": LAST,
}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    fault_points.build()


def numbers(comm: Comm, value: float) -> list[float]:
    """The values of all ranks, by way of a small and of a large collective."""
    small, large = np.zeros(comm.size), np.zeros((comm.size, 50_000))
    small[comm.rank] = value
    large[comm.rank] = value
    comm.allreduce(small, out=small)
    assert (comm.allreduce(large) == small[:, None]).all()
    return [float(each) for each in small]


def shrunk(comm: Comm, value: float) -> tuple[Comm, list[float]]:
    """Shrink until a communicator works, as a program would."""
    while True:
        with contextlib.suppress(PeerLost, CollectiveTimeout):
            comm = comm.shrink()
            return comm, numbers(comm, value)


def facts(seat: Seat, comm: Comm, members: list[float]) -> tuple[int, int, list[int]]:
    assert members[comm.rank] == seat.rank
    return comm.rank, comm.size, [int(each) for each in members]


def expected(left: list[int]) -> list[tuple[int, int, list[int]]]:
    return [(place, len(left), left) for place in range(len(left))]


def do_outlive(seat: Seat, path: str, size: int, config: Config) -> Any:
    """Collectives until somebody dies or stops; then go on with the rest."""
    seat.wait_for_all()
    comm = Comm.local(path, seat.rank, size, config)
    comm.barrier()
    seat.tell("ready")
    with contextlib.suppress(PeerLost, CollectiveTimeout):
        while True:
            comm.allreduce(np.ones(50_000))
    fresh, members = shrunk(comm, seat.rank)
    assert comm.closed
    with fresh:
        return facts(seat, fresh, members)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("victim", ["first", "last"])
def test_the_survivors_of_a_death_go_on_in_the_old_order(size: int, victim: str) -> None:
    dead = 0 if victim == "first" else size - 1
    left = [rank for rank in range(size) if rank != dead]
    with Ranks(size) as pool:
        pool.start(do_outlive, meeting_point(), size, PATIENT)
        pool.let_go()
        assert [pool.hear(rank) for rank in range(size)] == ["ready"] * size
        pool.signal(dead, signal.SIGKILL)
        outcomes = pool.finish(on=left)
        assert [outcome.value for outcome in outcomes] == expected(left), outcomes


@pytest.mark.parametrize("size", SIZES)
def test_a_stopped_rank_is_left_out_and_told_so_when_it_goes_on(size: int) -> None:
    stopped = size // 2
    left = [rank for rank in range(size) if rank != stopped]
    with Ranks(size) as pool:
        pool.start(do_outlive, meeting_point(), size, HASTY)
        pool.let_go()
        assert [pool.hear(rank) for rank in range(size)] == ["ready"] * size
        pool.signal(stopped, signal.SIGSTOP)
        try:
            outcomes = pool.finish(on=left)
            assert [outcome.value for outcome in outcomes] == expected(left), outcomes
        finally:
            pool.signal(stopped, signal.SIGCONT)
        check_left_out(pool.finish(on=[stopped])[0].error, stopped, left)


def check_left_out(error: BaseException | None, rank: int, left: list[int]) -> None:
    assert type(error) is HsgdError, error
    others = ", ".join(map(str, left))
    assert str(error).startswith(f"rank {rank} (this process) was left out"), error
    assert f"rank(s) {others} continued without it" in str(error)
    assert error.rank == rank


def do_shrink_to_nothing(seat: Seat, path: str, size: int) -> list[Any]:
    """One rank after the other leaves by its end; the rest shrinks each time."""
    comm = Comm.local(path, seat.rank, size, PATIENT)
    seen = []
    for last in range(size - 1, 0, -1):
        if seat.rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            comm.barrier()
        comm, members = shrunk(comm, seat.rank)
        seen.append(facts(seat, comm, members))
    comm.close()
    return seen


def test_a_communicator_can_shrink_again_and_again_down_to_one_rank() -> None:
    with Ranks(4) as pool:
        pool.start(do_shrink_to_nothing, meeting_point(), 4)
        outcome = pool.finish(on=[0])[0]
        assert outcome.value == [(0, size, list(range(size))) for size in (3, 2, 1)], outcome


def do_shrink_healthy(seat: Seat, path: str, size: int, away: int) -> Any:
    """All but the last `away` ranks shrink; those come when the others are through."""
    seat.wait_for_all()
    comm = Comm.local(path, seat.rank, size, HASTY)
    comm.barrier()
    if seat.rank >= size - away:
        seat.pipe.recv()
        comm.shrink()
    fresh, members = shrunk(comm, seat.rank)
    with fresh:
        return facts(seat, fresh, members)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_all_live_may_shrink_to_a_communicator_of_all(size: int) -> None:
    with Ranks(size) as pool:
        pool.start(do_shrink_healthy, meeting_point(), size, 0)
        pool.let_go()
        assert [outcome.value for outcome in pool.finish()] == expected([*range(size)])


def test_a_living_rank_that_comes_too_late_is_told_that_it_was_left_out() -> None:
    with Ranks(3) as pool:
        pool.start(do_shrink_healthy, meeting_point(), 3, 1)
        pool.let_go()
        values = [outcome.value for outcome in pool.finish(on=[0, 1])]
        assert values == expected([0, 1])
        pool.send(2, "come")
        check_left_out(pool.finish(on=[2])[0].error, 2, [0, 1])


def do_wait_for_who_shrinks(seat: Seat, path: str) -> str:
    comm = Comm.local(path, seat.rank, 2, PATIENT)
    comm.barrier()
    line = ""
    if seat.rank == 1:
        with pytest.raises(PeerLost) as caught:
            comm.barrier()
        line = str(caught.value)
    shrunk(comm, seat.rank)[0].close()
    return line


def test_a_rank_in_a_collective_learns_that_another_shrinks() -> None:
    with Ranks(2) as pool:
        _, line = pool.run(do_wait_for_who_shrinks, meeting_point())
        assert line == "rank 0 called shrink()"


def do_shrink_twice(seat: Seat, path: str) -> None:
    from hsgd import _native

    native = _native.Comm.local(path, seat.rank, 2, _native.Options())
    fresh = native.shrink(30.0)
    fresh.barrier()
    with pytest.raises(HsgdError, match="was shrunk before"):
        native.shrink(30.0)
    with pytest.raises(ValueError, match="timeout_s is 0"):
        fresh.shrink(0.0)
    fresh.barrier()


def test_what_was_shrunk_cannot_be_shrunk_again() -> None:
    with Ranks(2) as pool:
        pool.run(do_shrink_twice, meeting_point())


def do_shrink_past(
    seat: Seat, path: str, size: int, config: Config, point: str, victim: int, dead: int
) -> Any:
    """All that live shrink; the victim stays at the point."""
    fault_points.use()
    seat.wait_for_all()
    comm = Comm.local(path, seat.rank, size, config)
    comm.barrier()
    if seat.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    if seat.rank == victim:
        fault_points.on_visit(point, 1, lambda: (seat.tell("reached"), seat.pipe.recv()))
    elif point in OF_ONE:
        fault_points.on_visit("shrink: came", 1, seat.pipe.recv)
    held = holdings.descriptors()
    fresh, members = shrunk(comm, seat.rank)
    when = time.monotonic()
    with fresh:
        value = facts(seat, fresh, members)
    return value, holdings.descriptors_since(held), when


Job = tuple[Ranks, int, list[int], float]  # the victim, those that are left, when it fell


def fallen(
    stack: contextlib.ExitStack, point: str, place: int, config: Config, number: signal.Signals
) -> list[Job]:
    """Pools of all sizes, one of them after a death; the victim of each gets a signal there."""
    jobs = []
    for size, dead in ((2, -1), (3, -1), (4, -1), (4, 1)):
        victim = place % size
        left = [rank for rank in range(size) if rank not in (victim, dead)]
        pool = stack.enter_context(Ranks(size))
        pool.start(do_shrink_past, meeting_point(), size, config, point, victim, dead)
        jobs.append((pool, victim, left, 0.0))
    for index, (pool, victim, left, _) in enumerate(jobs):
        pool.let_go()
        assert pool.hear(victim) == "reached"
        jobs[index] = (pool, victim, left, time.monotonic())
        pool.signal(victim, number)
        for rank in left if point in OF_ONE else ():  # held so that the victim came to the point
            pool.send(rank, "go on")
    return jobs


ALL_POINTS = [*POINTS.items(), *SET_UP_POINTS.items()]


@pytest.mark.parametrize(("point", "place"), short_form("chaos", ALL_POINTS))
def test_a_death_during_shrink_makes_it_go_on_without_that_rank(point: str, place: int) -> None:
    with contextlib.ExitStack() as stack:
        for pool, _, left, killed in fallen(stack, point, place, PATIENT, signal.SIGKILL):
            outcomes = pool.finish(on=left)
            assert [outcome.error for outcome in outcomes] == [None] * len(left), outcomes
            assert [outcome.value[0] for outcome in outcomes] == expected(left)
            for outcome in outcomes:
                assert outcome.value[1] == []
                assert outcome.value[2] - killed < DETECTED_S


@pytest.mark.parametrize(("point", "place"), short_form("chaos", ALL_POINTS))
def test_a_rank_stopped_during_shrink_is_left_out(point: str, place: int) -> None:
    with contextlib.ExitStack() as stack:
        jobs = fallen(stack, point, place, HASTY, signal.SIGSTOP)
        try:
            for pool, _, left, _ in jobs:
                outcomes = pool.finish(on=left)
                assert [outcome.error for outcome in outcomes] == [None] * len(left), outcomes
                assert [outcome.value[0] for outcome in outcomes] == expected(left)
        finally:
            for pool, victim, _, _ in jobs:
                pool.signal(victim, signal.SIGCONT)
                pool.send(victim, "go on")
        for pool, victim, _, _ in jobs:
            (outcome,) = pool.finish(on=[victim])
            assert type(outcome.error) is HsgdError, outcome
            assert "was left out" in str(outcome.error)
