"""Ragged: samples of different lengths as values and 64-bit offsets, like lists in Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.epoch_order import IntArray, concatenate_ranges

__all__ = [
    "Block",
    "Ragged",
    "elements",
    "join",
    "offsets_of",
    "part_of_block",
    "ragged_of",
    "take",
]


@dataclass(frozen=True)
class Ragged:
    """Samples of different lengths: sample i is self[i], or values[offsets[i] : offsets[i + 1]].

    For torch: torch.nested.nested_tensor_from_jagged(values, offsets).

    Attributes:
        values: (elements, ...), a NumPy array or tensor.
        offsets: int64, one more than samples; the first is 0.
    """

    values: Any
    offsets: Any

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sample: int) -> Any:
        """Return one sample, a view."""
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        first = sample % len(self)
        return self.values[int(self.offsets[first]) : int(self.offsets[first + 1])]

    def __iter__(self) -> Iterator[Any]:
        return (self[sample] for sample in range(len(self)))

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    @property
    def lengths(self) -> IntArray:
        """Elements of each sample; waits for offsets on a device."""
        offsets = self.offsets.cpu() if hasattr(self.offsets, "cpu") else self.offsets
        return np.diff(np.asarray(offsets))

    def take(self, samples: IntArray) -> Ragged:
        """Return these samples in this order; a copy, for NumPy arrays only."""
        lengths = self.lengths[samples]
        return Ragged(
            self.values[concatenate_ranges(self.offsets[:-1][samples], lengths)],
            offsets_of(lengths),
        )

    def part(self, start: int, stop: int) -> Ragged:
        """Return samples [start, stop); the values are a view."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def copy(self) -> Ragged:
        return Ragged(self.values.copy(), self.offsets.copy())


Block = NDArray[Any] | Ragged  # rows of a field


def elements(block: Block) -> NDArray[Any]:
    """Return a block's contiguous values: rows, or the elements of ragged rows."""
    return np.ascontiguousarray(block.values if isinstance(block, Ragged) else block)


def take(block: Block, rows: IntArray) -> Block:
    """Return these rows in this order; a copy."""
    return block.take(rows) if isinstance(block, Ragged) else block[rows]


def part_of_block(block: Block, start: int, stop: int) -> Block:
    """Return rows [start, stop); a view."""
    return block.part(start, stop) if isinstance(block, Ragged) else block[start:stop]


def offsets_of(lengths: IntArray) -> IntArray:
    """Return where each sample begins, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_of(rows: Sequence[NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Ragged:
    """Join arrays of shape (any length, *shape) into one Ragged."""
    lengths = np.array([len(row) for row in rows], np.int64)
    values = np.concatenate([np.empty((0, *shape), dtype), *rows]).astype(dtype, copy=False)
    return Ragged(values, offsets_of(lengths))


def join(parts: Sequence[Block]) -> Block:
    """Join the rows of all parts: at least one part, all of one kind."""
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if not ragged:
        return np.concatenate([elements(part) for part in parts])
    lengths = np.concatenate([part.lengths for part in ragged])
    return Ragged(np.concatenate([part.values for part in ragged]), offsets_of(lengths))
