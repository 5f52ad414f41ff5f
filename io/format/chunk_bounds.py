"""Checks for HDF5 chunks that would take far more memory than their dataset has bytes.

HDF5 allocates whole chunks, however few rows are wanted, and undoes filters until their data ends,
however long it is. So both are checked before HDF5 reads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hsgd.errors import DataError

from .chunks import grid_of, number_of
from .filters import filters_of
from .slab_folder import import_h5py

if TYPE_CHECKING:
    import h5py

__all__ = ["check_chunk_shape", "check_stored_chunks"]

_SMALL_BYTES = 64 << 20  # a chunk up to this size may be larger than all rows
_MOST_DATASETS = 4  # largest ratio of a larger chunk to all rows
_FRAME_BYTES = 4096  # this and an eighth of a chunk is what filters may add to incompressible data


def check_chunk_shape(dataset: h5py.Dataset) -> None:
    """Raise DataError if one chunk is far larger than all rows, or a filter is applied twice."""
    if not dataset.chunks:
        return
    nbytes, total = _chunk_bytes(dataset), math.prod(dataset.shape) * _item_bytes(dataset)
    where = f"{dataset.file.filename}: {dataset.name}"
    if nbytes > max(_SMALL_BYTES, _MOST_DATASETS * total):
        raise DataError(
            f"{where} has chunks of {dataset.chunks}, {nbytes} bytes, and the shape "
            f"{dataset.shape}, {total} bytes; rewrite it with h5repack and smaller chunks"
        )
    filters = [each.number for each in filters_of(dataset.id.get_create_plist())]
    if len(set(filters)) < len(filters):
        raise DataError(
            f"{where} applies a filter twice, {tuple(filters)}, which may hold any amount of data; "
            "rewrite it with h5repack"
        )


def check_stored_chunks(dataset: h5py.Dataset) -> None:
    """Raise DataError if a stored chunk is larger than its filters can make it, or lies nowhere.

    A chunk without filters must be whole: HDF5 gives the memory behind it for what is missing.
    """
    if not dataset.chunks or not hasattr(import_h5py().h5d.DatasetID, "chunk_iter"):
        return
    nbytes = _chunk_bytes(dataset)
    most = nbytes + nbytes // 8 + _FRAME_BYTES
    every = (1 << dataset.id.get_create_plist().get_nfilters()) - 1
    seen = _Seen(dataset)

    def is_wrong(info: Any) -> Any:
        plain = info.filter_mask & every == every
        if info.size > most or (plain and info.size < nbytes) or seen.lies_nowhere(info):
            return info
        return info if seen.again(info) else None

    found = dataset.id.chunk_iter(is_wrong)
    if found is None:
        return
    where = f"{dataset.file.filename}: {dataset.name}"
    place = tuple(found.chunk_offset)
    if seen.lies_nowhere(found):
        raise DataError(
            f"{where}: a chunk is stored at {place}, in byte {found.byte_offset}, and the shape is "
            f"{dataset.shape} with chunks of {dataset.chunks}; restore this file"
        )
    if seen.twice:
        raise DataError(f"{where}: two chunks are stored at {place}; restore this file")
    raise DataError(
        f"{where}: {found.size} bytes are stored for the chunk at {place}, which has {nbytes}; "
        "restore this file"
    )


class _Seen:
    """The chunks that were listed, if as many are stored as a dataset needs.

    With two at one place another is missing, for which HDF5 gives fill values.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._steps, self.twice = dataset.chunks, False
        self._grid = grid_of(dataset.shape, dataset.chunks)
        total = math.prod(self._grid)
        self._seen = bytearray(total) if dataset.id.get_num_chunks() == total else None

    def lies_nowhere(self, info: Any) -> bool:
        """Return whether a chunk lies outside of the dataset, or where the file itself begins."""
        return not info.byte_offset or number_of(info.chunk_offset, self._steps, self._grid) < 0

    def again(self, info: Any) -> bool:
        """Add a chunk inside of the dataset; return whether there was one at its place."""
        if self._seen is None:
            return False
        number = number_of(info.chunk_offset, self._steps, self._grid)
        self.twice, self._seen[number] = bool(self._seen[number]), 1
        return self.twice


def _item_bytes(dataset: h5py.Dataset) -> int:
    return int(dataset.id.get_type().get_size())


def _chunk_bytes(dataset: h5py.Dataset) -> int:
    items: int = math.prod(dataset.chunks)
    return items * _item_bytes(dataset)
