"""Programs of ranks over the core: collectives in all forms, one-sided writes, the parameter box.

Each makes its steps until the case ends and compares every result with the exact one. Values are
small integers, so that float32 sums are exact in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from campaigns.chaos.fault_seat import FaultSeat
from campaigns.seat import WrongResult, check
from hsgd import Comm, NotifiedWindow, ParameterBox

__all__ = ["arrays", "asynchronous", "blocking", "box", "split", "window"]

_KINDS = (
    *("allreduce", "allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier"),
)
_COUNTS = (1, 100, 3000, 20_000, 100_000, 300_000)  # float32
Values = np.ndarray[Any, Any]


def _given(rank: int, step: int, count: int) -> Values:
    return np.full(count, (rank + step) % 7, np.float32)


def _sum(comm: Comm, step: int) -> float:
    return float(sum((rank + step) % 7 for rank in range(comm.size)))


def _blocks(comm: Comm, step: int, count: int) -> Values:
    return np.concatenate([_given(rank, step, count) for rank in range(comm.size)])


def _one(seat: FaultSeat, comm: Comm, step: int) -> None:
    """Make one collective of any kind."""
    kind, count = seat.luck.choice(_KINDS), seat.luck.choice(_COUNTS)
    given, root = _given(comm.rank, step, count), step % comm.size
    if kind == "allreduce":
        check(comm.allreduce(given), _sum(comm, step), kind)
    elif kind == "broadcast":
        check(comm.broadcast(given, root), float((root + step) % 7), kind)
    elif kind == "allgather":
        check(comm.allgather(given), _blocks(comm, step, count), kind)
    elif kind == "reduce_scatter":
        check(comm.reduce_scatter(np.tile(given, comm.size)), _sum(comm, step), kind)
    elif kind == "alltoall":
        check(comm.alltoall(np.tile(given, comm.size)), _blocks(comm, step, count), kind)
    else:
        comm.barrier()


def blocking(seat: FaultSeat) -> None:
    """One collective in each step."""
    with seat.communicator() as comm:
        for step in seat.loop():
            _one(seat, comm, step)


def asynchronous(seat: FaultSeat) -> None:
    """Some collectives at once in each step, waited for in another order."""
    with seat.communicator() as comm:
        for step in seat.loop():
            counts = [seat.luck.choice(_COUNTS) for _ in range(seat.luck.randrange(1, 5))]
            handles = [comm.allreduce_async(_given(comm.rank, step, count)) for count in counts]
            gathered = comm.allgather_async(_given(comm.rank, step, 50))
            seat.own_luck.shuffle(handles)
            for handle in handles:
                check(handle.wait(), _sum(comm, step), "allreduce_async")
            check(gathered.wait(), _blocks(comm, step, 50), "allgather_async")


def arrays(seat: FaultSeat) -> None:
    """Collectives in place on memory that ranks of a node can reach, and on memory of the node."""
    with seat.communicator() as comm:
        count = 50_000
        given, taken = comm.empty(count), comm.empty(count)
        node = comm.shared(comm.size)
        for step in seat.loop():
            given[:] = _given(comm.rank, step, count)
            comm.allreduce(given, out=taken)
            check(taken, _sum(comm, step), "allreduce in shared memory")
            node[comm.rank] = step
            comm.barrier()
            mates = [rank for rank in range(comm.size) if seat.nodes[rank] == seat.nodes[comm.rank]]
            check(node[mates], float(step), "memory of the node")
            comm.barrier()
            if step % 20 == 19:
                given, taken = comm.empty(count), comm.empty(count)


def split(seat: FaultSeat) -> None:
    """Parts of the ranks, made anew again and again."""
    with seat.communicator() as comm:
        for step in seat.loop():
            part = comm.split(comm.rank % 2, key=comm.rank)
            assert part is not None
            with part:
                _one(seat, part, step)
            _one(seat, comm, step)


def window(seat: FaultSeat) -> None:
    """A ring: each rank writes to the next one, which acknowledges."""
    with seat.communicator() as comm:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        most = 100_000
        with NotifiedWindow(comm, most, 2, network=seat.network) as ring:
            ring.bind(0, before)
            ring.bind(1, after)
            memory = ring.segment()
            for step in seat.loop():
                size, version = seat.luck.choice((0, 1, 4096, most)), step + 1
                if step > 0:
                    ring.wait_any([1], step - 1)
                ring.put_notify(np.full(size, version % 251, np.uint8), after, 0, version)
                found = ring.wait_any([0], step)
                if found != (0, version):
                    raise WrongResult(f"NotifiedWindow: told {found}, not version {version}")
                check(memory[:size], version % 251, "NotifiedWindow")
                ring.put_notify(None, before, 1, version)
            ring.drain()
            here = comm.barrier_async()  # writes of others go on meanwhile
            while not here.done():
                ring.done(0)
            here.wait()


def box(seat: FaultSeat) -> None:
    """Everybody adds, and reads chunks that must be whole."""
    with seat.communicator() as comm:
        count, chunk = 5000, 16
        with ParameterBox.over(
            comm, np.zeros(count, np.float32), chunk_bytes=4 * chunk, timeout_s=seat.timeout_s
        ) as shared:
            found = np.empty(count, np.float32)
            least = 0.0
            for step in seat.loop():
                shared.accumulate(np.ones(count, np.float32))
                shared.refresh()
                shared.read(found)
                chunks = found[: count // chunk * chunk].reshape(-1, chunk)
                if (chunks != chunks[:, :1]).any():
                    raise WrongResult("ParameterBox: a chunk is torn")
                if chunks.min() < least or chunks.max() > comm.size * seat.steps:
                    raise WrongResult(f"ParameterBox: from {chunks.min()} to {chunks.max()}")
                least = step + 1.0 if seat.node_count == 1 else least
