"""Compression of the chunks that a conversion writes."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .plugin_codecs import compress_blosc, hdf5plugin, load_codecs

if TYPE_CHECKING:
    import h5py

__all__ = ["COMPRESSIONS", "Compression", "check_compression"]

COMPRESSIONS = ("gzip", "lz4", "zstd")
_BLOSC = 32001  # as registered with the HDF Group
_GZIP_LEVEL = 4
_BLOSC_LEVEL = 5


def check_compression(name: str) -> None:
    """Raise ValueError for an unknown compression, MissingExtra for one that is not installed."""
    if name not in COMPRESSIONS:
        raise ValueError(f"compress={name!r}; use one of {', '.join(map(repr, COMPRESSIONS))}")
    if name != "gzip":
        load_codecs("blosc")


class Compression:
    """Compression of chunks with gzip, or with lz4 or zstd in Blosc with shuffled bytes."""

    def __init__(self, name: str, item_bytes: int) -> None:
        self._name, self._item_bytes = name, item_bytes

    def set_filters(self, create: h5py.h5p.PropDCID) -> None:
        """Add the filter to the creation properties of a dataset."""
        if self._name == "gzip":
            create.set_deflate(_GZIP_LEVEL)
            return
        blosc = hdf5plugin().Blosc
        options = blosc(self._name, _BLOSC_LEVEL, blosc.SHUFFLE)
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
        item = self._item_bytes if self._item_bytes in (1, 2, 4, 8) else 1
        return compress_blosc(data, self._name, _BLOSC_LEVEL, item)
