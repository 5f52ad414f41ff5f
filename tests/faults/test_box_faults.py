"""A process that is killed or stopped in the midst of a change: the others go on.

The points are those of the core; tests/faults/test_fault_points.py checks that all of them are
here.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest

import fault_points
from hsgd import CollectiveTimeout, ParameterBox
from ranks import Ranks, Seat, meeting_point

__all__ = ["POINTS"]

pytestmark = pytest.mark.long

LOCKS, LOCKED = 3, 16  # chunks of a lock
CHUNKS, CHUNK = LOCKS * LOCKED, 32  # of values
COUNT = CHUNKS * CHUNK - 5
PUSHES = 200
VISITS = (1, 22, CHUNKS)  # at the beginning of a push, half-way, at its end
HOLDS = "box: holds a lock"
# Of who dies or stops there, at a chunk: whether that chunk is changed.
IN_A_CHUNK = {
    "box: chunk made, not told": False,
    "box: chunk told": True,
    "box: chunk half home": True,
    "box: chunk home": True,
}
BEFORE = "box: holds a journal"
POINTS = {BEFORE, HOLDS, *IN_A_CHUNK}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    fault_points.build()


def fall_in_a_push(seat: Seat, key: str, point: str, visit: int) -> None:
    fault_points.use()
    fault_points.on_visit(point, visit, lambda: (seat.tell("reached"), seat.pipe.recv()))
    with ParameterBox.attach(key) as box:
        box.accumulate(np.ones(box.count, np.float32))


def fall_between_read_and_push(seat: Seat, key: str) -> None:
    with ParameterBox.attach(key) as box:
        delta = np.empty(COUNT, np.float32)
        box.elastic([np.zeros(COUNT, np.float32)], 0.5, delta)
        seat.tell("reached")
        seat.pipe.recv()


def push_many(seat: Seat, key: str) -> int:
    with ParameterBox.attach(key, timeout_s=30.0) as box:
        ones = np.ones(box.count, np.float32)
        for _ in range(PUSHES):
            box.accumulate(ones)
        return box.recoveries


def push_once(seat: Seat, key: str, timeout_s: float) -> None:
    with ParameterBox.attach(key, timeout_s=timeout_s) as box:
        box.accumulate(np.ones(box.count, np.float32))


def chunks_of(box: ParameterBox) -> list[float]:
    """The value of each chunk, which must be one."""
    out = np.empty(box.count, np.float32)
    box.read(out)
    parts = [out[at : at + CHUNK] for at in range(0, box.count, CHUNK)]
    assert all((part == part[0]).all() for part in parts), parts
    return [float(part[0]) for part in parts]


@pytest.mark.parametrize(
    ("point", "visit"),
    [
        (BEFORE, 1),
        *((HOLDS, visit) for visit in range(1, LOCKS + 1)),
        *((point, visit) for point in IN_A_CHUNK for visit in VISITS),
    ],
)
def test_who_dies_in_a_push_leaves_whole_chunks_and_no_lock(point: str, visit: int) -> None:
    key = meeting_point().lstrip("@")
    with (
        Ranks(3) as pool,
        ParameterBox.create(key, count=COUNT, chunk_bytes=4 * CHUNK) as box,
    ):
        pool.start(fall_in_a_push, key, point, visit, on=(2,))
        assert pool.hear(2) == "reached"
        pool.start(push_many, key, on=(0,))  # beside the victim that holds a lock
        pool.signal(2, signal.SIGKILL)
        pool.start(push_many, key, on=(1,))  # and after it
        for outcome in pool.finish(on=(0, 1)):
            assert outcome.error is None, outcome.trace
        finished = visit if IN_A_CHUNK.get(point) else visit - 1
        if point == HOLDS:
            finished *= LOCKED
        extra = sorted(value - 2 * PUSHES for value in chunks_of(box))
        assert extra == [0.0] * (CHUNKS - finished) + [1.0] * finished
        assert box.recoveries == (point != BEFORE)
        assert box.version == 2 * PUSHES  # a change that was not finished is not counted


def test_who_dies_between_read_and_push_changes_nothing() -> None:
    key = meeting_point().lstrip("@")
    with Ranks(2) as pool, ParameterBox.create(key, count=COUNT, chunk_bytes=4 * CHUNK) as box:
        pool.start(fall_between_read_and_push, key, on=(1,))
        assert pool.hear(1) == "reached"
        pool.signal(1, signal.SIGKILL)
        assert pool.run(push_many, key, on=(0,)) == [0]
        assert chunks_of(box) == [PUSHES] * CHUNKS


def test_who_dies_while_it_makes_good_for_a_dead_one_leaves_that_to_the_next() -> None:
    key = meeting_point().lstrip("@")
    with Ranks(3) as pool, ParameterBox.create(key, count=CHUNK, chunk_bytes=4 * CHUNK) as box:
        # The first has told of its change, which lies in its journal; the second copies it home.
        for victim, point in ((1, "box: chunk told"), (2, "box: chunk half home")):
            pool.start(fall_in_a_push, key, point, 1, on=(victim,))
            assert pool.hear(victim) == "reached"
            pool.signal(victim, signal.SIGKILL)
            assert chunks_of(box) == [1.0]
        assert pool.run(push_many, key, on=(0,)) == [1]
        assert chunks_of(box) == [1.0 + PUSHES]


def test_who_stops_with_the_only_journal_is_named_to_writers() -> None:
    key = meeting_point().lstrip("@")
    with Ranks(2) as pool, ParameterBox.create(key, count=CHUNK, chunk_bytes=4 * CHUNK) as box:
        pool.start(fall_in_a_push, key, BEFORE, 1, on=(1,))
        assert pool.hear(1) == "reached"
        pool.signal(1, signal.SIGSTOP)
        try:
            (outcome,) = pool.outcomes(push_once, key, 0.2, on=(0,))
            assert isinstance(outcome.error, CollectiveTimeout)
            waits = f"pid {pool.pid(0)} waits for journal 0 (all are taken) of the box"
            assert waits in str(outcome.error)
            assert f"which pid {pool.pid(1)} has held for 0.2 s" in str(outcome.error)
            assert chunks_of(box) == [0.0]
        finally:
            pool.signal(1, signal.SIGCONT)
        pool.send(1, "go on")
        pool.finish(on=(1,))
        assert chunks_of(box) == [1.0]


def test_who_stops_while_it_makes_good_for_a_dead_one_is_named_to_writers() -> None:
    key = meeting_point().lstrip("@")
    two_locks = 2 * LOCKED * CHUNK  # and so two journals
    with Ranks(3) as pool, ParameterBox.create(key, count=two_locks, chunk_bytes=4 * CHUNK) as box:
        # It has journal 1, with a change in the chunks of lock 1.
        pool.start(fall_in_a_push, key, "box: chunk told", 1, on=(1,))
        assert pool.hear(1) == "reached"
        pool.signal(1, signal.SIGKILL)
        # It has journal 0 and, after its own chunks, lock 1, where it copies for the dead one.
        pool.start(fall_in_a_push, key, "box: chunk half home", LOCKED + 1, on=(2,))
        assert pool.hear(2) == "reached"
        pool.signal(2, signal.SIGSTOP)
        try:
            (outcome,) = pool.outcomes(push_once, key, 0.2, on=(0,))
            assert isinstance(outcome.error, CollectiveTimeout)
            waits = f"pid {pool.pid(0)} waits for journal 1 (all are taken) with its change of"
            assert f"{waits} chunk {LOCKED}" in str(outcome.error)
            assert f"which pid {pool.pid(2)} has held for 0.2 s" in str(outcome.error)
        finally:
            pool.signal(2, signal.SIGCONT)
        pool.send(2, "go on")
        pool.finish(on=(2,))
        assert sorted(chunks_of(box)) == [1.0] * (2 * LOCKED - 1) + [2.0]


@pytest.mark.parametrize("point", IN_A_CHUNK)
def test_who_stops_with_a_lock_is_named_to_writers_and_stops_no_reader(point: str) -> None:
    key = meeting_point().lstrip("@")
    with Ranks(2) as pool, ParameterBox.create(key, count=COUNT, chunk_bytes=4 * CHUNK) as box:
        pool.start(fall_in_a_push, key, point, 3, on=(1,))
        assert pool.hear(1) == "reached"
        pool.signal(1, signal.SIGSTOP)
        try:
            finished = 3 if IN_A_CHUNK[point] else 2
            assert sorted(chunks_of(box)) == [0.0] * (CHUNKS - finished) + [1.0] * finished
            (outcome,) = pool.outcomes(push_once, key, 0.2, on=(0,))
            assert isinstance(outcome.error, CollectiveTimeout)
            assert f"pid {pool.pid(0)} waits for chunks " in str(outcome.error)
            assert f"which pid {pool.pid(1)} has held for 0.2 s" in str(outcome.error)
        finally:
            pool.signal(1, signal.SIGCONT)
        pool.send(1, "go on")
        pool.finish(on=(1,))
        pool.run(push_once, key, 30.0, on=(0,))
        values = chunks_of(box)
        # One push had to leave out what was locked.
        assert sorted(values) == [2.0] * LOCKED + [3.0] * (CHUNKS - LOCKED)
