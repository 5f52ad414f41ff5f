"""Columns of tables: the members of a compound type, each a field named DATASET/MEMBER."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .slab_folder import import_h5py
from .supported_dtype import NUMBERS, supported_dtype

if TYPE_CHECKING:
    from pathlib import Path

    import h5py

__all__ = ["as_column", "columns_of", "find_field", "form_of"]


def columns_of(dataset: h5py.Dataset) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the shape of each column of numbers, and the other columns; nothing if no table."""
    dtype = _compound(dataset)
    found: dict[str, tuple[int, ...]] = {}
    if dtype is not None:
        for name in dtype.names or ():
            if dtype[name].base.kind in NUMBERS and name and "/" not in name:
                found[name] = (*dataset.shape, *dtype[name].shape)
    others = [] if dtype is None else [name for name in dtype.names or () if name not in found]
    return found, others


def find_field(file: h5py.File, stored: str) -> tuple[Any, str]:
    """Return the dataset, or group of a ragged field, and the column, "" if it is no column.

    Raises KeyError if there is none.
    """
    try:
        return file[stored], ""
    except KeyError:
        home, _, column = stored.rpartition("/")
        table = file.get(home) if home else None
        if not isinstance(table, import_h5py().Dataset):
            raise
        return table, column


def form_of(
    dataset: h5py.Dataset, column: str, path: Path | str, name: str
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape, samples first, and the stored dtype of a dataset, or of its column.

    Raises DataError if it cannot become a tensor.
    """
    dtype = _compound(dataset) if column else None
    if dtype is None:
        return dataset.shape, supported_dtype(dataset, path, name)
    return (*dataset.shape, *dtype[column].shape), np.dtype(dtype[column].base.str)


def as_column(rows: NDArray[Any], dataset: h5py.Dataset, column: str) -> NDArray[Any]:
    """Return a view of C-contiguous rows of a column as rows of a table of this column alone."""
    item = dataset.shape[1:]
    member = np.dtype([(column, rows.dtype, rows.shape[1 + len(item) :])])
    return rows.reshape(-1).view(member).reshape(len(rows), *item)


def _compound(dataset: h5py.Dataset) -> np.dtype[Any] | None:
    """Return the dtype of a table; None for other datasets, and for types that NumPy lacks."""
    h5py = import_h5py()

    if dataset.id.get_type().get_class() != h5py.h5t.COMPOUND:
        return None
    try:
        dtype: np.dtype[Any] = dataset.dtype
    except (TypeError, ValueError):
        return None
    return dtype if dtype.names else None
