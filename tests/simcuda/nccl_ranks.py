"""What ranks do in test_simnccl.py: python nccl_ranks.py CASE RANK SIZE ID.

Owns the reference of each operation, in NumPy, and the ranks' inputs, which all of them can make.
A rank that ends with status 0 found what it expected.
"""

from __future__ import annotations

import sys
from functools import reduce as fold
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from simcuda_build import build
from simulated import DeviceArray, Simulator
from simulated_nccl import DTYPES, OPS, NcclError, SimulatedNccl

__all__: list[str] = []

Array = npt.NDArray[Any]
COUNT = 1013  # elements; a prime
LONG = 100_003  # elements of float32: several times the rings' bytes


class Rank:
    """This process, with its communicator."""

    def __init__(self, rank: int, size: int, unique_id: bytes) -> None:
        self.rank, self.size = rank, size
        self.simulator = Simulator(build())
        self.nccl = SimulatedNccl(self.simulator)
        self.comm = self.nccl.comm(unique_id, rank, size)
        self.stream = self.simulator.stream()

    def array(self, values: Array) -> DeviceArray:
        return self.simulator.array(values, self.stream)

    def close(self) -> None:
        self.nccl.destroy(self.comm)
        counters = self.simulator.counters()
        assert counters.violations == 0, self.simulator.last_violation()
        assert self.nccl.counters().live_comms == 0


def values(rank: int, dtype: str, count: int = COUNT) -> Array:
    """Of one rank. A bfloat16 is kept in uint16; products of a few stay within the range."""
    random = np.random.default_rng(rank * 100 + DTYPES.index(dtype))
    if dtype == "bfloat16":
        return to_bfloat16(random.normal(size=count).astype(np.float32))
    if "float" in dtype:
        return random.normal(size=count).astype(dtype)
    info = np.iinfo(dtype)
    return random.integers(info.min // 8, info.max // 8, size=count, dtype=dtype)


def to_bfloat16(wide: Array) -> Array:
    bits = wide.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(array: Array, dtype: str) -> Array:
    """In the type that NCCL combines in."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "float16" else array


def combined(parts: list[Array], dtype: str, op: str) -> Array:
    """The result of a reduction, in the order of the ranks."""
    functions: dict[str, np.ufunc] = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}
    wide = [widened(part, dtype) for part in parts]
    with np.errstate(over="ignore"):
        total = fold(functions.get(op, np.add), wide)
    if op == "avg" and "float" in dtype:
        total = (total / total.dtype.type(len(parts))).astype(total.dtype)
    elif op == "avg":  # towards 0
        whole = np.abs(total.astype(object)) // len(parts) * np.sign(total.astype(object))
        total = whole.astype(dtype)
    return to_bfloat16(total) if dtype == "bfloat16" else total.astype(parts[0].dtype)


def same(found: Array, expected: Array, what: str) -> None:
    assert found.dtype == expected.dtype, what
    assert np.array_equal(found, expected), f"{what}: {found} is not {expected}"


def reductions(me: Rank) -> None:
    """All types and operations: allreduce, and reduce_scatter and reduce to the last rank."""
    for dtype in DTYPES:
        parts = [values(rank, dtype, COUNT * me.size) for rank in range(me.size)]
        for op in OPS:
            expected = combined(parts, dtype, op)
            with (
                me.array(parts[me.rank]) as source,
                me.array(np.zeros_like(parts[0])) as total,
                me.array(np.zeros_like(parts[0][:COUNT])) as block,
                me.array(np.zeros_like(parts[0])) as reduced,
            ):
                size, root, last = source.size, me.size - 1, (me.comm, me.stream)
                me.nccl.all_reduce((source.pointer, total.pointer), size, dtype, op, *last)
                me.nccl.reduce_scatter((source.pointer, block.pointer), COUNT, dtype, op, *last)
                to = reduced.pointer if me.rank == root else 0
                me.nccl.reduce((source.pointer, to), size, dtype, op, root, *last)
                what = f"{dtype} {op}"
                same(total.numpy(), expected, f"all_reduce {what}")
                mine = slice(me.rank * COUNT, (me.rank + 1) * COUNT)
                same(block.numpy(), expected[mine], f"reduce_scatter {what}")
                untouched = np.zeros_like(expected)
                same(reduced.numpy(), expected if to else untouched, f"reduce {what}")


def copies(me: Rank) -> None:
    """All types: all_gather, and broadcasts from each rank, which others give no source."""
    for dtype in DTYPES:
        parts = [values(rank, dtype) for rank in range(me.size)]
        with me.array(parts[me.rank]) as source, me.array(np.concatenate(parts) * 0) as all_parts:
            buffers = source.pointer, all_parts.pointer
            me.nccl.all_gather(buffers, COUNT, dtype, me.comm, me.stream)
            same(all_parts.numpy(), np.concatenate(parts), f"all_gather {dtype}")
            for root in range(me.size):
                given = source.pointer if me.rank == root else 0
                buffers = given, all_parts.pointer
                me.nccl.broadcast(buffers, COUNT, dtype, root, me.comm, me.stream)
                same(all_parts.numpy()[:COUNT], parts[root], f"broadcast {dtype}")


def in_place(me: Rank) -> None:
    """Long buffers that are source and target at once, as NCCL allows it."""
    parts = [values(rank, "float32", LONG * me.size) for rank in range(me.size)]
    mine = slice(me.rank * LONG, (me.rank + 1) * LONG)
    expected = combined(parts, "float32", "sum")
    with me.array(parts[me.rank]) as array:
        own = array.pointer + me.rank * LONG * 4
        me.nccl.reduce_scatter((array.pointer, own), LONG, "float32", "sum", me.comm, me.stream)
        same(array.numpy()[mine], expected[mine], "reduce_scatter")
        me.nccl.all_gather((own, array.pointer), LONG, "float32", me.comm, me.stream)
        same(array.numpy(), expected, "all_gather")
        both = array.pointer, array.pointer
        me.nccl.all_reduce(both, array.size, "float32", "max", me.comm, me.stream)
        me.nccl.broadcast(both, array.size, "float32", 0, me.comm, me.stream)
        same(array.numpy(), expected, "all_reduce and broadcast")


def groups(me: Rank) -> None:
    """Each rank sends a long part to each other and itself, beside a collective, in one group."""
    parts = [values(rank, "float32", LONG * me.size) for rank in range(me.size)]
    with (
        me.array(parts[me.rank]) as source,
        me.array(np.zeros_like(parts[0])) as target,
        me.array(np.zeros(LONG, np.float32)) as total,
    ):
        with me.nccl.group():
            for peer in range(me.size):
                there, last = peer * LONG * 4, ("float32", peer, me.comm, me.stream)
                me.nccl.send(source.pointer + there, LONG, *last)
                me.nccl.receive(target.pointer + there, LONG, *last)
            buffers = source.pointer, total.pointer
            me.nccl.all_reduce(buffers, LONG, "float32", "sum", me.comm, me.stream)
        mine = slice(me.rank * LONG, (me.rank + 1) * LONG)
        same(target.numpy(), np.concatenate([part[mine] for part in parts]), "sends")
        same(total.numpy(), combined([part[:LONG] for part in parts], "float32", "sum"), "sum")
    counters = me.nccl.counters()
    assert counters.calls == 2 * me.size + 1, counters
    assert counters.bytes_sent == 4 * LONG * (me.size + 1), counters


def launch_order(me: Rank) -> None:
    """Two streams, one communicator: the second waits for the first, on every rank."""
    other = me.simulator.stream()
    ones = np.ones(COUNT, np.float32)
    with me.array(ones) as array:
        both = array.pointer, array.pointer
        for _ in range(5):
            me.nccl.all_reduce(both, COUNT, "float32", "sum", me.comm, me.stream)
            me.nccl.all_reduce(both, COUNT, "float32", "max", me.comm, other)
        me.simulator.synchronize(other)
        same(array.numpy(), ones * np.float32(me.size**5), "all_reduce on two streams")
    me.simulator.destroy_stream(other)


def abort(me: Rank) -> None:
    """Rank 0 waits for peers that do not come; its abort lets the stream go on."""
    if me.rank == 0:
        with me.array(np.zeros(COUNT, np.float32)) as array:
            both, before = (array.pointer, array.pointer), me.simulator.counters()
            me.nccl.all_reduce(both, COUNT, "float32", "sum", me.comm, me.stream)
            me.nccl.all_reduce(both, COUNT, "float32", "sum", me.comm)
            assert not me.simulator.done(me.stream)
            me.nccl.abort(me.comm)
            me.simulator.scale_add(me.stream, *both, COUNT, "float32", 0, 7)
            me.simulator.synchronize()
            assert me.nccl.counters().aborted == 2
            same(array.numpy(), np.full(COUNT, 7, np.float32), "after the abort")
            assert me.simulator.counters().violations == before.violations == 0
    else:
        me.nccl.abort(me.comm)
    assert me.nccl.counters().live_comms == 0


def mismatch(me: Rank) -> None:
    """Ranks that call different operations hang; the simulator knows why."""
    with me.array(np.zeros(COUNT, np.float32)) as array:
        both, last = (array.pointer, array.pointer), (me.comm, me.stream)
        if me.rank == 0:
            me.nccl.all_reduce(both, COUNT, "float32", "sum", *last)
        else:
            me.nccl.broadcast(both, COUNT - 1, "float32", 1, *last)
            me.simulator.synchronize()  # the sender's part ends
        while me.rank == 0 and me.simulator.counters().violations == 0:
            pass
        me.nccl.abort(me.comm)
    if me.rank == 0:
        assert "rank 0 waits for function" in me.simulator.last_violation()


def refused(rank: int, size: int, unique_id: bytes, code: int) -> None:
    """The communicator is refused with this code."""
    with pytest.raises(NcclError) as caught:
        Rank(rank, size, unique_id)
    assert caught.value.code == code, caught.value
    assert code != 5 or "Duplicate GPU detected" in str(caught.value)


def main() -> None:
    case, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    unique_id = bytes.fromhex(sys.argv[4])
    if case.startswith("refused"):
        return refused(rank, size, unique_id, int(case.removeprefix("refused")))
    me = Rank(rank, size, unique_id)
    cases = (reductions, copies, in_place, groups, launch_order, abort, mismatch)
    by_name = {each.__name__: each for each in cases}
    for name in case.split("+"):
        by_name[name](me)
    if not {"abort", "mismatch"} & set(case.split("+")):
        me.close()


if __name__ == "__main__":
    main()
