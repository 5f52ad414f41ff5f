"""Asynchronous calls give what blocking ones give, in the order of the calls, and end alike."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import resource
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsgd import CollectiveTimeout, Comm, HsgdError, PeerLost, SignatureMismatch
from hsgd.config import Config
from outcomes import outcomes_of
from ranks import LIMIT_S, PATIENT, Ranks, Seat, meeting_point, switch_points, until_asleep
from reference import DTYPES, allreduced, as_torch, digest, made, zeros

__all__: list[str] = []

MOST_RANKS = 4
HASTY = Config(timeout_s=1.5)
DETECTED_S = 2.0
LARGE = 3_000_000  # elements: dozens of pipeline steps
CONFIGS = {
    "default": PATIENT,
    "tiny chunks": Config(timeout_s=30, oneshot_bytes=0, chunk_bytes=4096, slots=3),
    "no spin": Config(timeout_s=30, oneshot_bytes=100, chunk_bytes=5000, slots=5, spin=0),
}


@pytest.fixture(scope="module")
def paths() -> dict[tuple[int, str], str]:
    """Where the communicators of each size and configuration meet; made at first use, then kept."""
    return {(size, name): meeting_point() for size in range(1, MOST_RANKS + 1) for name in CONFIGS}


# --- results and order ---


class Call:
    """One drawn collective: what to do, and what must come out."""

    def __init__(self, draw: Callable[..., Any], size: int, config: Config) -> None:
        self.kind = draw(st.sampled_from(["allreduce", "allreduce", "broadcast", "barrier"]))
        self.blocking = draw(st.integers(0, 3)) == 0
        self.dtype = draw(st.sampled_from(DTYPES))
        item = zeros(1, self.dtype).itemsize
        near = [switch_point // item for switch_point in switch_points(config)]
        edges = st.sampled_from(near).flatmap(lambda edge: st.integers(max(0, edge - 1), edge + 1))
        self.count = draw(st.one_of(st.sampled_from([0, 1, 7, 1021, 10007]), edges))
        self.op = draw(st.sampled_from(["sum", "min", "max", "prod"]))
        self.root = draw(st.integers(0, size - 1))
        self.in_place = draw(st.booleans())
        self.tensor = self.dtype == "bfloat16" or draw(st.booleans())
        self.seed = draw(st.integers(0, 999))

    def expected(self, size: int) -> str:
        if self.kind == "barrier":
            return "barrier"
        if self.kind == "broadcast":
            return digest(made(self.seed, self.root, self.count, self.dtype))
        inputs = [made(self.seed, rank, self.count, self.dtype) for rank in range(size)]
        return digest(allreduced([inputs], self.dtype, self.op))


def do_calls(seat: Seat, path: str, size: int, name: str, calls: list[Call], seed: int) -> Any:
    """Digests of all results; this rank waits when, how and in which order it likes."""
    comm = seat.comm(path, size, CONFIGS[name])
    own = random.Random(seed * 10 + seat.rank)
    results: list[Any] = [None] * len(calls)
    open_calls: list[tuple[int, Any, Any, Any]] = []

    def wait_for_one() -> None:
        index, handle, out, stored = open_calls.pop(own.randrange(len(open_calls)))
        while True:
            try:
                result = handle.wait(own.choice([None, 0, 0.001]))
                break
            except TimeoutError:
                continue
        assert result is out and handle.done() and handle.wait() is out
        results[index] = "barrier" if stored is None else digest(stored)

    for index, call in enumerate(calls):
        data = made(call.seed, seat.rank, call.count, call.dtype)
        stored = data
        if call.kind == "allreduce" and not call.in_place:
            stored = zeros(call.count, call.dtype)
        array, out = (as_torch(x, call.dtype) if call.tensor else x for x in (data, stored))
        if own.random() < 0.2:
            time.sleep(own.random() * 0.002)  # jitter, not synchronization
        if call.blocking:
            if call.kind == "allreduce":
                comm.allreduce(array, call.op, out=array if call.in_place else out)
            elif call.kind == "broadcast":
                comm.broadcast(array, call.root)
            else:
                comm.barrier()
            results[index] = "barrier" if call.kind == "barrier" else digest(stored)
            assert all(handle.done() for _, handle, _, _ in open_calls), "a later call overtook"
        elif call.kind == "allreduce":
            out = array if call.in_place else out
            handle = comm.allreduce_async(array, call.op, out=out, name=f"#{index}")
            open_calls.append((index, handle, out, stored))
        elif call.kind == "broadcast":
            open_calls.append((index, comm.broadcast_async(array, call.root), array, stored))
        else:
            open_calls.append((index, comm.barrier_async(), None, None))
        if open_calls and own.random() < 0.4:
            wait_for_one()
    while open_calls:
        wait_for_one()
    return results


@pytest.mark.long
@settings(max_examples=120, derandomize=True, database=None)
@given(data=st.data())
def test_schedules_of_blocking_and_asynchronous_calls_equal_numpy(
    ranks: Ranks, paths: dict[tuple[int, str], str], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, MOST_RANKS), label="ranks")
    name = data.draw(st.sampled_from(sorted(CONFIGS)), label="config")
    length = data.draw(st.integers(1, 12), label="calls")
    calls = [Call(data.draw, size, CONFIGS[name]) for _ in range(length)]
    seed = data.draw(st.integers(0, 999), label="seed")
    results = ranks.run(do_calls, paths[size, name], size, name, calls, seed, on=range(size))
    assert results == [[call.expected(size) for call in calls]] * size


def do_result_kinds(seat: Seat, path: str) -> list[Any]:
    comm = seat.comm(path, 2)
    grad = torch.full((3, 2), float(seat.rank), requires_grad=True)
    handles = [
        comm.allreduce_async(np.full((2, 3), seat.rank + 1.0), "mean"),
        comm.allreduce_async(grad),
        comm.allreduce_async(grad, out=grad),
        comm.allreduce_async(torch.ones(4, dtype=torch.bfloat16)),
        comm.broadcast_async(bytearray([seat.rank, 7]), root=1),
        comm.barrier_async(),
    ]
    mean, new, in_place, bf16, text, nothing = (handle.wait() for handle in handles)
    assert in_place is grad and nothing is None
    return [mean.tolist(), new.tolist(), grad.tolist(), bf16.tolist(), bytes(text)]


def test_results_are_new_arrays_or_those_that_were_given(ranks: Ranks) -> None:
    for result in ranks.run(do_result_kinds, meeting_point(), on=range(2)):
        assert result == [[[1.5] * 3] * 2, [[1.0] * 2] * 3, [[1.0] * 2] * 3, [2.0] * 4, b"\x01\x07"]


# --- threads and communicators ---


def do_threads(seat: Seat, path: str, size: int) -> list[float]:
    """Equal calls of two threads, one blocking and one not: whichever of a peer each meets."""
    comm = seat.comm(path, size)
    sums: list[float] = []

    def blocking() -> None:
        for _ in range(30):
            sums.append(float(comm.allreduce(np.full(50_000, seat.rank + 1.0))[-1]))

    def asynchronous() -> None:
        for _ in range(10):
            handles = [comm.allreduce_async(np.full(50_000, seat.rank + 1.0)) for _ in range(3)]
            sums.extend(float(handle.wait()[-1]) for handle in handles)

    _in_threads(blocking, asynchronous)
    return sums


def _in_threads(*functions: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("size", [2, 3])
def test_two_threads_of_a_rank_may_share_a_communicator(ranks: Ranks, size: int) -> None:
    expected = [float(sum(range(1, size + 1)))] * 60
    assert ranks.run(do_threads, meeting_point(), size, on=range(size)) == [expected] * size


def do_communicators(seat: Seat, places: list[str]) -> list[list[float]]:
    """Four communicators with open calls in four threads, begun in another order on each rank."""
    comms = [seat.comm(path, 2, CONFIGS[sorted(CONFIGS)[i % 3]]) for i, path in enumerate(places)]
    sums: list[list[float]] = [[] for _ in comms]

    def work(index: int) -> None:
        for turn in range(15):
            handles = [
                comms[index].allreduce_async(np.full(count, turn + index + 1.0))
                for count in (3, 40_000)
            ]
            sums[index] += [float(handle.wait()[-1]) for handle in reversed(handles)]

    order = random.Random(seat.rank).sample(range(len(comms)), len(comms))
    _in_threads(*((lambda index=index: work(index)) for index in order))
    return sums


def test_several_communicators_work_at_once(ranks: Ranks) -> None:
    places = [meeting_point() for _ in range(4)]
    expected = [
        [2.0 * (turn + index + 1) for turn in range(15) for _ in range(2)] for index in range(4)
    ]
    assert ranks.run(do_communicators, places, on=range(2)) == [expected] * 2


def do_cross_order(seat: Seat, one: str, two: str) -> tuple[float, float]:
    """Each rank submits to the communicators in another order: no wait in between, no deadlock."""
    first, second = seat.comm(one, 2), seat.comm(two, 2)
    order = (first, second) if seat.rank else (second, first)
    handles = {comm: comm.allreduce_async(np.ones(100_000)) for comm in order}
    return float(handles[first].wait()[0]), float(handles[second].wait()[0])


def test_calls_on_two_communicators_need_no_common_order(ranks: Ranks) -> None:
    args = (meeting_point(), meeting_point())
    assert ranks.run(do_cross_order, *args, on=range(2)) == [(2.0, 2.0)] * 2


def _progress_threads() -> set[Path]:
    tasks = Path("/proc/self/task").iterdir()
    return {task for task in tasks if (task / "comm").read_text() == "hsgd-progress\n"}


def do_idle(seat: Seat, path: str) -> tuple[int, int, int, str, float]:
    """Threads before, during and after; the signals that the thread leaves to others; its CPU."""
    others = _progress_threads()  # of communicators of other tests
    with Comm.local(path, seat.rank, 2, PATIENT) as comm:
        comm.allreduce(np.ones(1000))
        before = _progress_threads() - others
        comm.allreduce_async(np.ones(1000)).wait(10)
        during = _progress_threads() - others
        (status,) = [(task / "status").read_text() for task in during]
        masks = dict(line.split(":\t") for line in status.splitlines())
        start = resource.getrusage(resource.RUSAGE_SELF)
        select.select([], [], [], 1.0)  # what is measured
        end = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    after = _progress_threads() - others
    return len(before), len(during), len(after), masks["SigBlk"], cpu_s


def test_the_thread_comes_with_the_first_call_sleeps_and_goes(ranks: Ranks) -> None:
    for before, during, after, blocked, cpu_s in ranks.run(do_idle, meeting_point(), on=range(2)):
        assert (before, during, after) == (0, 1, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1):
            assert int(blocked, 16) & (1 << (number - 1)), "signals are for the program's threads"
        assert cpu_s < 0.02


# --- arguments ---

WRONG: dict[str, tuple[Callable[[Comm], Any], type[Exception], str]] = {
    "strided": (lambda c: c.allreduce_async(np.ones(8)[::2]), ValueError, "not C-contiguous"),
    "dtype": (lambda c: c.allreduce_async(np.ones(4, complex)), TypeError, "float32, float64"),
    "op": (lambda c: c.allreduce_async(np.ones(4), "avg"), ValueError, "sum, mean, min"),
    "mean": (lambda c: c.allreduce_async(np.ones(4, int), "mean"), ValueError, "mean of int64"),
    "out": (lambda c: c.allreduce_async(np.ones(4), out=np.ones(5)), ValueError, "shape"),
    "read-only": (lambda c: c.broadcast_async(b"abc"), ValueError, "read-only"),
    "counts": (
        lambda c: c.reduce_scatter_async(np.ones(4), counts=[1, 2]),
        ValueError,
        "2 counts for 3 rows",
    ),
    "counts to send": (
        lambda c: c.alltoall_async(np.ones(4), send_counts=[4]),
        ValueError,
        "1 counts for 4 rows",
    ),
    "uneven": (lambda c: c.alltoall_async(np.ones(3)), ValueError, "give send_counts"),
    "extents": (
        lambda c: c.allgather_async(np.ones((2, 3)), out=np.ones((4, 2))),
        ValueError,
        "the same shape but for the number of rows",
    ),
    "in place": (
        lambda c: (lambda a: c.alltoall_async(a, out=a))(np.ones(4)),
        ValueError,
        "overlap",
    ),
    "root": (lambda c: c.broadcast_async(np.ones(4), root=2), ValueError, "ranks are 0 to 1"),
    "timeout": (lambda c: c.barrier_async().wait(-1), ValueError, "timeout is -1"),
    "no timeout": (lambda c: c.barrier_async().wait(float("nan")), ValueError, "timeout is nan"),
    "pickle": (lambda c: pickle.dumps(c.barrier_async()), TypeError, "cannot be pickled"),
    "copy": (lambda c: copy.copy(c.barrier_async()), TypeError, "cannot be pickled"),
}
STARTED = {"timeout", "no timeout", "pickle", "copy"}


def do_wrong(seat: Seat, path: str, wrong: str) -> str:
    """Only rank 1 is wrong: were anything sent that should not be, the next call would differ."""
    comm = seat.comm(path, 2)
    line = ""
    if seat.rank == 1:
        call, kind, _ = WRONG[wrong]
        with pytest.raises(kind) as caught:
            call(comm)
        assert not isinstance(caught.value, HsgdError)
        line = str(caught.value)
    elif wrong in STARTED:
        comm.barrier()
    assert comm.allreduce_async(np.ones(3)).wait().tolist() == [2.0] * 3
    return line


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_refused_at_once_and_nothing_is_sent(
    ranks: Ranks, pair: str, wrong: str
) -> None:
    line = ranks.run(do_wrong, pair, wrong, on=range(2))[1]
    assert WRONG[wrong][2] in line and "\n" not in line


def do_mismatch(seat: Seat, path: str, size: int) -> str:
    comm = seat.comm(path, size)
    data = np.full(50_000, seat.rank + 1.0)
    last = seat.rank == size - 1
    wrong = comm.allreduce_async(data, out=data, name="b" if last else "a")
    right = comm.allreduce_async(np.ones(50_000))
    assert right.wait()[0] == size
    with pytest.raises(SignatureMismatch) as caught:
        wrong.wait()
    with pytest.raises(SignatureMismatch):
        wrong.wait(0)
    assert (data == seat.rank + 1.0).all(), "the buffer was touched"
    assert repr(wrong) == f'<hsgd.Handle of allreduce "{"b" if last else "a"}", done>'
    comm.barrier()
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_mismatch_is_told_by_its_handle_and_the_queue_goes_on(ranks: Ranks, size: int) -> None:
    reports = ranks.run(do_mismatch, meeting_point(), size, on=range(size))
    assert len(set(reports)) == 1
    assert '"a"' in reports[0] and '"b"' in reports[0] and f"rank {size - 1} " in reports[0]


# --- time limits ---


def do_wait_in_vain(seat: Seat, path: str) -> str:
    comm = seat.comm(path, 2)
    if seat.rank == 1:
        seat.pipe.recv()
        comm.allreduce(np.ones(LARGE), name="late")
        return ""
    handle = comm.allreduce_async(np.ones(LARGE), name="late")
    assert not handle.done() and "open" in repr(handle)
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError) as caught:
            handle.wait(timeout)
        assert not isinstance(caught.value, HsgdError)
    seat.tell("waited in vain")
    assert handle.wait()[0] == 2.0
    return str(caught.value)


def test_a_passed_timeout_leaves_the_operation_running(ranks: Ranks) -> None:
    ranks.start(do_wait_in_vain, meeting_point(), on=range(2))
    ranks.hear(0)
    ranks.send(1, "come")
    (line, _) = [outcome.value for outcome in ranks.finish(on=range(2))]
    assert (
        line
        == 'allreduce "late": not finished within 0.05 s; it is still running, wait for it again'
    )


def do_stay_away(seat: Seat, path: str) -> list[str]:
    comm = seat.comm(path, 3, HASTY)
    if seat.rank == 2:
        seat.pipe.recv()
        return []
    handles = [comm.allreduce_async(np.ones(3)) for _ in range(2)]
    with pytest.raises(CollectiveTimeout) as caught:
        handles[0].wait(60)
    assert caught.value.rank == 2  # type: ignore[attr-defined]
    with pytest.raises(CollectiveTimeout, match="broken since an earlier error") as rest:
        handles[
            1
        ].wait()  # of the same class: who catches that need not know which wait comes first
    assert rest.value.rank == 2
    with pytest.raises(CollectiveTimeout):
        handles[0].wait()
    return [str(caught.value)]


def test_the_deadline_of_the_collective_itself_is_told_by_the_handle() -> None:
    with Ranks(3) as pool:
        pool.start(do_stay_away, meeting_point())
        outcomes = pool.finish(on=(0, 1))
        pool.send(2, "end")
        for outcome in outcomes:
            assert outcome.error is None, outcome.trace
            assert f"rank 2 (pid {pool.pid(2)}, " in outcome.value[0]
        pool.finish(on=[2])


# --- deaths and interrupts ---

CALLS: dict[str, Callable[[Comm, np.ndarray], Any]] = {
    "small allreduce": lambda comm, data: comm.allreduce_async(data[:5]),
    "large allreduce": lambda comm, data: comm.allreduce_async(data, out=data),
    "large broadcast": lambda comm, data: comm.broadcast_async(data, root=comm.size - 1),
    "barrier": lambda comm, data: comm.barrier_async(),
    "large reduce_scatter": lambda comm, data: comm.reduce_scatter_async(data),
    "large allgather": lambda comm, data: comm.allgather_async(data),
    "large alltoall": lambda comm, data: comm.alltoall_async(
        data, send_counts=[len(data) // comm.size] * comm.size
    ),
}
WAITS = {"wait": None, "wait with a limit": 60.0}


def do_until_lost(seat: Seat, path: str, size: int, call: str, timeout: float | None) -> Any:
    comm = seat.comm(path, size)
    data = np.ones(LARGE)
    seat.tell("ready")
    seat.pipe.recv()
    handles = []
    try:
        for turn in range(1_000_000):
            handles = [CALLS[call](comm, data) for _ in range(3)]
            handles[turn % 3].wait(timeout)
            handles[2].wait(timeout)
    except HsgdError:
        pass
    errors = []
    for handle in handles:
        try:
            handle.wait(timeout)
        except HsgdError as error:
            errors.append((type(error).__name__, str(error), error.rank))
    told_at = time.monotonic()
    with pytest.raises(HsgdError, match="broken since an earlier error"):
        comm.barrier_async().wait()
    comm.close()
    return errors, told_at


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_killed_while_handles_are_waited_for_is_named(
    size: int, call: str, waits: str
) -> None:
    victim = size // 2
    with Ranks(size) as pool:
        pool.start(do_until_lost, meeting_point(), size, call, WAITS[waits])
        for rank in range(size):
            pool.hear(rank)
        pid = pool.pid(victim)
        for rank in range(size):
            pool.send(rank, "go")
        select.select([], [], [], 0.02)  # some calls into the loop; any moment will do
        pool.signal(victim, signal.SIGKILL)
        killed = time.monotonic()
        for outcome in pool.finish(on=set(range(size)) - {victim}):
            assert outcome.error is None, outcome.trace
            (first, *rest), told_at = outcome.value
            kind, line, rank = first
            assert (kind, rank) == ("PeerLost", victim)
            line = line.rpartition("earlier error: ")[2]  # it may have been told in a call before
            assert f"rank {victim} (pid {pid}, " in line and line.endswith(" died")
            assert all("broken since an earlier error" in each[1] for each in rest)
            assert told_at - killed < DETECTED_S


def do_wait_interrupted(seat: Seat, path: str, how: str) -> str:
    comm = seat.comm(path, 2)
    seat.tell("ready")
    if seat.rank == 0:
        seat.pipe.recv()
        try:
            comm.allreduce(np.ones(LARGE))
        except PeerLost as error:
            return str(error)
        return "finished"
    handle = comm.allreduce_async(np.ones(LARGE))
    try:
        if how == "close":
            comm.close()
        elif how == "blocking call":
            comm.barrier()
        else:
            handle.wait(WAITS[how])
    except KeyboardInterrupt:
        with pytest.raises(HsgdError, match="rank 1 was interrupted"):
            handle.wait()
        seat.tell("interrupted")
        return "interrupted"
    return "finished"


@pytest.mark.parametrize("how", [*WAITS, "blocking call", "close"])
def test_ctrl_c_ends_a_wait_at_once_and_tells_the_others(how: str) -> None:
    with Ranks(2) as pool:
        pool.start(do_wait_interrupted, meeting_point(), how)
        assert [pool.hear(rank) for rank in range(2)] == ["ready", "ready"]
        until_asleep(pool.pid(1))
        pool.signal(1, signal.SIGINT)
        assert pool.hear(1) == "interrupted"
        pool.send(0, "go")
        reports, interrupted = [outcome.value for outcome in pool.finish()]
        assert interrupted == "interrupted" and reports.endswith("rank 1 was interrupted")


# --- who keeps what, and for how long ---


def do_drop(seat: Seat, path: str, kind: str) -> list[Any]:
    comm = seat.comm(path, 2)
    out = np.zeros(LARGE)
    data = torch.ones(LARGE, dtype=torch.float64) if kind == "tensor" else np.ones(LARGE)
    held = weakref.ref(data)
    if seat.rank == 1:
        seat.pipe.recv()
    handle = comm.allreduce_async(data, out=torch.from_numpy(out) if kind == "tensor" else out)
    del data, handle
    gc.collect()
    if seat.rank == 0:
        if kind == "array":  # of a tensor the memory is held, not the object
            assert held() is not None, "the input went while it was in use"
        seat.tell("dropped")
    comm.barrier()
    return [held() is None, out.min(), out.max()]


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_dropped_handle_does_not_free_buffers_in_use(ranks: Ranks, kind: str) -> None:
    ranks.start(do_drop, meeting_point(), kind, on=range(2))
    ranks.hear(0)
    ranks.send(1, "come")
    assert [o.value for o in ranks.finish(on=range(2))] == [[True, 2.0, 2.0]] * 2


def do_resize(seat: Seat, path: str) -> bytes:
    """The buffer stays exported while it is in use, and is given back afterwards."""
    comm = seat.comm(path, 2)
    data = bytearray([seat.rank, 7])
    if seat.rank == 1:
        seat.pipe.recv()
    handle = comm.broadcast_async(data, root=1)
    if seat.rank == 0:
        with pytest.raises(BufferError):
            data.extend(b"more")
        seat.tell("refused")
    handle.wait()
    data.extend(b"more")
    return bytes(data)


def test_a_buffer_cannot_be_resized_while_it_is_in_use(ranks: Ranks) -> None:
    ranks.start(do_resize, meeting_point(), on=range(2))
    ranks.hear(0)
    ranks.send(1, "come")
    assert [o.value for o in ranks.finish(on=range(2))] == [b"\x01\x07more"] * 2


def do_close_with_open_handles(seat: Seat, path: str, how: str) -> list[Any]:
    comm = Comm.local(path, seat.rank, 2, PATIENT)
    outs = [np.zeros(200_000) for _ in range(4)]
    handles = [comm.allreduce_async(np.ones(200_000), out=out) for out in outs]
    if how == "close":
        comm.close()
        assert comm.closed and all(handle.done() for handle in handles)
        with pytest.raises(HsgdError, match="closed"):
            comm.barrier_async()
        for handle, out in zip(handles, outs, strict=True):
            assert handle.wait() is out
    else:
        del comm  # the handles keep it
        if how == "wait":
            assert handles[-1].wait()[0] == 2.0
        del handles
    return [float(value) for out in outs for value in (out.min(), out.max())]


@pytest.mark.parametrize("how", ["close", "forget", "wait"])
def test_closing_with_open_handles_finishes_them(ranks: Ranks, how: str) -> None:
    results = ranks.run(do_close_with_open_handles, meeting_point(), how, on=range(2))
    assert results == [[2.0] * 8] * 2


def do_close_in_vain(seat: Seat, path: str) -> list[str]:
    """Rank 0 closes with handles open of which the peer knows nothing; nobody ever comes."""
    comm = seat.comm(path, 2, HASTY)
    if seat.rank == 1:
        seat.pipe.recv()
        return []
    handles = [comm.allreduce_async(np.ones(10)) for _ in range(3)]
    comm.close()
    lines = []
    for handle in handles:
        with pytest.raises(HsgdError) as caught:
            handle.wait()
        lines.append(f"{type(caught.value).__name__} {caught.value}")
    return lines


def test_closing_with_handles_that_nobody_joins_takes_one_deadline() -> None:
    with Ranks(2) as pool:
        pool.start(do_close_in_vain, meeting_point())
        (outcome,) = pool.finish(on=[0])
        pool.send(1, "end")
        pool.finish(on=[1])
        assert outcome.error is None, outcome.trace
        assert outcome.seconds < HASTY.timeout_s + DETECTED_S
        first, *rest = outcome.value
        assert first.startswith("CollectiveTimeout") and "did not call it" in first
        assert all("broken since an earlier error" in line for line in rest)


def do_fork(seat: Seat, path: str, how: str) -> float:
    """A child with its parent's open handles is refused, and harms nobody when it ends."""
    comm = seat.comm(path, 2)
    if seat.rank == 1:
        seat.pipe.recv()
    handles = [comm.allreduce_async(np.ones(200_000)) for _ in range(2)]
    if seat.rank == 0:
        child = os.fork()
        if child == 0:
            try:
                _as_child(seat, comm, handles, how)
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        seat.tell("the child has ended")
    total = sum(float(handle.wait()[0]) for handle in handles)
    return total + float(comm.allreduce(np.ones(4))[0])


def _as_child(seat: Seat, comm: Comm, handles: list[Any], how: str) -> None:
    if how == "waits":
        for timeout in (None, 1.0):
            with pytest.raises(HsgdError, match="forked child"):
                handles[0].wait(timeout)
        assert not handles[0].done()
        for call in (comm.barrier, comm.barrier_async):
            with pytest.raises(HsgdError, match=f"belongs to process {os.getppid()}"):
                call()
    elif how == "forgets":
        seat.kept.clear()
        handles.clear()
        del comm
        gc.collect()
    else:
        import atexit

        atexit._run_exitfuncs()


@pytest.mark.parametrize("how", ["waits", "forgets", "interpreter"])
def test_a_forked_child_does_not_touch_open_handles(ranks: Ranks, how: str) -> None:
    ranks.start(do_fork, meeting_point(), how, on=range(2))
    ranks.hear(0)
    ranks.send(1, "come")
    assert [outcome.value for outcome in ranks.finish(on=range(2))] == [6.0, 6.0]


END = """
import sys, time
import numpy as np
from hsgd import Comm
from hsgd.config import Config

rank, path, how = int(sys.argv[1]), *sys.argv[2:]
comm = Comm.local(path, rank, 2, Config(timeout_s=2 if "much" in how else 30))
comm.barrier()
if how == "finishes" and rank == 1:
    time.sleep(0.3)  # rank 0 is at its end by now, most likely; any time will do
    assert comm.allreduce(np.ones(500_000))[0] == 2.0
    print("the last collective of the other rank was finished")
elif how == "thread with much to say" and rank == 1:
    sys.stdin.read()  # the other rank has ended then
elif how == "finishes" or rank == 0:
    handles = [comm.allreduce_async(np.ones(500_000))]
    if how == "raises":
        raise RuntimeError("a bug of the program")
    if "thread" in how:
        import threading
        if how == "thread with much to say":  # so that the interpreter ends in the midst of it
            def say(error):
                while True:
                    sys.stderr.write("x" * 1_000_000)
            threading.excepthook = say
        threading.Thread(target=handles[0].wait, daemon=True).start()
print("end of the program")
"""


THREADS = ("thread", "thread with much to say")


@pytest.mark.parametrize("how", ["finishes", "leaves", "raises", *THREADS])
def test_the_interpreter_ends_with_open_handles(how: str) -> None:
    """What others join is finished, what nobody joins fails, and nothing hangs or crashes."""
    first, last = outcomes_of(END, meeting_point(), how, limit_s=25)
    assert [first.returncode, last.returncode] == [int(how == "raises"), 0], (first, last)
    assert ("a bug of the program" in first.stderr) == (how == "raises")
    assert "end of the program" in last.stdout
    assert ("was finished" in last.stdout) == (how == "finishes"), (first, last)


def do_abort(seat: Seat, path: str, expires: bool) -> list[str]:
    """Rank 0 gives up a collective that waits in another thread; rank 1 comes later."""
    comm = seat.comm(path, 2)
    if seat.rank == 1:
        seat.tell("ready")
        assert seat.pipe.recv() == "go"
        with pytest.raises(HsgdError) as lost:
            # The first may succeed: rank 0 had brought its part.
            [comm.allreduce(np.ones(3)) for _ in range(2)]
        comm.close()
        return [type(lost.value).__name__, str(lost.value)]
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            comm.allreduce(np.ones(3))
        except HsgdError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)  # usually it waits by then
    comm.expire(2.5) if expires else comm.abort()
    thread.join(LIMIT_S / 2)
    assert not thread.is_alive()
    with pytest.raises(HsgdError) as later:
        comm.allreduce(np.ones(3))
    comm.close()
    comm.abort()  # does nothing
    return [str(failures[0]), str(later.value)]


@pytest.mark.parametrize("expires", [False, True])
def test_a_collective_that_waits_is_ended_from_another_thread(expires: bool) -> None:
    with Ranks(2) as pool:
        pool.start(do_abort, meeting_point(), expires)
        assert pool.hear(1) == "ready"
        (aborted,) = pool.finish(on=[0])
        pool.send(1, "go")
        (other,) = pool.finish(on=[1])
    assert aborted.error is None and other.error is None, (aborted.trace, other.trace)
    waited, later = aborted.value
    late = "allreduce #1: not finished within the timeout of 2.5 s: rank 1 (pid "
    assert waited.startswith(late) if expires else waited == "allreduce #1: rank 0 was interrupted"
    assert "broken" in later
    kind, text = other.value
    assert kind == ("CollectiveTimeout" if expires else "PeerLost")
    assert late in text if expires else "rank 0" in text
