"""Programs of ranks over the core: each makes the same operations again and again.

Results are compared with the exact ones once in each block. Values are small integers, so that
float32 sums are exact in any order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import numpy as np

from campaigns.seat import check
from campaigns.soak.footprint import MEASURES, footprint
from campaigns.soak.sampled_seat import SampledSeat
from hsgd import Comm, NotifiedWindow, ParameterBox
from hsgd.config import Config

__all__ = [
    "arrays",
    "asynchronous",
    "box",
    "boxes",
    "collectives",
    "communicators",
    "opened",
    "splits",
    "window",
    "windows",
]

# Measures nothing, and takes little memory: communicators that are made for one call.
_SMALL = Config(timeout_s=120.0, oneshot_bytes=1024, chunk_bytes=4096, slots=3, store="ordinary")
_COUNT = 16


def _check_sum(comm: Comm) -> None:
    given = np.full(_COUNT, comm.rank + 1, np.float32)
    check(comm.allreduce(given), comm.size * (comm.size + 1) / 2)


def _small_calls(comm: Comm) -> list[Callable[[], object]]:
    given = np.full(_COUNT * comm.size, comm.rank, np.float32)
    some, number = given[:_COUNT].copy(), np.zeros(1, np.int64)
    out, many = np.empty_like(some), np.empty_like(given)
    large = np.ones(500, np.float32)
    return [
        lambda: comm.allreduce(some, out=out),
        lambda: comm.allreduce(number),
        lambda: comm.broadcast(number, comm.size - 1),
        lambda: comm.allgather(some, out=many),
        lambda: comm.reduce_scatter(given),
        lambda: comm.alltoall(given),
        lambda: comm.allreduce(large, name="large"),
        comm.barrier,
    ]


def collectives(seat: SampledSeat) -> None:
    """Blocking ones, of all kinds in turn."""
    with seat.communicator() as comm:
        calls = itertools.cycle(_small_calls(comm))
        for todo in seat.blocks():
            for call in itertools.islice(calls, todo):
                call()
            _check_sum(comm)


def asynchronous(seat: SampledSeat) -> None:
    """Eight at a time, waited for in another order; every other one's handle is dropped."""
    with seat.communicator() as comm:
        given = np.full(_COUNT, comm.rank + 1, np.float32)
        wanted = comm.size * (comm.size + 1) / 2
        for todo in seat.blocks():
            for left in range(todo, 0, -8):
                handles = [comm.allreduce_async(given) for _ in range(min(8, left))]
                for handle in reversed(handles[::2]):
                    handle.wait()
            check(comm.allreduce_async(given).wait(), wanted)


def communicators(seat: SampledSeat) -> None:
    """Made, used once and closed, one after the other."""
    for _ in seat.operations():
        with seat.communicator(_SMALL) as comm:
            _check_sum(comm)


def splits(seat: SampledSeat) -> None:
    """A part of all ranks, and one of each rank alone, in turn."""
    with seat.communicator(_SMALL) as comm:
        for number in seat.operations():
            part = comm.split(0 if number % 2 else comm.rank, key=-comm.rank)
            assert part is not None
            with part:
                _check_sum(part)


def arrays(seat: SampledSeat) -> None:
    """Two arrays of which one is dropped later than it could be."""
    with seat.communicator() as comm:
        kept = comm.empty(1)
        for _ in seat.operations():
            given = comm.empty(20_000)
            given[:] = comm.rank + 1
            comm.allreduce(given, out=given)
            check(given[::1000], comm.size * (comm.size + 1) / 2)
            kept = given
        del kept


def opened(seat: SampledSeat) -> None:
    """Rounds: many are open at once, and all of them used."""
    for _ in seat.operations():
        before = footprint()
        with contextlib.ExitStack() as stack:
            comms = [stack.enter_context(seat.communicator(_SMALL)) for _ in range(seat.width)]
            for comm in comms:
                _check_sum(comm)
            for measure, held, was in zip(MEASURES, footprint(), before, strict=True):
                seat.notes[f"{measure} of each"] = (held - was) / seat.width


def window(seat: SampledSeat) -> None:
    """A ring: each rank writes to the next one, which acknowledges."""
    with seat.communicator() as comm:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        data = np.arange(100, dtype=np.uint8)
        version = 0
        with NotifiedWindow(comm, data.size, 2, network=seat.network) as ring:
            ring.bind(0, before)
            ring.bind(1, after)
            for todo in seat.blocks():
                for _ in range(todo):
                    if version:
                        ring.wait_any([1], version - 1)
                    version += 1
                    ring.put_notify(data, after, 0, version)
                    ring.wait_any([0], version - 1)
                    ring.put_notify(None, before, 1, version)
                if not np.array_equal(ring.segment(), data):
                    raise AssertionError(f"segment: {ring.segment()[:8]}")
            ring.drain()
            comm.barrier()


def windows(seat: SampledSeat) -> None:
    """Made, used once and closed, one after the other, over one communicator."""
    with seat.communicator() as comm:
        after = (comm.rank + 1) % comm.size
        data = np.arange(100, dtype=np.uint8)
        for _ in seat.operations():
            with NotifiedWindow(comm, data.size, 1, network=seat.network) as ring:
                ring.put_notify(data, after, 0, 1)
                ring.wait_any([0])
                ring.drain()
                comm.barrier()


def box(seat: SampledSeat) -> None:
    """Everybody adds, and reads."""
    with seat.communicator() as comm:
        ones, found = np.ones(1000, np.float32), np.empty(1000, np.float32)
        with ParameterBox.over(comm, np.zeros(1000, np.float32), timeout_s=120.0) as shared:
            for number in seat.operations():
                if number % 4 == 0:
                    shared.write(ones)
                shared.accumulate(ones)
                shared.fetch_add(0, 1)
                shared.read(found)
            comm.barrier()
            made, number = shared.counter(0), seat.count * comm.size
            if made != number:
                raise AssertionError(f"{made} changes were counted, not {number}")


def boxes(seat: SampledSeat) -> None:
    """Made, used once and closed, one after the other, over one communicator."""
    with seat.communicator() as comm:
        ones = np.ones(100, np.float32)
        for _ in seat.operations():
            with ParameterBox.over(comm, ones, timeout_s=120.0) as shared:
                shared.accumulate(ones)
