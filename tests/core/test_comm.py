"""Comm.local gives one result, bit for bit, whatever the sizes, settings and timing."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsgd import Comm, HsgdError
from hsgd.comm.communicator import OPS
from hsgd.config import Config
from ranks import Ranks, Seat, meeting_point, switch_points
from reference import DTYPES, allreduced, as_torch, digest, made, zeros

__all__: list[str] = []

MOST_RANKS = 4
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "int8": 1, "uint8": 1}
CONFIGS = {
    "default": Config(timeout_s=30),
    "in groups": Config(timeout_s=30, flat_ranks=1),
    "tiny chunks in groups": Config(
        timeout_s=30, oneshot_bytes=64, chunk_bytes=4096, slots=6, flat_ranks=1
    ),
    "tiny chunks": Config(timeout_s=30, oneshot_bytes=0, chunk_bytes=4096, slots=3),
    "odd chunks": Config(
        timeout_s=30, oneshot_bytes=100, chunk_bytes=5000, slots=5, store="nontemporal"
    ),
    "wide one-shot": Config(timeout_s=30, oneshot_bytes=1 << 17, store="ordinary", spin=0),
}


@pytest.fixture(scope="module")
def paths() -> dict[tuple[int, str], str]:
    """Where the communicators of each size and configuration meet; made at first use, then kept."""
    return {(size, name): meeting_point() for size in range(1, MOST_RANKS + 1) for name in CONFIGS}


class Case:
    """One drawn allreduce: what to do, and what must come out."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.size = draw(st.integers(1, MOST_RANKS), label="ranks")
        self.config = draw(st.sampled_from(sorted(CONFIGS)), label="config")
        self.dtype = draw(st.sampled_from(DTYPES), label="dtype")
        floating = "float" in self.dtype
        self.op = draw(
            st.sampled_from(OPS if floating else [op for op in OPS if op != "mean"]), label="op"
        )
        config, item = CONFIGS[self.config], BYTES.get(self.dtype, 2)
        near = [switch_point // item for switch_point in switch_points(config)]
        edges = st.sampled_from(near).flatmap(lambda edge: st.integers(max(0, edge - 1), edge + 1))
        odd = st.sampled_from([0, 1, 2, 3, 7, 31, 61, 127, 509, 1021, 4093, 10007, 65537, 524287])
        self.count = draw(st.one_of(odd, edges), label="count")
        self.seed = draw(st.integers(0, 999), label="seed")
        self.special = draw(st.booleans(), label="special")
        self.in_place = draw(st.booleans(), label="in place")
        self.tensor = self.dtype == "bfloat16" or draw(st.booleans(), label="tensor")
        self.late = draw(st.one_of(st.none(), st.integers(0, self.size - 1)), label="late")

    def inputs(self) -> list[np.ndarray]:
        return [
            made(self.seed, rank, self.count, self.dtype, self.special) for rank in range(self.size)
        ]

    def expected(self) -> np.ndarray:
        return allreduced([self.inputs()], self.dtype, self.op)


def do_allreduce(seat: Seat, path: str, case: Case) -> str:
    comm = seat.comm(path, case.size, CONFIGS[case.config])
    stored = made(case.seed, seat.rank, case.count, case.dtype, case.special)
    before = stored.copy()
    result = stored if case.in_place else zeros(case.count, case.dtype)
    wrap = (lambda a: as_torch(a, case.dtype)) if case.tensor else (lambda a: a)
    if seat.rank == case.late:
        time.sleep(0.002)  # jitter, not synchronization
    out = wrap(result)
    assert comm.allreduce(wrap(stored), case.op, out=out, name="x") is out
    assert case.in_place or digest(stored) == digest(before), "the input was changed"
    return digest(result)


@pytest.mark.long
@settings(max_examples=300, derandomize=True, database=None)
@given(data=st.data())
def test_allreduce_equals_numpy_in_rank_order_on_all_ranks(
    ranks: Ranks, paths: dict[tuple[int, str], str], data: st.DataObject
) -> None:
    case = Case(data.draw)  # type: ignore[arg-type]
    path = paths[case.size, case.config]
    results = ranks.run(do_allreduce, path, case, on=range(case.size))
    assert results == [digest(case.expected())] * case.size


def do_split(seat: Seat, path: str, parts: list[int], dtype: str, op: str) -> list[str]:
    """Twice fused, once in parts, and once with the elements elsewhere in the buffer."""
    comm = seat.comm(path, MOST_RANKS, CONFIGS["tiny chunks"])
    whole = made(5, seat.rank, sum(parts), dtype)
    fused = [comm.allreduce(as_torch(whole, dtype), op) for _ in range(2)]
    bounds = np.cumsum([0, *parts])
    pieces = [
        comm.allreduce(as_torch(whole[a:b], dtype), op) for a, b in itertools.pairwise(bounds)
    ]
    shifted = np.concatenate([zeros(37, dtype), whole])
    moved = comm.allreduce(as_torch(shifted, dtype), op)[37:]
    results = [*fused, torch.cat(pieces), moved.contiguous()]
    return [digest(result.view(torch.uint8).numpy()) for result in results]


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_result_is_the_same_fused_split_and_repeated(ranks: Ranks, dtype: str, op: str) -> None:
    parts = [1, 0, 4096, 1023, 30011, 5, 2048]
    results = ranks.run(do_split, meeting_point(), parts, dtype, op)
    inputs = [made(5, rank, sum(parts), dtype) for rank in range(MOST_RANKS)]
    assert {one for each in results for one in each} == {digest(allreduced([inputs], dtype, op))}


def do_broadcasts(seat: Seat, path: str, size: int, config: Config, counts: list[int]) -> list[str]:
    comm = seat.comm(path, size, config)
    results = []
    for root in range(size):
        for count in counts:
            for dtype in ("float32", "bfloat16", "uint8"):
                data = made(count, seat.rank, count, dtype, special=True)
                comm.broadcast(as_torch(data, dtype), root=root)
                results.append(digest(data))
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_broadcast_gives_everybody_the_bits_of_each_root(
    ranks: Ranks, paths: dict[tuple[int, str], str], size: int, name: str
) -> None:
    counts = [0, 1, 17, 1023, 1024, 1025, 5000, 32769, 100003]
    args = (paths[size, name], size, CONFIGS[name], counts)
    expected = [
        digest(made(count, root, count, dtype, special=True))
        for root in range(size)
        for count in counts
        for dtype in ("float32", "bfloat16", "uint8")
    ]
    assert ranks.run(do_broadcasts, *args, on=range(size)) == [expected] * size


def do_schedule(seat: Seat, path: str, size: int, config: Config, seed: int, calls: int) -> str:
    """A random program, the same on all ranks but for the delays; a digest of all that came out."""
    comm = seat.comm(path, size, config)
    program, own = random.Random(seed), random.Random(seed * 10 + seat.rank)
    seen = []
    for call in range(calls):
        kind = program.choice(["allreduce", "allreduce", "broadcast", "barrier"])
        dtype, count = program.choice(DTYPES), int(10 ** program.uniform(0, 5.3))
        root, op = program.randrange(size), program.choice(["sum", "min", "max", "prod"])
        if own.random() < 0.1:
            time.sleep(own.random() * 0.003)  # jitter, not synchronization
        data = made(seed * 1000 + call, seat.rank, count, dtype)
        if kind == "allreduce":
            comm.allreduce(as_torch(data, dtype), op, out=as_torch(data, dtype))
        elif kind == "broadcast":
            comm.broadcast(as_torch(data, dtype), root)
        else:
            comm.barrier()
            continue
        seen.append(digest(data))
    return digest(np.frombuffer("".join(seen).encode(), "uint8"))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_random_programs_with_random_delays_agree_on_all_ranks(
    ranks: Ranks, paths: dict[tuple[int, str], str], size: int, name: str
) -> None:
    args = (paths[size, name], size, CONFIGS[name], size, 60)
    assert len(set(ranks.run(do_schedule, *args, on=range(size)))) == 1


def do_barriers(seat: Seat, path: str, size: int, rounds: int, folder: Path) -> bool:
    """After each barrier every rank finds what every other wrote before it."""
    comm = seat.comm(path, size)
    for turn in range(rounds):
        (folder / f"{turn}-{seat.rank}").touch()
        comm.barrier()
        if not all((folder / f"{turn}-{rank}").exists() for rank in range(size)):
            return False
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nobody_leaves_a_barrier_before_everybody_came(
    ranks: Ranks, size: int, tmp_path: Path
) -> None:
    assert all(ranks.run(do_barriers, meeting_point(), size, 50, tmp_path, on=range(size)))


def do_shapes(seat: Seat, path: str) -> list[Any]:
    comm = seat.comm(path, 3)
    grad = torch.full((3, 2), float(seat.rank), requires_grad=True)
    summed = comm.allreduce(grad)
    comm.allreduce(grad, out=grad)
    return [
        comm.allreduce(np.array(2.5)).shape,
        float(comm.allreduce(np.float64(2.5))),
        comm.allreduce(torch.tensor(2.0)).item(),
        [comm.allreduce(np.zeros(shape)).shape for shape in ((0,), (3, 0), (2, 3, 0), (0, 4))],
        [
            tuple(comm.allreduce(torch.zeros(shape)).shape)
            for shape in ((0,), (3, 0), (2, 3, 0), (0, 4))
        ],
        comm.allreduce(np.ones((1,) * 9, "int8")).shape,
        (summed.requires_grad, summed.tolist()),
        (grad.requires_grad, grad.is_leaf, grad.tolist()),
        comm.allreduce(np.asfortranarray(np.ones((1, 5)))).tolist(),
        bytes(comm.broadcast(bytearray([seat.rank, 7]), root=2)),
        comm.allreduce(memoryview(np.arange(3)), out=np.zeros(3, int)).tolist(),
    ]


def test_arrays_of_every_shape_and_kind_are_taken(ranks: Ranks) -> None:
    empty = [(0,), (3, 0), (2, 3, 0), (0, 4)]
    for result in ranks.run(do_shapes, meeting_point(), on=range(3)):
        assert result == [
            (),
            7.5,
            6.0,
            empty,
            empty,
            (1,) * 9,
            (False, [[3.0, 3.0]] * 3),
            (True, True, [[3.0, 3.0]] * 3),
            [[3.0] * 5],
            b"\x02\x07",
            [0, 3, 6],
        ]


def do_threads(seat: Seat, path: str, size: int) -> set[float]:
    """Equal calls of several threads: each is one collective, whomever of a peer it meets."""
    comm = seat.comm(path, size)
    with ThreadPoolExecutor(4) as pool:
        sums = pool.map(lambda _: comm.allreduce(np.full(50_000, seat.rank + 1.0)), range(40))
        return {value for total in sums for value in np.unique(total).tolist()}


def test_threads_of_a_rank_may_share_a_communicator(ranks: Ranks) -> None:
    assert ranks.run(do_threads, meeting_point(), 3, on=range(3)) == [{6.0}] * 3


def do_two_communicators(seat: Seat, one: str, two: str) -> list[float]:
    """Both are in use at the same time, one per thread; on half of the ranks the other begins."""
    first, second = seat.comm(one, 2), seat.comm(two, 2, CONFIGS["tiny chunks"])
    results = [0.0, 0.0]

    def work(index: int, comm: Comm) -> None:
        for _ in range(20):
            results[index] += float(comm.allreduce(np.full(40_000, index + 1.0))[-1])

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
    for thread in threads if seat.rank else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_communicators_work_at_once(ranks: Ranks) -> None:
    results = ranks.run(do_two_communicators, meeting_point(), meeting_point(), on=range(2))
    assert results == [[40.0, 80.0]] * 2


def do_reopen(seat: Seat, path: str, times: int) -> tuple[int, int]:
    """Descriptors and bytes of mapped memory that opening and closing many times added."""

    def held() -> tuple[int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return len(os.listdir("/proc/self/fd")), pages * resource.getpagesize()

    for turn in range(times):
        if turn == 5:
            before = held()  # after what is loaded once
        with Comm.local(path, seat.rank, 2, CONFIGS["default"]) as comm:
            comm.allreduce(np.ones(100_000))
            comm.barrier()
    return held()[0] - before[0], held()[1] - before[1]


@pytest.mark.long
def test_opening_and_closing_leaves_no_descriptor_and_no_memory(ranks: Ranks) -> None:
    for descriptors, mapped_bytes in ranks.run(do_reopen, meeting_point(), 200, on=range(2)):
        assert descriptors == 0
        assert mapped_bytes < 16 << 20, "one communicator maps some 2 MB: 195 leaked ones show"


def do_fork(seat: Seat, path: str, how: str) -> float:
    """A child ends by itself, with all that Python does at its end, and is refused as a rank."""
    comm = seat.comm(path, 2)
    comm.barrier()
    if seat.rank == 0:
        child = os.fork()
        if child == 0:
            if how == "closes":
                comm.close()
            if how == "forgets":
                seat.kept.clear()
                del comm
            if how == "interpreter":
                import atexit

                atexit._run_exitfuncs()
            if how == "communicates":
                try:
                    comm.allreduce(np.full(4, 1e9))
                except HsgdError as error:
                    os._exit(0 if f"belongs to process {os.getppid()}" in str(error) else 2)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    total = 0.0
    for count in (4, 100_000):
        total += float(comm.allreduce(np.ones(count))[0])
        comm.barrier()
    return total


@pytest.mark.parametrize("how", ["nothing", "closes", "forgets", "interpreter", "communicates"])
def test_a_forked_child_does_not_disturb_its_parent(ranks: Ranks, how: str) -> None:
    assert ranks.run(do_fork, meeting_point(), how, on=range(2)) == [4.0, 4.0]


def do_wait_in_a_thread(seat: Seat, path: str, then: str) -> bool:
    """Rank 0 uses its communicator in one thread while another waits for rank 1 in a barrier."""
    with Comm.local(path, seat.rank, 2, CONFIGS["default"]) as comm:
        comm.barrier()
        if seat.rank == 1:
            seat.pipe.recv()
            comm.barrier()
            return True
        threads = [threading.Thread(target=comm.barrier)]
        threads.append(threading.Thread(target=comm.close if then == "close" else comm.metrics))
        for thread in threads:
            thread.start()
            while thread.is_alive() and not _sleeps(thread):
                time.sleep(0.001)
        seat.tell("in the barrier, and the other thread waits or has ended")
        for thread in threads:
            thread.join()
        return comm.closed == (then == "close")


def _sleeps(thread: threading.Thread) -> bool:
    """Whether the thread sleeps in the kernel, as a waiting rank does after some microseconds."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has just ended
    return stat.rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("then", ["close", "count"])
def test_closing_and_counting_during_a_collective_let_it_end(ranks: Ranks, then: str) -> None:
    ranks.start(do_wait_in_a_thread, meeting_point(), then, on=range(2))
    ranks.hear(0)
    ranks.send(1, "come")
    assert [outcome.value for outcome in ranks.finish(on=range(2))] == [True, True]


def do_pickle(seat: Seat, path: str) -> list[str]:
    comm = seat.comm(path, 1)
    lines = []
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError) as caught:
            attempt(comm)
        lines.append(str(caught.value))
    return lines


def test_a_communicator_cannot_be_pickled_or_copied(ranks: Ranks) -> None:
    for line in ranks.run(do_pickle, meeting_point(), on=[0])[0]:
        assert "cannot be pickled" in line and "\n" not in line


def do_facts(seat: Seat, path: str) -> list[Any]:
    comm = Comm.local(path, seat.rank, 2, CONFIGS["default"])
    comm.allreduce(np.ones(1000, "float32"))
    comm.broadcast(np.ones(10, "uint8"))
    counters = comm.metrics()
    facts = [
        comm.rank,
        comm.size,
        comm.local_rank,
        comm.local_size,
        comm.cross_rank,
        comm.cross_size,
    ]
    facts += [comm.leaders, counters.calls, counters.payload_bytes, counters.inter_bytes_sent]
    assert comm.nodes == [0, 0]
    assert comm.allgather_object((seat.rank, "x" * seat.rank)) == [(0, ""), (1, "x")]
    assert comm.broadcast_object({"from": seat.rank}, root=1) == {"from": 1}
    assert counters.total_s >= counters.wait_s and counters.intra_bytes > 0
    assert repr(comm) == f"<hsgd.Comm rank {seat.rank} of 2, node 0 of 1>"
    comm.close()
    comm.close()
    assert comm.closed and "closed" in repr(comm)
    for call in (
        comm.barrier,
        comm.metrics,
        lambda: comm.nodes,
        lambda: comm.allreduce(np.ones(3)),
    ):
        with pytest.raises(HsgdError, match="closed"):
            call()
    return facts


def test_a_communicator_tells_its_place_and_counts(ranks: Ranks) -> None:
    facts = ranks.run(do_facts, meeting_point(), on=range(2))
    assert facts == [[rank, 2, rank, 2, 0, 1, 0, 2, 4010, 0] for rank in range(2)]


LARGE = (1 << 31) + 4099  # elements and bytes beyond what a 32-bit count holds


def do_large_count(seat: Seat, path: str) -> list[int]:
    # Making and touching 2 GiB takes a loaded machine long, and not the same time on both ranks.
    comm = Comm.local(path, seat.rank, 2, Config(timeout_s=240))
    data = np.zeros(LARGE, "int8")
    odd = [0, 1, (1 << 31) - 1, 1 << 31, LARGE - 1]
    data[odd] = [seat.rank + 10 + k for k in range(len(odd))]
    comm.allreduce(data, out=data)
    total = int(np.count_nonzero(data))
    found = [int(value) for value in data[odd]]
    comm.broadcast(data, root=1)
    comm.close()
    return [total, *found, int(np.count_nonzero(data))]


@pytest.mark.long
def test_counts_beyond_2_to_the_31_arrive_whole(ranks: Ranks) -> None:
    expected = [5, 21, 23, 25, 27, 29, 5]
    found = ranks.run(do_large_count, meeting_point(), on=range(2), limit_s=300)
    assert found == [expected] * 2


def do_broadcast_unpicklable(seat: Seat, path: str) -> None:
    comm = Comm.local(path, seat.rank, 2, CONFIGS["default"])
    kind, word = (
        ((TypeError, AttributeError, pickle.PicklingError), "pickle")
        if seat.rank
        else (HsgdError, "rank 1 cannot send its object: .*pickle")
    )
    with pytest.raises(kind, match=word):
        comm.broadcast_object(threading.Lock() if seat.rank else None, root=1)
    comm.barrier()
    comm.close()


def test_an_object_that_the_root_cannot_pickle_keeps_nobody_waiting() -> None:
    with Ranks(2) as pool:
        pool.run(do_broadcast_unpicklable, meeting_point())
