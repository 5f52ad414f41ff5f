"""The collectives that can be measured: how large their buffers are and what must come back.

bindings.py calls them. BYTES is the size of the larger buffer of a rank; where it is cut into a
block per rank, blocks are rounded down to whole float32, one at least. native/worker.c has the same
rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.pattern import Floats, Pattern

__all__ = ["OPERATIONS", "Operation"]

ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Operation:
    """One collective on float32."""

    name: str
    about: str
    counts: Callable[[int, int], tuple[int, int]]  # elements in and out, of (ranks, bytes)
    expected: Callable[[Pattern, int, int, int], Floats]  # of (pattern, rank, buffer, count out)
    alike: bool  # all ranks end with the same result
    in_place: bool = False  # the root's result is its input, and no rank has another


def _whole(ranks: int, nbytes: int) -> tuple[int, int]:
    return nbytes // ITEM, nbytes // ITEM


def _block(ranks: int, nbytes: int) -> int:
    return max(1, nbytes // ITEM // ranks)


def _gathered(numbers: Pattern, rank: int, buffer: int, count: int) -> Floats:
    block = count // numbers.ranks
    return np.concatenate([numbers.given(r, buffer, block) for r in range(numbers.ranks)])


def _scattered(numbers: Pattern, rank: int, buffer: int, count: int) -> Floats:
    whole = numbers.expected(buffer, count * numbers.ranks)
    return whole[rank * count : (rank + 1) * count]


def _exchanged(numbers: Pattern, rank: int, buffer: int, count: int) -> Floats:
    block = count // numbers.ranks
    own = slice(rank * block, (rank + 1) * block)
    return np.concatenate([numbers.given(r, buffer, count)[own] for r in range(numbers.ranks)])


def _summed(numbers: Pattern, rank: int, buffer: int, count: int) -> Floats:
    return numbers.expected(buffer, count)


def _of_root(numbers: Pattern, rank: int, buffer: int, count: int) -> Floats:
    return numbers.given(0, buffer, count)


def _one_block(ranks: int, nbytes: int) -> tuple[int, int]:
    return _block(ranks, nbytes), _block(ranks, nbytes) * ranks


_ALL = (
    Operation("allreduce", "the sum over ranks, on each", _whole, _summed, alike=True),
    Operation("broadcast", "the data of rank 0, on each, in place",
              lambda _, nbytes: (0, nbytes // ITEM), _of_root, alike=True, in_place=True),
    Operation("allgather", "the blocks of all ranks one after another, on each; bytes are those of "
              "the result", _one_block, _gathered, alike=True),
    Operation("reduce_scatter", "one block of the sum for each rank; bytes are those of the input",
              lambda *case: _one_block(*case)[::-1], _scattered, alike=False),
    Operation("alltoall", "block k of each rank to rank k; bytes are those of input and result",
              lambda *case: (_one_block(*case)[1],) * 2, _exchanged, alike=False),
    Operation("barrier", "no data: nobody leaves before the last has come", lambda *_: (0, 0),
              _of_root, alike=True),
)  # fmt: skip

OPERATIONS = {operation.name: operation for operation in _ALL}
