"""dense: rows of a sparse matrix as dense rows, for `decode=` of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsgd.errors import DataError

from ..format.data_map import DataMap
from ..format.slab_folder import FieldSpec
from ..format.sparse_kind import PARTS
from ..order.epoch_order import IntArray
from ..reading.claimed_memory import claimed_memory

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
        # Columns, ascending; where each comes in a row; how many the matrix has, 0 if unknown.
        self._columns: dict[str, tuple[IntArray, IntArray, int]] = {}
        self._specs: dict[str, FieldSpec] = {}
        for name, decoder in decoders.items():
            indices, values = (specs.get(f"{name}/{part}") for part in PARTS)
            if indices is None or values is None or not (indices.ragged and values.ragged):
                what = "windows, which pack= makes, are" if data.windows else f"{name!r} is"
                raise ValueError(
                    f"decode: {what} no sparse matrix whose indices and data are read; there are: "
                    f"{', '.join(specs)}"
                )
            width = max((each.columns for each in data.offsets(indices)), default=0)
            chosen = decoder.columns
            if chosen is None and not width:
                raise ValueError(f"decode: the columns of {name!r} are not known; name them")
            with claimed_memory(data.path, f"a row of {name!r}", 8 * width):
                columns = np.arange(width) if chosen is None else np.array(chosen, np.int64)
            least, most = columns.min(initial=0), columns.max(initial=-1)
            twice = len(np.unique(columns)) < len(columns)
            if not len(columns) or least < 0 or twice or (width and most >= width):
                last = width - 1 if width else "any"
                raise ValueError(f"decode: columns of {name!r} are 0 to {last}, each once")
            order = np.argsort(columns)
            self._columns[name] = columns[order], order, width
            self._specs[name] = FieldSpec(name, (len(columns),), values.dtype)

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
        (known, order, width), count = self._columns[name], self._specs[name].shape[0]
        is_array = isinstance(values.values, np.ndarray)
        columns, numbers = (
            each.values if is_array else each.values.numpy() for each in (indices, values)
        )
        if width and len(columns) and not 0 <= columns.min() <= columns.max() < width:
            raise DataError(
                f"{self._path}: {name}/{PARTS[0]} has columns {columns.min()} to {columns.max()}, "
                f"and the matrix {width}; restore this file"
            )
        with claimed_memory(
            self._path, f"a batch of {name!r}", len(values) * count * numbers.itemsize
        ):
            found = np.zeros((len(values), count), numbers.dtype)
        at = np.searchsorted(known, columns).clip(max=count - 1)
        kept = known[at] == columns
        rows = np.repeat(np.arange(len(values)) * count, values.lengths)
        np.add.at(found.reshape(-1), (rows + order[at])[kept], numbers[kept])
        if is_array:
            return found
        import torch

        return torch.from_numpy(found)
