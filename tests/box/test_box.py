"""ParameterBox inside a node: exact sums, whole reads, keys, and what it says when misused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from box_programs import CHECKS, check_all
from hsgd import CollectiveTimeout, ParameterBox
from outcomes import told_by
from ranks import Ranks, Seat, meeting_point
from toolkit.forked_child import in_forked_child

__all__: list[str] = []

NAMES = [check.__name__ for check in CHECKS]
OPERATIONS = 100_000
READS = 100_000
DETECTED_S = 5.0


def fresh_key() -> str:
    return meeting_point().lstrip("@")


def run_checks(seat: Seat, path: str, size: int) -> list[str]:
    return check_all(seat.comm(path, size))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_box_of_one_node_keeps_its_promises(size: int) -> None:
    with Ranks(size) as pool:
        assert pool.run(run_checks, meeting_point(), size) == [NAMES] * size


def push_integers(seat: Seat, key: str, pushes: int, count: int) -> np.ndarray[Any, Any]:
    """What this rank pushed in all."""
    random = np.random.default_rng(seat.rank)
    total = np.zeros(count, np.int64)
    with ParameterBox.attach(key) as box:
        deltas = random.integers(-3, 4, (64, count)).astype(np.float32)
        for push in range(pushes):
            delta = deltas[push % 64]
            box.accumulate(delta)
            total += delta.astype(np.int64)
    return total


def test_the_sum_of_a_hundred_thousand_pushes_of_eight_processes_is_exact() -> None:
    count, start = 300, np.arange(300, dtype=np.float32)
    key = fresh_key()
    with ParameterBox.create(key, start, chunk_bytes=128) as box, Ranks(8) as pool:
        totals = pool.run(push_integers, key, OPERATIONS // 8, count, limit_s=120.0)
        out = np.empty(count, np.float32)
        assert box.read(out) == OPERATIONS
        assert np.array_equal(out - start, np.sum(totals, axis=0))
        assert np.abs(out).max() < 2**24


def change_until_told(seat: Seat, key: str, count: int) -> None:
    """Pushes that leave all values of a chunk equal and never smaller."""
    with ParameterBox.attach(key) as box:
        seat.tell("writes")
        ones = np.ones(count, np.float32)
        while not box.counter(0):
            box.accumulate(ones)


def read_whole(seat: Seat, key: str, chunk_count: int, reads: int, changes: int) -> int:
    """How many reads it took to read so often and to see so many changes."""
    out, last, seen, read = np.empty(chunk_count, np.float32), -1.0, 0, 0
    with ParameterBox.attach(key) as box:
        while read < reads or seen < changes:
            if read % 64 == 0:
                os.sched_yield()  # writers may share the core
            offset = read % 2 * chunk_count
            box.read(out, offset)
            assert out.min() == out.max(), (read, out.min(), out.max())
            if offset == 0:
                assert out[0] >= last
                seen += out[0] != last
                last = out[0]
            read += 1
    return read


def test_no_read_is_torn_while_others_write() -> None:
    chunk, key = 1024, fresh_key()
    with (
        ParameterBox.create(key, count=2 * chunk, chunk_bytes=4 * chunk) as box,
        Ranks(4) as pool,
    ):
        pool.start(change_until_told, key, 2 * chunk, on=(0, 1))
        assert [pool.hear(rank) for rank in (0, 1)] == ["writes"] * 2
        words = (key, chunk, READS // 2, 100)
        done = pool.run(read_whole, *words, on=(2, 3), limit_s=120.0)
        box.fetch_add(0)
        for outcome in pool.finish(on=(0, 1)):
            assert outcome.error is None, outcome.trace
        assert sum(done) >= READS


@pytest.mark.parametrize(
    ("narrow", "count", "offset"), [(False, 90, 7), (True, 90, 7), (True, 0, 0)]
)
def test_a_part_that_is_added_tells_the_new_values(narrow: bool, count: int, offset: int) -> None:
    start = np.arange(100, dtype=np.float32)
    with ParameterBox.create(fresh_key(), start, chunk_bytes=64) as box:
        delta = np.full(count, 0.5, np.float32)
        part = (delta.view(np.uint16)[1::2].copy() if narrow else delta).view(np.uint8)
        sums, out = np.empty(count, np.float32), np.empty(count, np.float32)
        add = box._native.accumulate_part
        assert add(part, narrow, offset, sums, 1.0, False) == 0
        box.read(out, offset)
        assert (sums == start[offset : offset + count] + 0.5).all() and (sums == out).all()
        with pytest.raises(ValueError, match=f"{count} are needed"):
            add(part, narrow, offset, np.empty(count + 1, np.float32), 1.0, False)


def hold(seat: Seat, key: str) -> str:
    """Have a box open until told otherwise."""
    with ParameterBox.attach(key) as box:
        seat.tell("attached")
        report = seat.pipe.recv()
        box.accumulate(np.ones(10, np.float32))
    return str(report)


def test_late_comers_get_the_box_from_whoever_has_it() -> None:
    key = fresh_key()
    with Ranks(3) as pool:
        with ParameterBox.create(key, np.full(10, 7, np.float32)):
            pool.start(hold, key, on=(0,))
            assert pool.hear(0) == "attached"
        pool.start(hold, key, on=(1,))  # from rank 0: the maker has closed it
        assert pool.hear(1) == "attached"
        pool.signal(0, signal.SIGKILL)
        pool.start(hold, key, on=(2,))  # from rank 1
        assert pool.hear(2) == "attached"
        with pytest.raises(ValueError, match=f'there is a box with the key "{key}"'):
            ParameterBox.create(key, count=1)
        for rank in (1, 2):
            pool.send(rank, "go")
        pool.finish(on=(1, 2))
    with pytest.raises(CollectiveTimeout, match="nobody on this node has made it"):
        ParameterBox.attach(key, timeout_s=0.0)  # nobody has it any more
    with ParameterBox.create(key, count=1):
        pass


def attach_and_read(seat: Seat, key: str) -> float:
    with ParameterBox.attach(key, timeout_s=30.0) as box:
        out = np.empty(1, np.float32)
        box.read(out)
        return float(out[0])


def test_who_attaches_waits_for_the_box_to_be_made() -> None:
    key = fresh_key()
    with Ranks(2) as pool:
        pool.start(attach_and_read, key)
        with ParameterBox.create(key, np.full(1, 3, np.float32)):
            assert [outcome.value for outcome in pool.finish()] == [3.0, 3.0]


def test_a_holder_that_is_stopped_does_not_keep_others_out() -> None:
    key = fresh_key()
    with Ranks(2) as pool, ParameterBox.create(key, np.full(1, 3, np.float32)):
        pool.start(hold, key, on=(0,))
        assert pool.hear(0) == "attached"
        pool.signal(0, signal.SIGSTOP)
        try:
            for _ in range(5):  # each may be asked of the stopped one first
                assert pool.run(attach_and_read, key, on=(1,)) == [3.0]
        finally:
            pool.signal(0, signal.SIGCONT)
        pool.send(0, "go")


def leak_nothing(seat: Seat) -> list[str]:
    def left() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:hsgd")
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps

    key = f"leaks-{os.getpid()}"
    ParameterBox.create(key, count=10).close()
    before = left()
    for _ in range(20):
        with ParameterBox.create(key, count=100_000) as first, ParameterBox.attach(key) as second:
            first.accumulate(np.ones(100_000, np.float32))
            assert second.version == 1
    return [] if left() == before else [str(before), str(left())]


def test_nothing_is_left_of_a_closed_box() -> None:
    with Ranks(1) as pool:
        assert pool.run(leak_nothing) == [[]]


def use_in_a_fork(seat: Seat) -> Any:
    """What a forked child is told by the box that it inherited, and by one that it attaches."""
    key = f"fork-{os.getpid()}"
    with ParameterBox.create(key, np.full(3, 5, np.float32)) as box:

        def report() -> tuple[tuple[str, str], list[float]]:
            out = np.empty(3, np.float32)
            told = told_by(lambda: box.read(out))
            with ParameterBox.attach(key) as own:
                own.read(out)
            return told, out.tolist()

        found = in_forked_child(report)
        box.accumulate(np.ones(3, np.float32))
        return found


def test_a_forked_child_attaches_by_the_key() -> None:
    with Ranks(1) as pool:
        (((kind, line), values),) = pool.run(use_in_a_fork)
        assert kind == "HsgdError" and "a forked child attaches by the key" in line
        assert values == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("key", "options", "line"),
    [
        ("", {"count": 1}, "a key has 1 to 64 characters, this one 0"),
        ("k" * 65, {"count": 1}, "a key has 1 to 64 characters, this one 65"),
        ("k", {}, "either initial values or a count"),
        ("k", {"count": 1, "initial": np.ones(1)}, "either initial values or a count"),
        ("k", {"count": -1}, "count is -1"),
        ("k", {"count": 1, "counters": -1}, "counters is -1"),
        ("k", {"count": 1, "chunk_bytes": 100}, "chunk_bytes is 100; give a multiple of 64"),
        ("k", {"count": 2**41}, "values are too many"),
    ],
)
def test_values_that_cannot_work_are_refused(key: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        ParameterBox.create(key, **options)


def test_a_box_that_does_not_fit_in_memory_is_an_exception() -> None:
    with pytest.raises(MemoryError, match="takes the bytes of its values and up to 64 chunks"):
        ParameterBox.create(fresh_key(), count=2**38)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        ParameterBox.create(fresh_key(), np.ones(3))
    with pytest.raises(
        TypeError, match=r"use ParameterBox\.create, ParameterBox\.attach or ParameterBox\.over"
    ):
        ParameterBox()


def test_a_box_left_open_does_not_keep_the_interpreter() -> None:
    code = (
        "import numpy as np, hsgd\n"
        f"box = hsgd.ParameterBox.create({fresh_key()!r}, count=10)\n"
        "box.accumulate(np.ones(10, np.float32))\n"
        "print(box)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "10 values" in done.stdout and done.stderr == ""
