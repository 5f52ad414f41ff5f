"""Sources in memory: the arrays of a program, and scikit-learn's digits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..format.ragged import Block, Ragged, elements, part_of_block, ragged_of
from ..format.slab_folder import FieldSpec
from ..format.supported_dtype import NUMBERS
from ..needed_for import needed_for
from ..order.epoch_order import permutation
from .source import Source, chosen

__all__ = ["ArraySource", "digits_splits"]


class ArraySource(Source):
    """Arrays in memory, also Ragged ones; raises ValueError or TypeError for others."""

    def __init__(self, arrays: Mapping[str, Any], fields: Sequence[str] | None = None) -> None:
        wanted = chosen(arrays, fields)
        if not wanted:
            raise ValueError("no arrays to convert")
        self._arrays = {name: _in_memory(name, values) for name, values in wanted.items()}
        counts = {name: len(block) for name, block in self._arrays.items()}
        if len(set(counts.values())) != 1:
            text = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ValueError(f"first dimensions differ: {text}; give each sample all fields")
        self.specs = tuple(
            FieldSpec(name, elements(b).shape[1:], elements(b).dtype, isinstance(b, Ragged))
            for name, b in self._arrays.items()
        )
        self.num_samples = next(iter(counts.values()))

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        array = self._arrays[spec.name]
        for row in range(start, len(array), rows):
            yield part_of_block(array, row, min(row + rows, len(array)))

    def identity(self) -> str:
        digest = hashlib.sha256()
        for block in self._arrays.values():
            digest.update(elements(block).reshape(-1).view(np.uint8).data)
            if isinstance(block, Ragged):
                digest.update(np.ascontiguousarray(block.offsets).data)
        return digest.hexdigest()


def _in_memory(name: str, values: Any) -> Block:
    """Return an array, or a list of arrays of different lengths, in native byte order."""
    if isinstance(values, Ragged):
        return Ragged(_in_memory(name, values.values), np.asarray(values.offsets, np.int64))
    if isinstance(values, list) and values and all(isinstance(v, np.ndarray) for v in values):
        first = values[0]
        if any(v.ndim != first.ndim or v.shape[1:] != first.shape[1:] for v in values):
            raise ValueError(f"field {name!r}: only the first axis of its arrays may differ")
        dtype = np.result_type(*{v.dtype for v in values})
        return _in_memory(name, ragged_of(values, first.shape[1:], dtype))
    array = np.asarray(values)
    if array.dtype.kind not in NUMBERS or not array.ndim:
        raise TypeError(
            f"field {name!r} is {array.dtype} of shape {array.shape}; only arrays of numbers and "
            "bool can be converted"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def digits_splits(test_fraction: float, seed: int) -> dict[str, ArraySource]:
    """Return scikit-learn's handwritten digits as {"train": ..., "test": ...}, stratified by label.

    Fields: image float32 (64,) in 0..1, label int64. The split depends on the seed only.
    """
    with needed_for("the set of digits", "scikit-learn"):
        from sklearn.datasets import load_digits
    if not 0 < test_fraction < 1:
        raise ValueError(f"test fraction {test_fraction}; use a number between 0 and 1")
    digits = load_digits()
    image = np.asarray(digits.data / 16.0, np.float32)
    label = np.asarray(digits.target, np.int64)
    test = np.zeros(len(label), bool)
    for digit in np.unique(label):
        rows = np.flatnonzero(label == digit)
        shuffled = rows[permutation(len(rows), seed, int(digit))]
        test[shuffled[: round(test_fraction * len(rows))]] = True
    return {
        name: ArraySource({"image": image[part], "label": label[part]})
        for name, part in (("train", ~test), ("test", test))
    }
