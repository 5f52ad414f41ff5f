"""dense: rows of a sparse matrix as dense rows, for `decode=` of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.data_map import DataMap
from ..format.slab_folder import FieldSpec
from ..format.sparse_kind import PARTS

__all__ = ["DenseDecode", "DenseRows", "dense"]


@dataclass(frozen=True)
class DenseRows:
    """Decoder with the argument of dense()."""

    columns: tuple[int, ...] | None


def dense(columns: Iterable[int] | None = None) -> DenseRows:
    """Make a decoder of a sparse matrix; with decode={"X": ...} a batch has dense rows "X".

    They take the place of the fields X/indices and X/data. Values of one row and column are added.

    Args:
        columns: those to deliver, in this order; None for all.
    """
    return DenseRows(None if columns is None else tuple(int(column) for column in columns))


class DenseDecode:
    """The transform of a loader with dense() in decode=; `transform` comes after it.

    Raises ValueError for a name that is no sparse matrix, or columns that it does not have.
    """

    def __init__(
        self,
        data: DataMap,
        decoders: Mapping[str, DenseRows],
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._transform, self._path = transform, data.path
        specs = {spec.name: spec for spec in data.fields}
        self._places: dict[str, NDArray[np.intp]] = {}  # by column: its place in a row, or -1
        self._specs: dict[str, FieldSpec] = {}
        for name, decoder in decoders.items():
            parts = [specs.get(f"{name}/{part}") for part in PARTS]
            found = {
                0 if offsets is None else offsets.columns
                for slab in data.slabs
                if None not in parts
                for offsets in [slab.extents[f"{name}/{PARTS[0]}"].offsets]
            }
            if len(found) != 1 or not (width := found.pop()):
                raise ValueError(
                    f"decode: {name!r} of {data.path} is no sparse matrix of one number of columns "
                    f"whose fields are read; there are: {', '.join(specs)}"
                )
            chosen = range(width) if decoder.columns is None else decoder.columns
            if (
                not chosen
                or min(chosen) < 0
                or max(chosen) >= width
                or len({*chosen}) < len(chosen)
            ):
                raise ValueError(f"decode: columns of {name!r} are 0 to {width - 1}, each once")
            self._places[name] = np.full(width, -1, np.intp)
            self._places[name][list(chosen)] = np.arange(len(chosen))
            values = specs[f"{name}/{PARTS[1]}"]
            self._specs[name] = FieldSpec(name, (len(chosen),), values.dtype)

    def fields(self, specs: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
        """Return fields as they are delivered."""
        parts = {f"{name}/{part}" for name in self._specs for part in PARTS}
        return (*(spec for spec in specs if spec.name not in parts), *self._specs.values())

    def __call__(self, batch: dict[str, Any]) -> Any:
        for name in self._specs:
            indices, values = (batch.pop(f"{name}/{part}") for part in PARTS)
            batch[name] = self._dense(name, indices, values)
        return batch if self._transform is None else self._transform(batch)

    def _dense(self, name: str, indices: Any, values: Any) -> Any:
        places, width = self._places[name], self._specs[name].shape[0]
        is_array = isinstance(values.values, np.ndarray)
        columns, numbers = (
            each.values if is_array else each.values.numpy() for each in (indices, values)
        )
        if len(columns) and not 0 <= columns.min() <= columns.max() < len(places):
            raise DataError(
                f"{self._path}: {name}/{PARTS[0]} has columns {columns.min()} to {columns.max()}, "
                f"and the matrix {len(places)}; restore this file"
            )
        found = np.zeros((len(values), width), numbers.dtype)
        at = places[columns]
        kept = slice(None) if width == len(places) else at >= 0
        rows = np.repeat(np.arange(len(values)) * width, values.lengths)
        np.add.at(found.reshape(-1), (rows + at)[kept], numbers[kept])
        if is_array:
            return found
        import torch

        return torch.from_numpy(found)
