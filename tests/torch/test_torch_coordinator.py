"""Operations meet whatever order ranks submit them in, and what never meets is reported."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hsgd.config import Config
from hsgd.torch.job import runtime
from ranks import Ranks, Seat, meeting_point
from tiers import short_form
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 4


def on(ranks: Ranks, size: int, function: Any, *args: Any) -> list[Any]:
    return ranks.run(function, meeting_point(), size, *args, on=range(size))


# --- orders ---


def start(hvd: Any, kind: str, name: str, rank: int, size: int) -> int:
    if kind == "allreduce":
        handle = hvd.allreduce_async(torch.full((3,), float(rank)), name=name, op=hvd.Sum)
    elif kind == "large":
        handle = hvd.allreduce_async(torch.full((30_000,), float(rank)), name=name, op=hvd.Max)
    elif kind == "allgather":
        handle = hvd.allgather_async(torch.full((rank, 2), rank), name=name)
    elif kind == "broadcast":
        handle = hvd.broadcast_async_(torch.full((2,), rank), size - 1, name=name)
    elif kind == "alltoall":
        handle = hvd.alltoall_async(torch.full((size,), rank), name=name)
    else:
        handle = hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3)], name=name)
    return int(handle)


def expect(kind: str, result: Any, size: int) -> bool:
    if kind == "allreduce":
        return result.tolist() == [sum(range(size))] * 3
    if kind == "large":
        return bool((result == size - 1).all())
    if kind == "allgather":
        return result[:, 0].tolist() == [rank for rank in range(size) for _ in range(rank)]
    if kind == "broadcast":
        return result.tolist() == [size - 1] * 2
    if kind == "alltoall":
        return result[0].tolist() == list(range(size))
    return [len(one) for one in result] == [2, 3]


KINDS = ("allreduce", "large", "allgather", "broadcast", "alltoall", "grouped")


def drawn_rounds(seat: Seat, path: str, size: int, rounds: list[Any]) -> bool:
    """Each round: kinds of operations, and for each rank their order and when to wait for them."""
    with job(seat, path, size) as hvd:
        for kinds, orders, waits in rounds:
            handles: dict[int, int] = {}
            results = {}
            for place, n in enumerate(orders[seat.rank]):
                handles[n] = start(hvd, kinds[n], f"op.{n}", seat.rank, size)
                if place in waits and orders.count(orders[0]) == size:
                    results[n] = hvd.synchronize(handles.pop(n))
            results |= {n: hvd.synchronize(handle) for n, handle in reversed(handles.items())}
            if not all(expect(kinds[n], result, size) for n, result in results.items()):
                return False
    return True


@settings(max_examples=15, derandomize=True, database=None)
@given(data=st.data())
def test_drawn_orders_meet(ranks: Ranks, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    rounds = []
    for _ in range(data.draw(st.integers(1, 8))):
        kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
        numbers = list(range(len(kinds)))
        orders = [data.draw(st.permutations(numbers)) for _ in range(size)]
        if data.draw(st.booleans()):
            orders = [orders[0]] * size
        rounds.append((kinds, orders, data.draw(st.sets(st.sampled_from(numbers)))))
    assert all(on(ranks, size, drawn_rounds, rounds))


def random_rounds(seat: Seat, path: str, size: int, seed: int, names: int, count: int) -> int:
    """Some operations in a random order, on each rank another one; how many rounds went well."""
    mine = random.Random(f"{seed}.{seat.rank}")
    with job(seat, path, size) as hvd:
        tensors = [torch.ones(2 + n) for n in range(names)]
        order = list(range(names))
        for done in range(count):
            mine.shuffle(order)
            handles = {n: hvd.allreduce_async(tensors[n], name=str(n), op=hvd.Sum) for n in order}
            mine.shuffle(order)
            if any(float(hvd.synchronize(handles[n])[0]) != size for n in order):
                return done
    return count


EXAMPLES = 10


@pytest.mark.parametrize(
    ("size", "count"), short_form("chaos", [(2, 800), (3, 150), (4, 50)], keep=[1])
)
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
)
@given(seed=st.integers(0, 1 << 32), names=st.integers(2, 3))
def test_ten_thousand_rounds_of_random_orders_end(
    ranks: Ranks, size: int, count: int, seed: int, names: int
) -> None:
    # EXAMPLES of each size: 10^4 rounds.
    found = ranks.run(
        random_rounds, meeting_point(), size, seed, names, count, on=range(size), limit_s=120
    )
    assert found == [count] * size


def synchronous_in_threads(seat: Seat, path: str, size: int) -> None:
    """Two threads of a rank wait for each other's operations on another rank."""
    with job(seat, path, size) as hvd:
        found: dict[str, float] = {}

        def work(name: str) -> None:
            for n in range(50):
                found[name] = float(hvd.allreduce(torch.ones(1), name=f"{name}.{n}", op=hvd.Sum))

        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
        for thread in threads if seat.rank else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {"a": size, "b": size}


def test_several_threads_of_a_rank_submit(ranks: Ranks) -> None:
    on(ranks, 3, synchronous_in_threads)


def one_rank_is_ahead(seat: Seat, path: str, size: int) -> None:
    """A rank that has submitted something else and computes does not hold up the others."""
    with job(seat, path, size) as hvd:
        if seat.rank == 0:
            early = hvd.allreduce_async(torch.ones(1), name="early", op=hvd.Sum)
        total = hvd.allreduce(torch.ones(1), name="now", op=hvd.Sum)
        assert total == size
        if seat.rank:
            early = hvd.allreduce_async(torch.ones(1), name="early", op=hvd.Sum)
        assert hvd.synchronize(early) == size


def test_an_operation_that_waits_does_not_hold_up_others(ranks: Ranks) -> None:
    on(ranks, 3, one_rank_is_ahead)


def same_orders(seat: Seat, path: str, size: int) -> int:
    with job(seat, path, size) as hvd:
        comm = runtime.current().comm
        hvd.barrier()
        before = comm.metrics().calls
        handles = [hvd.allreduce_async(torch.ones(4), name=f"t.{n}") for n in range(100)]
        for handle in handles:
            hvd.synchronize(handle)
        return int(comm.metrics().calls - before)


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_order_costs_one_collective_for_each_operation(ranks: Ranks, size: int) -> None:
    assert on(ranks, size, same_orders) == [100] * size


def bursts(seat: Seat, path: str, size: int, rounds: int, count: int) -> None:
    """Many operations are under way when ranks begin to differ, and when they agree again."""
    mine = random.Random(seat.rank)
    with job(seat, path, size) as hvd:
        for turn in range(rounds):
            order = list(range(count))
            if turn % 3 == 1:
                mine.shuffle(order)
            elif turn % 3 == 2 and seat.rank == 0:
                order[0], order[-1] = order[-1], order[0]
            tensors = [torch.full((1 + n % 7,), n + seat.rank) for n in range(count)]
            ops = [hvd.Sum if n % 2 else hvd.Average for n in range(count)]
            handles = {
                n: hvd.allreduce_async_(tensors[n], name=str(n), op=ops[n], postscale_factor=2.0)
                if n % 5
                else hvd.broadcast_async(tensors[n], n % size, name=str(n))
                for n in order
            }
            mine.shuffle(order)
            for n in order:
                found = hvd.synchronize(handles[n])
                total = n * size + size * (size - 1) // 2
                factor = 2.0 if n % 2 else 2.0 / size
                expected = n + n % size if n % 5 == 0 else int(total * factor)
                assert found.tolist() == [expected] * (1 + n % 7), (turn, n)


@pytest.mark.parametrize("size", [2, 3])
def test_bursts_in_equal_and_different_orders(ranks: Ranks, size: int) -> None:
    on(ranks, size, bursts, 9, 120)


def polled(seat: Seat, path: str, size: int, orders: list[list[str]]) -> None:
    """poll() comes true by itself, also where ranks have to agree first."""
    with job(seat, path, size) as hvd:
        handles = {
            name: hvd.allreduce_async(torch.ones(3), name=name, op=hvd.Sum)
            for name in orders[seat.rank]
        }
        until = time.monotonic() + 60
        while not all(map(hvd.poll, handles.values())):
            assert time.monotonic() < until
            time.sleep(1e-3)
        for handle in handles.values():
            assert hvd.synchronize(handle).tolist() == [size] * 3


@pytest.mark.parametrize("orders", [[["a", "b"]] * 2, [["a", "b"], ["b", "a"]]])
def test_polling_needs_nobody_who_waits(ranks: Ranks, orders: list[list[str]]) -> None:
    on(ranks, 2, polled, orders)


# --- errors ---


def with_a_death_among_many(seat: Seat, path: str, size: int) -> str:
    with job(seat, path, size) as hvd:
        early = [hvd.allreduce_async(torch.ones(1), name=f"early.{n}") for n in range(5)]
        if seat.rank == 0:
            hvd.synchronize(early[-1])
            seat.tell(os.getpid())
            seat.pipe.recv()
        late = [hvd.allreduce_async(torch.ones(1), name=f"late.{n}") for n in range(5)]
        seat.tell("submitted")
        with pytest.raises(hvd.HorovodInternalError) as raised:
            hvd.synchronize(late[-1])
        for handle in early:
            assert hvd.synchronize(handle).tolist() == [1.0]
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(late[0])
        return str(raised.value)


def test_what_ended_well_before_a_death_is_not_lost() -> None:
    with Ranks(2) as pool:
        pool.start(with_a_death_among_many, meeting_point(), 2)
        pool.hear(0), pool.hear(1)
        pool.signal(0, signal.SIGKILL)
        (outcome,) = pool.finish(on=[1])
        assert outcome.error is None, outcome.trace
        assert "rank 0" in outcome.value


def names_in_use(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        if seat.rank == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="x")
            with pytest.raises(ValueError, match=r"same name as another tensor.*allreduce\.x"):
                hvd.allreduce_async(torch.ones(1), name="x")
        hvd.barrier()
        if seat.rank:
            handle = hvd.allreduce_async(torch.ones(1), name="x")
        hvd.synchronize(handle)
        hvd.allreduce(torch.ones(1), name="x")


def test_a_name_in_use_is_refused_and_free_again_later(ranks: Ranks) -> None:
    on(ranks, 2, names_in_use)


def disagreement(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        fine = hvd.allreduce_async(torch.ones(2), name="fine", op=hvd.Sum)
        wrong = hvd.allreduce_async(torch.ones(2 + seat.rank), name="wrong")
        later = hvd.allreduce_async(torch.ones(2), name="later", op=hvd.Sum)
        words = r"ALLREDUCE tensor shapes: One rank sent a tensor of shape \(2,\).*allreduce.wrong"
        with pytest.raises(hvd.HorovodInternalError, match=words):
            hvd.synchronize(wrong)
        assert hvd.synchronize(wrong) is None
        assert hvd.synchronize(fine)[0] == hvd.synchronize(later)[0] == size


def test_a_mismatch_fails_alone(ranks: Ranks) -> None:
    on(ranks, 3, disagreement)


def gathering_after_a_join(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        if seat.rank == 0:
            assert hvd.join() == size - 1
            return
        rows = torch.ones(size, 2)
        for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
                call(rows, name="after a join")
        with pytest.raises(hvd.HorovodInternalError, match="Broadcast is not supported with Join"):
            hvd.broadcast(rows, 1, name="after a join")
        pair = hvd.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.int64)], name="g")
        assert pair[0][0] == (size - 1) / size and pair[1].dtype == torch.int64
        hvd.barrier()
        assert hvd.join() in range(1, size)


@pytest.mark.parametrize("size", [2, 3])
def test_only_reductions_go_on_while_a_rank_has_joined(ranks: Ranks, size: int) -> None:
    outcomes = ranks.outcomes(gathering_after_a_join, meeting_point(), size, on=range(size))
    late = [outcome.error for outcome in outcomes[1:]]
    assert late == [None] * (size - 1), outcomes[1].trace


def leaving(seat: Seat, path: str, size: int) -> str:
    with job(seat, path, size) as hvd:
        if seat.rank == 0:
            return ""
        with pytest.raises(hvd.HorovodInternalError) as raised:
            hvd.allreduce(torch.ones(1), name="alone")
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1), name="after")
        return str(raised.value)


def test_ranks_hear_when_another_shuts_down(ranks: Ranks) -> None:
    assert "rank 0" in on(ranks, 2, leaving)[1]


def with_a_death(seat: Seat, path: str, size: int) -> tuple[str, str]:
    with job(seat, path, size) as hvd:
        hvd.barrier()
        seat.tell(os.getpid())
        if seat.rank == 0:
            seat.pipe.recv()
        with pytest.raises(hvd.HorovodInternalError) as raised:
            hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="x"))
        return str(raised.value), type(raised.value.__cause__).__name__


def test_a_death_is_an_internal_error_that_names_the_rank() -> None:
    with Ranks(2) as pool:
        pool.start(with_a_death, meeting_point(), 2)
        pool.hear(1), pool.hear(0)
        pool.signal(0, signal.SIGKILL)
        (outcome,) = pool.finish(on=[1])
        assert outcome.error is None, outcome.trace
        words, cause = outcome.value
        assert "rank 0" in words and cause == "PeerLost"


# --- stalls ---


NEVER = Config(timeout_s=600.0)  # the core's own deadline is to end nothing here


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.told.set()


def stalled(seat: Seat, path: str, size: int, shutdown_s: str, blocking: bool = False) -> list[str]:
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.2"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = shutdown_s
    kept = Kept()
    logging.getLogger("hsgd.torch").addHandler(kept)
    try:
        with job(seat, path, size, NEVER) as hvd:
            if shutdown_s != "0":
                if seat.rank != 1:
                    start_lost = hvd.allreduce if blocking else hvd.allreduce_async
                    with pytest.raises(hvd.HorovodInternalError, match="Will shutdown") as raised:
                        hvd.synchronize(start_lost(torch.ones(1), name="lost"))
                    seat.tell("failed")
                    kept.lines.append(str(raised.value))
                seat.pipe.recv()
                return kept.lines
            if seat.rank != 1:
                handle = hvd.allreduce_async(torch.ones(1), name="slow", op=hvd.Sum)
            if seat.rank == 0:
                kept.told.wait(20)
                seat.tell("reported")
            if seat.rank == 1:
                seat.pipe.recv()
                handle = hvd.allreduce_async(torch.ones(1), name="slow", op=hvd.Sum)
            assert hvd.synchronize(handle) == size
            return kept.lines
    finally:
        logging.getLogger("hsgd.torch").removeHandler(kept)
        del os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]
        del os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]


def test_a_tensor_that_a_rank_does_not_submit_is_reported_with_the_rank(ranks: Ranks) -> None:
    ranks.start(stalled, meeting_point(), 3, "0", on=range(3))
    assert ranks.hear(0) == "reported"
    ranks.send(1, "go on")
    outcomes = ranks.finish(on=range(3))
    assert [outcome.error for outcome in outcomes] == [None] * 3, outcomes[0].trace
    assert len(outcomes[0].value) == 1
    assert "Missing ranks: 1 [allreduce.slow]" in outcomes[0].value[0]
    assert outcomes[1].value == outcomes[2].value == []


@pytest.mark.parametrize("blocking", [False, True])
def test_after_the_shutdown_time_it_fails(ranks: Ranks, blocking: bool) -> None:
    ranks.start(stalled, meeting_point(), 2, "0.6", blocking, on=range(2))
    assert ranks.hear(0) == "failed"
    ranks.send(0, "go on")
    ranks.send(1, "go on")
    outcomes = ranks.finish(on=range(2))
    assert [outcome.error for outcome in outcomes] == [None] * 2, outcomes[0].trace
    assert "Missing ranks: 1 [allreduce.lost]" in outcomes[0].value[-1]
