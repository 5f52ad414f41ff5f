"""The numbers that benchmarks send, and the check of what came back.

The values are multiples of 2^-16 below 1, so sums of up to 256 ranks are exact in float32 in any
order: every difference is an error, whatever tree a candidate sums in. native/worker.c has the same
formula.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_RANKS", "Floats", "Pattern", "aligned", "difference", "digest"]

MAX_RANKS = 256
_RANK_STEP, _BUFFER_STEP = 7919, 104729  # primes: no chunk or slice of one input equals another's
_ALIGNMENT = 64

Floats: TypeAlias = NDArray[np.float32]


class Pattern:
    """Inputs and expected sums for `ranks` ranks; local."""

    def __init__(self, ranks: int) -> None:
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"{ranks} ranks: sums are exact for 1 to {MAX_RANKS}")
        self.ranks = ranks
        self._values = np.empty(0, np.float32)

    def given(self, rank: int, buffer: int, count: int) -> Floats:
        """What `rank` sends from its buffer number `buffer`: `count` float32, read-only."""
        start = _RANK_STEP * rank + _BUFFER_STEP * buffer
        if start + count > self._values.size:
            self._values = _values(_RANK_STEP * self.ranks + _BUFFER_STEP * (buffer + 1) + count)
            self._values.flags.writeable = False
        return self._values[start : start + count]

    def expected(self, buffer: int, count: int) -> Floats:
        """The sum over all ranks."""
        total: Floats = self.given(0, buffer, count).copy()
        for rank in range(1, self.ranks):
            total += self.given(rank, buffer, count)
        return total


def _values(count: int) -> Floats:
    mixed = np.arange(count, dtype=np.uint32)
    mixed *= np.uint32(2654435761)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(2246822519)
    mixed >>= np.uint32(16)
    values: Floats = mixed.astype(np.float32)
    values *= np.float32(2.0**-16)
    return values


def aligned(count: int) -> Floats:
    """`count` float32, not set, at a multiple of 64 bytes, like a torch tensor."""
    raw = np.empty(count * 4 + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count * 4].view(np.float32)


def difference(result: Floats, expected: Floats, tolerance: float = 0.0) -> str | None:
    """Where `result` is not `expected`, bit for bit, in words; None where it is.

    tolerance: the relative error that is allowed instead, of numbers from 0 on.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype}{result.shape} came back, expected {expected.dtype}{expected.shape}"
    if tolerance:
        wrong = np.flatnonzero(~(np.abs(result - expected) <= tolerance * expected))
    else:
        wrong = np.flatnonzero(result.view(np.uint32) != expected.view(np.uint32))
    if wrong.size == 0:
        return None
    first = int(wrong[0])
    values = f"{result[first]:.9g}, expected {expected[first]:.9g}"
    return f"{wrong.size} of {result.size} elements differ, the first is {first}: {values}"


def digest(result: Floats) -> int:
    """The sum of the words: equal on all ranks when the results are."""
    return int(result.view(np.uint32).sum(dtype=np.uint64))
