"""Chunks of HDF5 datasets without HDF5: their places.

The chunks that hold the same rows are a block. A chunk may hold whole rows or a part of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from .filters import Filter, filters_of, undo_filters, unknown_filters
from .slab_folder import import_h5py

if TYPE_CHECKING:
    import h5py

__all__ = ["RUN_BYTES", "Chunks", "chunks_of", "decode", "grid_of", "number_of"]

_MOST_BYTES = 4 << 30  # of one chunk; HDF5 1.x makes no larger ones
RUN_BYTES = 1 << 20  # of chunks that are read together
_MOST_BLOCK_BYTES = 1 << 30  # of a block that is put together from several chunks


@dataclass(frozen=True)
class Chunks:
    """Places of the chunks of a dataset, block after block."""

    shape: tuple[int, ...]  # of a chunk: rows, or elements of a ragged field, and its part of them
    row_shape: tuple[int, ...]
    offsets: bytes  # int64, byte position of each stored chunk
    sizes: bytes  # int64, bytes of each stored chunk
    masks: bytes  # uint32; bit n is set if the n-th filter was not applied to the chunk
    filters: tuple[Filter, ...]  # in the order in which they were applied
    item_bytes: int

    @property
    def rows(self) -> int:
        """Rows of a block; the last one may have fewer."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk without filters."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks of a block along each axis of a row."""
        return grid_of(self.row_shape, self.shape[1:])

    @property
    def is_split(self) -> bool:
        """True if chunks are not whole rows."""
        return self.shape[1:] != self.row_shape

    @property
    def block_bytes(self) -> int:
        return self.rows * math.prod(self.row_shape) * self.item_bytes

    @property
    def decoding_bytes(self) -> int:
        """The most memory that a chunk takes: as stored, and before and after a filter."""
        return 3 * self.nbytes

    @property
    def joined_bytes(self) -> int:
        """The memory that putting chunks together takes besides."""
        return self.block_bytes + RUN_BYTES if self.is_split else 0

    @property
    def names(self) -> str:
        return " + ".join(each.name for each in self.filters) or "no filter"

    def applied(self, chunk: int) -> list[Filter]:
        """Return the filters of one chunk."""
        mask = int(np.frombuffer(self.masks, np.uint32)[chunk])
        return [each for bit, each in enumerate(self.filters) if not mask >> bit & 1]

    def place(self, chunk: int) -> tuple[int, int]:
        """Return byte position and length of a chunk in the file."""
        (start,), (size,) = self.places(range(chunk, chunk + 1))
        return start, size

    def places(self, numbers: range) -> tuple[list[int], list[int]]:
        """Return byte positions and lengths of several chunks."""
        part = slice(numbers.start, numbers.stop)
        return (
            np.frombuffer(self.offsets, np.int64)[part].tolist(),
            np.frombuffer(self.sizes, np.int64)[part].tolist(),
        )

    def of_blocks(self, first: int, stop: int) -> range:
        """Return the chunks of blocks [first, stop)."""
        each = math.prod(self.grid)
        return range(first * each, stop * each)


def chunks_of(dataset: h5py.Dataset, file_bytes: int) -> Chunks | str:
    """Return the places of an open dataset's chunks, or why they cannot be read without HDF5.

    Raises DataError for a chunk that ends after the file's `file_bytes`.
    """
    h5py = import_h5py()

    filters = filters_of(dataset.id.get_create_plist())
    refusal = unknown_filters(filters)
    if refusal:
        return refusal
    if not hasattr(h5py.h5d.DatasetID, "chunk_iter"):
        return "this h5py cannot list chunks"
    shape = dataset.chunks
    empty = Chunks(shape, dataset.shape[1:], b"", b"", b"", filters, dataset.dtype.itemsize)
    if empty.nbytes > _MOST_BYTES:
        return f"chunks of {empty.nbytes} bytes"
    if empty.is_split and empty.block_bytes > _MOST_BLOCK_BYTES:
        return (
            f"chunks of {shape} hold parts of rows, and whole ones take {empty.block_bytes} bytes"
        )
    grid = grid_of(dataset.shape, shape)
    if dataset.id.get_num_chunks() != math.prod(grid):  # before memory is allocated for so many
        return "chunks are missing"
    places = _list_chunks(dataset, grid, file_bytes)
    if isinstance(places, str):
        return places
    offsets, sizes, masks = places
    # With H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS, which h5py cannot query, HDF5 does not filter the
    # chunks that end after the dataset, and their masks do not show it.
    edge = np.zeros(grid, bool)
    for axis, (length, step) in enumerate(zip(dataset.shape, shape, strict=True)):
        if length % step:
            np.moveaxis(edge, axis, 0)[-1] = True
    filtered = ~masks & (1 << len(filters)) - 1 > 0
    if (edge.reshape(-1) & filtered & (sizes == empty.nbytes)).any():
        return "chunks at the edge may lie there without their filters"
    return replace(empty, offsets=offsets.tobytes(), sizes=sizes.tobytes(), masks=masks.tobytes())


def _list_chunks(
    dataset: h5py.Dataset, grid: tuple[int, ...], file_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]] | str:
    """Return offsets, sizes and masks of all chunks, or why they are not one for each place."""
    found: list[Any] = []
    dataset.id.chunk_iter(found.append)
    count, steps = math.prod(grid), dataset.chunks
    offsets, sizes = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    masks = np.zeros(count, np.uint32)
    for info in found:
        chunk = number_of(info.chunk_offset, steps, grid)
        if chunk < 0 or offsets[chunk] >= 0:
            return f"a chunk at {tuple(info.chunk_offset)}, or two of them"
        start, size = info.byte_offset, info.size
        if not start or start + size > file_bytes:
            what = "damaged" if start == 0 else "truncated"
            raise DataError(
                f"{dataset.file.filename}: {what}, a chunk of {dataset.name} needs {size} bytes "
                f"from byte {start} on and the file ends at {file_bytes}; copy or convert it again"
            )
        offsets[chunk], sizes[chunk], masks[chunk] = start, size, info.filter_mask
    if offsets.min(initial=0) < 0:
        return "chunks are missing"
    return offsets, sizes, masks


def decode(chunks: Chunks, chunk: int, stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes of a chunk before its filters. Raises Undecodable."""
    return undo_filters(chunks.applied(chunk), stored, chunks.nbytes)


def grid_of(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Return how many chunks of a size there are along each axis."""
    return tuple(-(-length // step) for length, step in zip(shape, chunks, strict=True))


def number_of(at: Sequence[int], steps: Sequence[int], grid: Sequence[int]) -> int:
    """Return the number of the chunk that begins at `at`; -1 if none can."""
    number = 0
    for start, step, count in zip(at, steps, grid, strict=True):
        place, inside = divmod(start, step)
        if inside or place >= count:
            return -1
        number = number * count + place
    return number
