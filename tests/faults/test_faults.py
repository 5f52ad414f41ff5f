"""A rank that dies, hangs or leaves is named to the others in time, and nothing is left behind.

Ranks are killed and stopped at points that they announce, or that the kernel shows. The bounds in
seconds are promises of the core, not measurements.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdings
from hsgd import CollectiveTimeout, Comm, HsgdError, PeerLost
from hsgd.config import Config
from ranks import PATIENT, Ranks, Seat, meeting_point, until_asleep

__all__: list[str] = []

DETECTED_S = 2.0  # a death is told within a second by design; twice that is the promise
TIMEOUT_S = 1.5
HASTY = Config(timeout_s=TIMEOUT_S)
WAIT_S = 2.0  # how long the cost of waiting is measured
LARGE = 3_000_000  # elements: dozens of pipeline steps

CALLS: dict[str, Callable[[Comm, np.ndarray], Any]] = {
    "small allreduce": lambda comm, data: comm.allreduce(data[:5]),
    "large allreduce": lambda comm, data: comm.allreduce(data, out=data),
    "small broadcast": lambda comm, data: comm.broadcast(data[:5], root=0),
    "large broadcast": lambda comm, data: comm.broadcast(data, root=comm.size - 1),
    "barrier": lambda comm, data: comm.barrier(),
}
Told = tuple[str, str, int, float]  # class, message and rank of the error, and when it came


def do_until_error(
    seat: Seat, path: str, size: int, config: Config, call: str, then: str = "stay"
) -> Told:
    """Repeat a collective until it fails; a call that all ranks have joined may still succeed."""
    comm = seat.comm(path, size, config)
    data = np.ones(LARGE)
    seat.tell("ready")
    seat.pipe.recv()
    try:
        for _ in range(1_000_000):
            CALLS[call](comm, data)
    except HsgdError as error:
        report = (type(error).__name__, str(error), rank_of(error), time.monotonic())
    if then == "exit":
        seat.tell(report)
        os._exit(1)
    with pytest.raises(HsgdError, match="broken since an earlier error"):
        comm.barrier()
    comm.close()
    return report


def rank_of(error: HsgdError) -> int:
    """The rank that an error of the core is about."""
    return error.rank


def _begin(pool: Ranks, *args: Any) -> None:
    pool.start(do_until_error, *args)
    for rank in range(len(pool)):
        assert pool.hear(rank) == "ready"


def _check_peer_lost(told: Told, rank: int, pid: int, since: float) -> None:
    kind, line, named, when = told
    assert kind == "PeerLost" and "\n" not in line
    assert named == rank
    assert f"rank {rank} (pid {pid}, " in line and line.endswith(" died")
    assert when - since < DETECTED_S


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_killed_while_it_waits_in_a_collective_is_named(size: int, call: str) -> None:
    victim, late = size - 1, 0
    with Ranks(size) as pool:
        _begin(pool, meeting_point(), size, PATIENT, call)
        pid = pool.pid(victim)
        for rank in range(1, size):
            pool.send(rank, "go")
        until_asleep(pid)
        pool.signal(victim, signal.SIGKILL)
        pool.send(late, "go")
        killed = time.monotonic()
        for outcome in pool.finish(on=range(size - 1)):
            assert outcome.error is None, outcome.trace
            _check_peer_lost(outcome.value, victim, pid, killed)


@pytest.mark.parametrize("then", ["stay", "exit"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_killed_while_it_works_is_named_by_all_even_if_some_exit(
    size: int, call: str, then: str
) -> None:
    victim = size // 2
    with Ranks(size) as pool:
        _begin(pool, meeting_point(), size, PATIENT, call, then)
        pid = pool.pid(victim)
        for rank in range(size):
            pool.send(rank, "go")
        select.select([], [], [], 0.02)  # some calls into the loop; any moment will do
        pool.signal(victim, signal.SIGKILL)
        killed = time.monotonic()
        for rank in set(range(size)) - {victim}:
            report = pool.hear(rank) if then == "exit" else pool.finish(on=[rank])[0].value
            _check_peer_lost(report, victim, pid, killed)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_a_stopped_rank_is_named_when_the_deadline_passes(size: int, call: str) -> None:
    stopped = 1
    with Ranks(size) as pool:
        _begin(pool, meeting_point(), size, HASTY, call)
        pid = pool.pid(stopped)
        for rank in range(size):
            pool.send(rank, "go")
        select.select([], [], [], 0.02)  # any moment will do
        pool.signal(stopped, signal.SIGSTOP)
        since = time.monotonic()
        others = [rank for rank in range(size) if rank != stopped]
        try:
            for outcome in pool.finish(on=others):
                assert outcome.error is None, outcome.trace
                kind, line, named, when = outcome.value
                assert (kind, named) == ("CollectiveTimeout", stopped)
                assert f"rank {stopped} (pid {pid}, " in line and "HSGD_TIMEOUT_S" in line
                assert when - since < TIMEOUT_S + DETECTED_S
        finally:
            pool.signal(stopped, signal.SIGCONT)
        outcome = pool.finish(on=[stopped])[0]
        assert outcome.value[0] in ("CollectiveTimeout", "PeerLost"), (
            "it learns that the others gave up"
        )


def do_close_early(seat: Seat, path: str, size: int, call: str) -> Told | None:
    comm = seat.comm(path, size)
    data = np.ones(LARGE)
    comm.barrier()
    if seat.rank == size - 1:
        comm.close()
        return None
    with pytest.raises(PeerLost) as caught:
        CALLS[call](comm, data)
    return "PeerLost", str(caught.value), rank_of(caught.value), time.monotonic()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_closes_early_is_named_to_those_who_wait(size: int, call: str) -> None:
    with Ranks(size) as pool:
        for reports in pool.run(do_close_early, meeting_point(), size, call)[:-1]:
            assert reports[2] == size - 1
            assert reports[1].endswith("closed its communicator")


def do_finish_and_close(seat: Seat, path: str, size: int, rounds: int) -> int:
    """The last collective succeeds though some ranks close as soon as they are through."""
    for turn in range(rounds):
        with Comm.local(f"{path}-{turn}", seat.rank, size, PATIENT) as comm:
            comm.allreduce(np.ones(50_000 if turn % 2 else 5))
    return rounds


@pytest.mark.parametrize("size", [2, 4])
def test_closing_right_after_a_collective_is_not_early(size: int) -> None:
    with Ranks(size) as pool:
        assert pool.run(do_finish_and_close, meeting_point(), size, 60) == [60] * size


def do_end_after_finish(seat: Seat, path: str, size: int, count: int) -> None:
    comm = Comm.local(path, seat.rank, size, PATIENT)
    comm.allreduce(np.ones(count))
    if seat.rank == 0:
        os._exit(0)  # without closing, as soon as it has its own result
    seat.tell("done")


@pytest.mark.parametrize("count", [5, 50_000])
def test_who_is_through_with_a_small_collective_may_end(count: int) -> None:
    """A rank that ended has given all that it owed; the others still get their results."""
    for _ in range(10):
        with Ranks(3) as pool:
            pool.start(do_end_after_finish, meeting_point(), 3, count)
            assert [pool.hear(rank) for rank in (1, 2)] == ["done", "done"]
            pool.finish(on=(1, 2))


def do_survive(seat: Seat, path: str, size: int) -> list[str]:
    """Descriptors held more than before, and what of ours is mapped, after PeerLost and close."""
    held = holdings.descriptors()
    comm = Comm.local(path, seat.rank, size, PATIENT)
    seat.tell("ready")
    with contextlib.suppress(PeerLost):
        while True:
            comm.allreduce(np.ones(100_000))
    comm.close()
    sockets = Path("/proc/net/unix").read_text().splitlines()
    left = holdings.descriptors_since(held) + holdings.mappings()
    return left + [line for line in sockets if line.endswith(path)]


def test_nothing_is_left_of_a_communicator_whose_peer_was_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with Ranks(3) as pool:
        pool.start(do_survive, path, 3)
        for rank in range(3):
            pool.hear(rank)
        pool.signal(1, signal.SIGKILL)
        assert [outcome.value for outcome in pool.finish(on=(0, 2))] == [[], []]
    assert not os.path.exists(path)  # and nothing in /dev/shm: conftest.py looks after each test


def do_wait_for_long(seat: Seat, path: str, size: int, call: str) -> tuple[float, float]:
    """CPU and wall seconds of one collective in which the last rank comes late."""
    comm = seat.comm(path, size)
    data = np.ones(LARGE)
    comm.barrier()
    if seat.rank == size - 1:
        seat.tell("the others wait")
        seat.pipe.recv()
    usage, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    CALLS[call](comm, data)
    after, end = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    return after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime, end - begin


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("call", ["barrier", "small allreduce"])
def test_waiting_ranks_leave_the_cores_to_others(size: int, call: str) -> None:
    with Ranks(size) as pool:
        pool.start(do_wait_for_long, meeting_point(), size, call)
        pool.hear(size - 1)
        select.select([], [], [], WAIT_S)  # what is measured
        pool.send(size - 1, "come")
        for outcome in pool.finish()[:-1]:
            cpu_s, wall_s = outcome.value
            assert wall_s > WAIT_S * 0.9
            assert cpu_s < 0.2 * wall_s
            print(f"{call}, {size} ranks: waiting took {100 * cpu_s / wall_s:.2f} % of a core")


def test_a_deadline_counts_from_the_call_and_not_from_the_start() -> None:
    """Calls that each end in time may together take longer than the deadline of one."""
    with Ranks(2) as pool:
        pool.start(do_many_slow_calls, meeting_point())
        assert [outcome.value for outcome in pool.finish()] == [8, 8]


def do_many_slow_calls(seat: Seat, path: str) -> int:
    comm = seat.comm(path, 2, HASTY)
    for turn in range(8):
        if turn % 2 == seat.rank:
            time.sleep(TIMEOUT_S / 5)  # a slow step of the program
        comm.barrier()
    return 8


@pytest.mark.long
def test_a_timeout_names_a_rank_that_never_calls() -> None:
    with Ranks(3) as pool:
        outcomes = pool.outcomes(do_stay_away, meeting_point())
        lines = {str(outcome.error) for outcome in outcomes[:2]}
        for outcome in outcomes[:2]:
            assert isinstance(outcome.error, CollectiveTimeout)
            assert outcome.error.rank == 2
        assert all(
            f"rank 2 (pid {pool.pid(2)}, " in line and "did not call it" in line for line in lines
        )


def do_stay_away(seat: Seat, path: str) -> None:
    comm = seat.comm(path, 3, HASTY)
    if seat.rank == 2:
        time.sleep(TIMEOUT_S + DETECTED_S)  # a program that is busy elsewhere
    else:
        comm.allreduce(np.ones(3))


def do_wait_interrupted(seat: Seat, path: str) -> str:
    comm = seat.comm(path, 2)
    seat.tell("ready")
    if seat.rank == 0:
        seat.pipe.recv()
    try:
        comm.allreduce(np.ones(100_000))  # more than what fits into one cell
    except KeyboardInterrupt:
        seat.tell("interrupted")
        return "interrupted"
    except PeerLost as error:
        return str(error)
    return "finished"


def test_ctrl_c_ends_a_wait_at_once_and_tells_the_others() -> None:
    with Ranks(2) as pool:
        pool.start(do_wait_interrupted, meeting_point())
        assert [pool.hear(rank) for rank in range(2)] == ["ready", "ready"]
        until_asleep(pool.pid(1))
        pool.signal(1, signal.SIGINT)
        assert pool.hear(1) == "interrupted"
        pool.send(0, "go")
        values = [outcome.value for outcome in pool.finish()]
        assert values == ["allreduce #1: rank 1 was interrupted", "interrupted"]
