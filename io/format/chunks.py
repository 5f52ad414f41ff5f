"""Chunks of HDF5 datasets without HDF5: their places, and how to apply and undo their filters.

The chunks that hold the same rows are a block. A chunk may hold whole rows or a part of them.

gzip is Python's own; Blosc and Zstandard are those of numcodecs. All release the GIL, while HDF5
decompresses under one lock.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError, MissingExtra

from ..needed_for import needed_for
from .slab_folder import import_h5py

if TYPE_CHECKING:
    import h5py

__all__ = [
    "COMPRESSIONS",
    "Chunks",
    "Compression",
    "Undecodable",
    "check_compression",
    "chunks_of",
    "decode",
    "load_filters",
]

COMPRESSIONS = ("gzip", "lz4", "zstd")  # what a conversion can write
_DEFLATE, _SHUFFLE, _BLOSC, _ZSTD = 1, 2, 32001, 32015  # as registered with the HDF Group
_NAMES = {_DEFLATE: "gzip", _SHUFFLE: "shuffle", _BLOSC: "blosc", _ZSTD: "zstd"}
_MOST_BYTES = 4 << 30  # of one chunk; HDF5 1.x makes no larger ones
_MOST_BLOCK_BYTES = 1 << 30  # of a block that is put together from several chunks
_ZSTD_MAGIC = bytes.fromhex("28b52ffd")

_GZIP_LEVEL = 4
_BLOSC_LEVEL = 5


class Undecodable(ValueError):
    """A chunk cannot be decoded by its filters."""


@dataclass(frozen=True)
class Chunks:
    """Places of the chunks of a dataset, block after block."""

    shape: tuple[int, ...]  # of a chunk: rows, or elements of a ragged field, and its part of them
    row_shape: tuple[int, ...]
    offsets: bytes  # int64, byte position of each stored chunk
    sizes: bytes  # int64, bytes of each stored chunk
    masks: bytes  # uint32; bit n is set if the n-th filter was not applied to the chunk
    filters: tuple[int, ...]  # their numbers, in the order in which they were applied
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
        pairs = zip(self.row_shape, self.shape[1:], strict=True)
        return tuple(-(-length // step) for length, step in pairs)

    @property
    def block_bytes(self) -> int:
        return self.rows * math.prod(self.row_shape) * self.item_bytes

    @property
    def working_bytes(self) -> int:
        """The most memory that reading a block takes, with what is kept of it."""
        joined = 0 if self.shape[1:] == self.row_shape else self.block_bytes
        return 3 * self.nbytes + joined

    @property
    def names(self) -> str:
        return " + ".join(_NAMES[number] for number in self.filters) or "no filter"

    def applied(self, chunk: int) -> list[int]:
        """Return the filters of one chunk."""
        mask = int(np.frombuffer(self.masks, np.uint32)[chunk])
        return [number for bit, number in enumerate(self.filters) if not mask >> bit & 1]

    def place(self, chunk: int) -> tuple[int, int]:
        """Return byte position and length of a chunk in the file."""
        return (
            int(np.frombuffer(self.offsets, np.int64)[chunk]),
            int(np.frombuffer(self.sizes, np.int64)[chunk]),
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

    refusal = _unknown_filters(dataset)
    if refusal:
        return refusal
    if not hasattr(h5py.h5d.DatasetID, "chunk_iter"):
        return "this h5py cannot list chunks"
    create = dataset.id.get_create_plist()
    filters = tuple(create.get_filter(n)[0] for n in range(create.get_nfilters()))
    shape = dataset.chunks
    empty = Chunks(shape, dataset.shape[1:], b"", b"", b"", filters, dataset.dtype.itemsize)
    if empty.nbytes > _MOST_BYTES:
        return f"chunks of {empty.nbytes} bytes"
    if shape[1:] != empty.row_shape and empty.block_bytes > _MOST_BLOCK_BYTES:
        return (
            f"chunks of {shape} hold parts of rows, and whole ones take {empty.block_bytes} bytes"
        )
    grid = tuple(-(-n // step) for n, step in zip(dataset.shape, shape, strict=True))
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


def _unknown_filters(dataset: h5py.Dataset) -> str:
    """Return why the filters of a dataset cannot be undone here; "" if they can."""
    create = dataset.id.get_create_plist()
    found = [create.get_filter(n) for n in range(create.get_nfilters())]
    filters = tuple(number for number, *_ in found)
    if not set(filters) <= _NAMES.keys() or filters.count(_SHUFFLE) > 1:
        known = ", ".join(_NAMES.values())
        return f"filters {filters}, only these are known: {known}"
    if len(set(filters) - {_SHUFFLE}) > 1:
        return f"filters {filters}, and only one may compress"  # decode() knows one size
    for number, _, values, _ in found:
        if number == _SHUFFLE and tuple(values) != (dataset.dtype.itemsize,):
            return f"items of {dataset.dtype.itemsize} bytes shuffled as {tuple(values)}"
    if set(filters) & {_BLOSC, _ZSTD}:
        try:
            _numcodecs()
        except MissingExtra as error:
            return str(error)
    return ""


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
        chunk = _number_of(info.chunk_offset, steps, grid)
        if chunk < 0 or offsets[chunk] >= 0:
            return f"a chunk at {tuple(info.chunk_offset)}, or two of them"
        start, size = info.byte_offset, info.size
        if start is None or start + size > file_bytes:
            raise DataError(
                f"{dataset.file.filename}: truncated, a chunk of {dataset.name} needs {size} bytes "
                f"from byte {start} on and the file ends at {file_bytes}; copy or convert it again"
            )
        offsets[chunk], sizes[chunk], masks[chunk] = start, size, info.filter_mask
    if offsets.min(initial=0) < 0:
        return "chunks are missing"
    return offsets, sizes, masks


def _number_of(at: Sequence[int], steps: Sequence[int], grid: Sequence[int]) -> int:
    """Return the number of the chunk that begins at `at`; -1 if none can."""
    number = 0
    for start, step, count in zip(at, steps, grid, strict=True):
        place, inside = divmod(start, step)
        if inside or place >= count:
            return -1
        number = number * count + place
    return number


def load_filters(dataset: h5py.Dataset) -> str:
    """Load a dataset's filters from hdf5plugin, if needed; return which are missing, or ""."""
    h5py = import_h5py()

    create = dataset.id.get_create_plist()
    numbers = [create.get_filter(n)[0] for n in range(create.get_nfilters())]
    unknown = [number for number in numbers if not h5py.h5z.filter_avail(number)]
    remedy = "rewrite the file with h5repack where HDF5 has it"
    if unknown:
        try:
            _hdf5plugin()
        except MissingExtra:
            remedy = f"pip install hdf5plugin, which has many, or {remedy}"
        unknown = [number for number in unknown if not h5py.h5z.filter_avail(number)]
    if not unknown:
        return ""
    return f"HDF5 has no filter {', '.join(map(str, unknown))} here; {remedy}"


def decode(chunks: Chunks, chunk: int, stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes of a chunk before its filters. Raises Undecodable."""
    data = stored
    for number in reversed(chunks.applied(chunk)):
        try:
            data = _UNDO[number](data, chunks)
        except (RuntimeError, ValueError, zlib.error) as error:
            raise Undecodable(str(error)) from None
    if data.nbytes != chunks.nbytes:
        raise Undecodable(f"{data.nbytes} bytes, {chunks.nbytes} are needed")
    return data


def _inflate(data: NDArray[np.uint8], chunks: Chunks) -> NDArray[np.uint8]:
    # A damaged chunk must not fill the memory.
    inflater = zlib.decompressobj()
    found = np.frombuffer(inflater.decompress(data.data, chunks.nbytes + 1), np.uint8)
    if not inflater.eof:
        raise Undecodable(f"it does not end after {chunks.nbytes} bytes")
    return found


def _unshuffle(data: NDArray[np.uint8], chunks: Chunks) -> NDArray[np.uint8]:
    items = len(data) // chunks.item_bytes
    whole = items * chunks.item_bytes
    planes = data[:whole].reshape(chunks.item_bytes, items)
    return np.concatenate([planes.T.reshape(-1), data[whole:]])


def _unblosc(data: NDArray[np.uint8], chunks: Chunks) -> NDArray[np.uint8]:
    # Blosc's header of 16 bytes has the length of the data, and that of the whole buffer.
    sizes = data[:16].copy().view("<u4")
    if len(sizes) < 4 or (sizes[1], sizes[3]) != (chunks.nbytes, len(data)):
        raise Undecodable("its header is damaged")
    out = np.empty(chunks.nbytes, np.uint8)
    _numcodecs().blosc.decompress(data, out)
    return out


def _unzstd(data: NDArray[np.uint8], chunks: Chunks) -> NDArray[np.uint8]:
    # numcodecs writes the announced bytes only, and leaves the rest of `out` as it was.
    announced = _zstd_announced(data)
    if announced not in (None, chunks.nbytes):
        raise Undecodable(f"{announced} bytes, {chunks.nbytes} are needed")
    out = np.empty(chunks.nbytes, np.uint8)
    _numcodecs().zstd.decompress(data, out)
    return out


def _zstd_announced(data: NDArray[np.uint8]) -> int | None:
    """Return the size of the content in the header of a Zstandard frame; None if it has none.

    Source: RFC 8878, 3.1.1.1. Without it numcodecs checks the size.
    """
    head = data[:18].tobytes()
    if head[:4] != _ZSTD_MAGIC or len(head) < 6:
        raise Undecodable("no Zstandard frame")
    single, flag = head[4] >> 5 & 1, head[4] >> 6
    length = (single, 2, 4, 8)[flag]
    if not length:
        return None
    start = 5 + (1 - single) + (0, 1, 2, 4)[head[4] & 3]
    announced = int.from_bytes(head[start : start + length], "little")
    return announced + 256 if length == 2 else announced


_UNDO: dict[int, Callable[[NDArray[np.uint8], Chunks], NDArray[np.uint8]]] = {
    _DEFLATE: _inflate,
    _SHUFFLE: _unshuffle,
    _BLOSC: _unblosc,
    _ZSTD: _unzstd,
}


def check_compression(name: str) -> None:
    """Raise ValueError for an unknown compression, MissingExtra for one that is not installed."""
    if name not in COMPRESSIONS:
        raise ValueError(f"compress={name!r}; use one of {', '.join(map(repr, COMPRESSIONS))}")
    if name != "gzip":
        _numcodecs()
        _hdf5plugin()


class Compression:
    """Compression of chunks with gzip, or with lz4 or zstd in Blosc with shuffled bytes."""

    def __init__(self, name: str, item_bytes: int) -> None:
        self._name, self._item_bytes = name, item_bytes

    def set_filters(self, create: h5py.h5p.PropDCID) -> None:
        """Add the filter to the creation properties of a dataset."""
        if self._name == "gzip":
            create.set_deflate(_GZIP_LEVEL)
            return
        hdf5plugin = _hdf5plugin()
        options = hdf5plugin.Blosc(self._name, _BLOSC_LEVEL, hdf5plugin.Blosc.SHUFFLE)
        create.set_filter(_BLOSC, 0, tuple(options.filter_options))

    def encode(self, rows: NDArray[Any]) -> tuple[bytes, int]:
        """Return the bytes of a chunk to store, and their mask.

        The mask is 0, or 1 if the filter was not applied because the chunk would not get smaller.
        """
        data = rows.reshape(-1).view(np.uint8)
        packed = self._packed(data)
        return (packed, 0) if len(packed) < len(data) else (data.tobytes(), 1)

    def _packed(self, data: NDArray[np.uint8]) -> bytes:
        if self._name == "gzip":
            return zlib.compress(data.data, _GZIP_LEVEL)
        blosc = _numcodecs().blosc
        whole = self._item_bytes in (1, 2, 4, 8)
        items = data.view(f"u{self._item_bytes}") if whole else data  # Blosc shuffles their bytes
        return bytes(blosc.compress(items, self._name.encode(), _BLOSC_LEVEL, blosc.SHUFFLE))


def _hdf5plugin() -> Any:
    with needed_for("Blosc in HDF5", "hdf5plugin"):
        import hdf5plugin
    return hdf5plugin


def _numcodecs() -> Any:
    with needed_for("Blosc or Zstandard", "numcodecs"):
        import numcodecs
        import numcodecs.blosc
        import numcodecs.zstd
    return numcodecs
