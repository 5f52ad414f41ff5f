"""Asynchronous collectives of one plain tensor, which the core's own queue executes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional

from backend_programs import group, not_in_torch_2_7
from hsgd import CollectiveTimeout, HsgdError, PeerLost, SignatureMismatch
from hsgd.c10d.work import HsgdWork
from ranks import Ranks, Seat

__all__: list[str] = []

SIZE = 3
MOST_RANKS = SIZE
BUCKET = (1 << 20) // 4  # float32 that may be a bucket of DDP
pytestmark = not_in_torch_2_7


def do_each(seat: Seat, path: str) -> None:
    with group(seat.rank, SIZE, path):
        for tensor in (torch.ones(5), torch.ones(()), torch.empty(0), torch.ones(BUCKET - 1)):
            work = dist.all_reduce(tensor, async_op=True)
            finish(work, [tensor])
            assert bool((tensor == SIZE).all())
        mine = torch.full((2, 3), float(seat.rank))
        joined = torch.empty(SIZE * 2, 3)
        finish(dist.all_gather_into_tensor(joined, mine, async_op=True), [joined])
        assert joined[::2, 0].tolist() == [float(rank) for rank in range(SIZE)]
        finish(dist.broadcast(mine, src=1, async_op=True), [mine])
        assert bool((mine == 1).all())
        own = torch.empty(2, 3)
        finish(dist.reduce_scatter_tensor(own, joined, async_op=True), [own])
        assert bool((own == SIZE * seat.rank).all())
        other = dist.all_reduce(torch.ones(BUCKET), async_op=True)
        assert not other.is_native  # on all ranks: whether buckets are moved is agreed upon
        other.wait()


def finish(work: Any, result: list[torch.Tensor]) -> None:
    assert type(work) is HsgdWork and work.is_native
    assert work.wait()
    assert work.wait(timedelta(seconds=1)) and work.wait()
    work.synchronize()
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert [each.data_ptr() for each in work.result()] == [each.data_ptr() for each in result]


def test_each_collective_is_queued(ranks: Ranks, path: str) -> None:
    ranks.run(do_each, path)


def do_in_order(seat: Seat, path: str) -> None:
    """Queued, blocking, long and functional calls of one group come in the order of the calls.

    Shapes differ from call to call: another order on another rank would be an error.
    """
    with group(seat.rank, SIZE, path):
        for turn in range(100):
            if (turn + seat.rank) % 7 == 0:
                time.sleep(1e-4)
            queued, greatest, sent = (
                torch.ones(4),
                torch.full((5,), float(seat.rank)),
                torch.ones(9),
            )
            strided = torch.ones(12)[::2]
            works = [
                dist.all_reduce(queued, async_op=True),
                dist.all_reduce(greatest, dist.ReduceOp.MAX, async_op=True),
            ]
            if turn % 3 == 0:
                blocking = torch.ones(7)
                dist.all_reduce(blocking)
                assert blocking.tolist() == [float(SIZE)] * 7
            works.append(dist.all_reduce(strided, async_op=True))  # by way of a Work
            if turn % 5 == 0:
                reduced = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD)
                assert functional.wait_tensor(reduced).tolist() == [float(SIZE)] * 8
            works.append(dist.broadcast(sent.mul_(seat.rank), src=turn % SIZE, async_op=True))
            for work in works[:: 1 if turn % 2 else -1]:
                work.wait()
            assert queued.tolist() == [float(SIZE)] * 4
            assert greatest.tolist() == [SIZE - 1.0] * 5
            assert strided.tolist() == [float(SIZE)] * 6
            assert sent.tolist() == [float(turn % SIZE)] * 9


def test_ways_keep_one_order(ranks: Ranks, path: str) -> None:
    ranks.run(do_in_order, path)


def do_callbacks(seat: Seat, path: str) -> list[float]:
    """What callbacks call comes before what the program calls after it has asked for the future.

    Shapes differ: another order on another rank would be an error.
    """
    with group(seat.rank, SIZE, path):
        found = []
        for turn in range(30):
            first, second, third = torch.ones(3), torch.ones(4), torch.ones(5)
            if turn % SIZE == seat.rank:
                time.sleep(2e-3)
            work = dist.all_reduce(first, async_op=True)
            between = dist.all_reduce(torch.ones(6), async_op=True)
            if turn % 2:
                between.wait()

            def call(done: Any, second: torch.Tensor = second) -> torch.Tensor:
                (reduced,) = done.value()
                dist.all_reduce(second)
                return reduced.sum() + second.sum()

            last = work.get_future().then(call)
            third_work = dist.all_reduce(third, async_op=True)
            if (turn + seat.rank) % 2:
                third_work.wait()
            found.append(float(last.wait()))
            third_work.wait()
            assert work.get_future().wait()[0].data_ptr() == first.data_ptr()
            between.wait()
        return found


def test_callbacks_come_next_on_all_ranks(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_callbacks, path) == [[7.0 * SIZE] * 30] * SIZE


def do_shut_down_in_callback(seat: Seat, path: str) -> None:
    with group(seat.rank, SIZE, path):
        part: Any = dist.new_group(list(range(SIZE)))
        strided, last = torch.ones(12)[::2], torch.ones(3)
        if seat.rank == 1:
            time.sleep(0.1)  # so that the callbacks run in the thread of the queue, too
        future = dist.all_reduce(strided, group=part, async_op=True).get_future()
        ended = future.then(lambda _: part.shutdown())
        with contextlib.suppress(HsgdError):  # the group may be gone
            dist.all_reduce(last, group=part, async_op=True)
        ended.wait()
        assert strided.tolist() == [float(SIZE)] * 6
        with pytest.raises(HsgdError, match="the process group was destroyed"):
            dist.all_reduce(last, group=part)
        dist.all_reduce(last)  # the other group goes on


def test_a_callback_may_shut_the_group_down(ranks: Ranks, path: str) -> None:
    ranks.run(do_shut_down_in_callback, path)


def do_late(seat: Seat, path: str) -> None:
    with group(seat.rank, SIZE, path):
        tensor = torch.ones(3)
        waited = Path(f"{path}-waited")
        while seat.rank == 1 and not waited.exists():
            time.sleep(0.01)
        work = dist.all_reduce(tensor, async_op=True)
        if seat.rank == 0:
            assert not work.is_completed() and not work.is_success() and work.exception() is None
            with pytest.raises(
                CollectiveTimeout, match=r"all_reduce: .* 0\.05 s; it is still running"
            ):
                work.wait(timedelta(milliseconds=50))
            waited.touch()
        assert work.wait(timedelta(seconds=30))
        assert tensor.tolist() == [float(SIZE)] * 3


def test_a_wait_has_a_limit_and_the_collective_goes_on(ranks: Ranks, path: str) -> None:
    ranks.run(do_late, path)


def do_differ(seat: Seat, path: str) -> None:
    with group(seat.rank, SIZE, path):
        part: Any = dist.new_group([1, 2])
        if seat.rank == 0:
            return
        work = dist.all_reduce(torch.ones(2 + seat.rank), group=part, async_op=True)
        future = work.get_future()
        for _ in range(2):
            with pytest.raises(SignatureMismatch, match=r"rank 1 sent 3 .*rank 2 sent 4 "):
                work.wait()
        assert work.is_completed() and not work.is_success()
        assert isinstance(work.exception(), SignatureMismatch)
        with pytest.raises(RuntimeError, match="rank 1 sent 3"):
            future.wait()
        dist.all_reduce(torch.ones(2), group=part)  # the group goes on


def test_errors_name_global_ranks(ranks: Ranks, path: str) -> None:
    ranks.run(do_differ, path)


def do_backward(seat: Seat, path: str) -> list[bool]:
    """In a pass of autograd somebody else raises the errors: its collectives get a Work there."""
    with group(seat.rank, SIZE, path):
        kinds: list[bool] = []

        class Asks(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                gradient = gradient.clone()
                work = dist.all_reduce(gradient, async_op=True)
                kinds.append(work.is_native)
                work.wait()
                return gradient

        x = torch.ones(3, requires_grad=True)
        Asks.apply(x).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and x.grad.tolist() == [float(SIZE)] * 3
        return kinds


def test_a_pass_of_autograd_takes_the_long_way(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_backward, path) == [[False]] * SIZE


def do_lose(seat: Seat, path: str) -> str:
    with group(seat.rank, SIZE, path):
        dist.all_reduce(torch.ones(3))
        if seat.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        begin = time.monotonic()
        with pytest.raises(PeerLost) as told:
            work.wait()
        assert time.monotonic() - begin < 10
        with pytest.raises(HsgdError, match="broken since an earlier error"):
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        return str(told.value)


def test_a_lost_rank_is_named(path: str) -> None:
    with Ranks(SIZE) as pool:
        pool.start(do_lose, path)
        for outcome in pool.finish(on=[0, 1]):
            assert outcome.error is None, outcome.trace
            assert "rank 2" in outcome.value


def do_destroy(seat: Seat, path: str) -> None:
    tensor, other = torch.ones(3), torch.ones(3)
    with group(seat.rank, SIZE, path):
        if seat.rank == 1:
            time.sleep(0.2)
        work = dist.all_reduce(tensor, async_op=True)
        followed = dist.all_reduce(other, async_op=True)
        future = followed.get_future()
    assert work.wait() and work.is_success() and tensor.tolist() == [float(SIZE)] * 3
    assert future.wait()[0].tolist() == [float(SIZE)] * 3
    assert work.get_future().wait()[0] is tensor
    with pytest.raises((HsgdError, ValueError, RuntimeError)):
        dist.all_reduce(tensor, async_op=True)


def test_a_group_that_is_destroyed_finishes_what_is_queued(ranks: Ranks, path: str) -> None:
    ranks.run(do_destroy, path)


def do_interrupt(seat: Seat, path: str) -> None:
    with group(seat.rank, 2, path):
        for number, (stride, blocking) in enumerate([(1, False), (2, False), (2, True)]):
            part: Any = dist.new_group([0, 1])
            gone = Path(f"{path}-{number}")
            if seat.rank == 1:
                while not gone.exists():
                    time.sleep(0.01)
                continue
            tensor = torch.ones(12)[::stride]
            threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                reduce_and_wait(tensor, part, blocking)
            with pytest.raises(HsgdError):
                dist.all_reduce(tensor, group=part)
            gone.touch()


def reduce_and_wait(tensor: torch.Tensor, part: Any, blocking: bool) -> None:
    work = dist.all_reduce(tensor, group=part, async_op=not blocking)
    if work is not None:
        work.wait()


def test_ctrl_c_ends_a_wait_of_each_kind(path: str) -> None:
    with Ranks(2) as pool:
        pool.run(do_interrupt, path)


def do_profile(seat: Seat, path: str) -> list[str]:
    with group(seat.rank, SIZE, path):
        profiled = Path(f"{path}-profiled")
        while seat.rank == 1 and not profiled.exists():
            time.sleep(0.01)
        if seat.rank == 1:
            time.sleep(0.5)  # rank 0 waits by then: nothing else tells
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with torch.profiler.profile() as profile:
            if seat.rank == 0:
                profiled.touch()
            work.wait()
        return [event.key for event in profile.key_averages()]


def test_a_profile_shows_the_wait(ranks: Ranks, path: str) -> None:
    assert "hsgd:all_reduce wait" in ranks.run(do_profile, path)[0]


def do_drop(seat: Seat, path: str) -> int:
    with group(seat.rank, SIZE, path):
        total = torch.zeros(1000)
        sizes = []
        for _ in range(6):
            for _ in range(2000):
                dist.all_reduce(torch.ones(1000), async_op=True)
            dist.all_reduce(total)
            sizes.append(resident_kb())
        return sizes[-1] - sizes[0]


def resident_kb() -> int:
    """Without what malloc keeps of the tensors that were under way at once."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def test_works_that_nobody_waits_for_leave_nothing(ranks: Ranks, path: str) -> None:
    assert all(grown < 4000 for grown in ranks.run(do_drop, path))
