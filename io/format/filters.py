"""Filters of HDF5 chunks, undone without HDF5, in the threads that read.

gzip and bzip2 are Python's own; plugin_codecs.py has those of hdf5plugin, libhsgd_io the others.
All release the GIL, while HDF5 decompresses under one lock. No filter writes more than its place
among the filters allows, however its input is damaged.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hsgd.errors import MissingExtra

from ..native_library import native_library
from .plugin_codecs import (
    Bytes,
    Undecodable,
    decode_bitshuffle,
    decode_blosc,
    decode_lz4,
    decode_zstd,
    hdf5plugin,
    load_codecs,
)
from .slab_folder import import_h5py

if TYPE_CHECKING:
    import h5py

__all__ = ["Filter", "Undecodable", "filters_of", "load_filters", "undo_filters", "unknown_filters"]

_SHUFFLE, _FLETCHER32, _BITSHUFFLE = 2, 3, 32008  # as registered with the HDF Group
_CHECKSUM_BYTES = 4
_FRAME_BYTES = 4096  # this and an eighth is the most that a filter adds to incompressible data


class Filter(NamedTuple):
    """A filter of a dataset."""

    number: int
    values: tuple[int, ...]

    @property
    def name(self) -> str:
        return _KNOWN[self.number].name

    def most_bytes(self, nbytes: int) -> int:
        """Return the most bytes that this filter makes of `nbytes`."""
        if self.number == _SHUFFLE:
            return nbytes
        if self.number == _FLETCHER32:
            return nbytes + _CHECKSUM_BYTES
        return nbytes + nbytes // 8 + _FRAME_BYTES


class _Known(NamedTuple):
    name: str
    undo: Callable[[Bytes, int, tuple[int, ...]], Bytes]  # data, most bytes of the result, values
    library: str = ""  # of hdf5plugin


def filters_of(create: Any) -> tuple[Filter, ...]:
    """Return the filters of a dataset's creation properties, in the order of application."""
    found = (create.get_filter(n) for n in range(create.get_nfilters()))
    return tuple(Filter(number, tuple(values)) for number, _, values, _ in found)


def unknown_filters(filters: Sequence[Filter]) -> str:
    """Return why filters cannot be undone here; "" if they can."""
    if not {each.number for each in filters} <= _KNOWN.keys():
        known = ", ".join(each.name for each in _KNOWN.values())
        return f"filters {tuple(each.number for each in filters)}, only these are known: {known}"
    for number, values in filters:
        items = values[2:3] if number == _BITSHUFFLE else values
        odd = number == _BITSHUFFLE and values[4:5] not in ((), (0,), (2,), (3,))
        if odd or (number in (_SHUFFLE, _BITSHUFFLE) and (len(items) != 1 or not items[0])):
            return f"filter {number} with the values {values}"
        try:
            if _KNOWN[number].library:
                load_codecs(_KNOWN[number].library)
        except MissingExtra as error:
            return str(error)
    return ""


def undo_filters(filters: Sequence[Filter], stored: Bytes, nbytes: int) -> Bytes:
    """Return the `nbytes` bytes to which `filters` were applied. Raises Undecodable."""
    steps = []
    most = nbytes
    for each in filters:
        steps.append((each, most))
        most = each.most_bytes(most)
    data = stored
    for (number, values), most in reversed(steps):
        data = _KNOWN[number].undo(data, most, values)
    if len(data) != nbytes:
        raise Undecodable(f"{len(data)} bytes, {nbytes} are needed")
    return data


def load_filters(dataset: h5py.Dataset) -> str:
    """Load a dataset's filters from hdf5plugin, if needed; return which are missing, or ""."""
    h5py = import_h5py()

    numbers = [each.number for each in filters_of(dataset.id.get_create_plist())]
    unknown = [number for number in numbers if not h5py.h5z.filter_avail(number)]
    remedy = "rewrite the file with h5repack where HDF5 has it"
    if unknown:
        try:
            hdf5plugin()
        except MissingExtra:
            remedy = f"pip install hdf5plugin, which has many, or {remedy}"
        unknown = [number for number in unknown if not h5py.h5z.filter_avail(number)]
    if not unknown:
        return ""
    return f"HDF5 has no filter {', '.join(map(str, unknown))} here; {remedy}"


def _inflate(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data.data, most + 1)
    except zlib.error as error:
        raise Undecodable(str(error)) from None
    return _ended(found, most, ended=inflater.eof)


def _undo_bzip2(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    decompressor = bz2.BZ2Decompressor()
    try:
        found = decompressor.decompress(data.data, most + 1)
    except (OSError, ValueError) as error:
        raise Undecodable(str(error)) from None
    return _ended(found, most, ended=decompressor.eof)


def _ended(found: bytes, most: int, *, ended: bool) -> Bytes:
    if not ended or len(found) > most:
        raise Undecodable(f"it does not end after {most} bytes")
    return np.frombuffer(found, np.uint8)


def _unshuffle(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    out = np.empty_like(data)
    native_library().hsgd_io_unshuffle(data.ctypes.data, len(data), values[0], out.ctypes.data)
    return out


def _check_fletcher32(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    kept, end = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:].tobytes()
    found = native_library().hsgd_io_fletcher32(kept.ctypes.data, len(kept))
    swapped = (found & 0xFF00FF) << 8 | found >> 8 & 0xFF00FF  # as HDF5 wrote it before 1.6.3
    if len(end) < _CHECKSUM_BYTES or int.from_bytes(end, "little") not in (found, swapped):
        raise Undecodable("its Fletcher-32 checksum is wrong")
    return kept


def _undo_lzf(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    out = np.empty(most, np.uint8)
    length = native_library().hsgd_io_lzf(data.ctypes.data, len(data), out.ctypes.data, most)
    if length < 0:
        raise Undecodable(f"no LZF data of at most {most} bytes")
    return out[:length]


_KNOWN = {
    1: _Known("gzip", _inflate),
    _SHUFFLE: _Known("shuffle", _unshuffle),
    _FLETCHER32: _Known("fletcher32", _check_fletcher32),
    307: _Known("bzip2", _undo_bzip2),
    32000: _Known("lzf", _undo_lzf),
    32001: _Known("blosc", decode_blosc, "blosc"),
    32004: _Known("lz4", decode_lz4, "lz4"),
    _BITSHUFFLE: _Known("bitshuffle", decode_bitshuffle, "bshuf"),
    32015: _Known("zstd", decode_zstd, "zstd"),
}
