"""Blosc, Zstandard, LZ4 and bitshuffle: the codecs inside hdf5plugin's libraries, without HDF5.

The filter functions of these libraries report errors to HDF5, which needs its lock, and the one of
LZ4 reads beyond damaged chunks. So the codecs that they export are called: each writes to memory of
a given size. What a codec itself does not check is checked before the call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..needed_for import needed_for

__all__ = [
    "Undecodable",
    "compress_blosc",
    "decode_bitshuffle",
    "decode_blosc",
    "decode_lz4",
    "decode_zstd",
    "hdf5plugin",
    "load_codecs",
]

Bytes = NDArray[np.uint8]
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_CODECS: dict[str, tuple[str, Any, list[Any]]] = {  # library, result, arguments
    "ZSTD_decompress": ("zstd", _SIZE, [_POINTER, _SIZE, _POINTER, _SIZE]),
    "LZ4_decompress_safe": ("lz4", _INT, [_POINTER, _POINTER, _INT, _INT]),
    "blosc_decompress_ctx": ("blosc", _INT, [_POINTER, _POINTER, _SIZE, _INT]),
    "blosc_compress_ctx": (
        "blosc",
        _INT,
        [_INT, _INT, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, ctypes.c_char_p, _SIZE, _INT],
    ),
    **{
        name: ("bshuf", ctypes.c_int64, [_POINTER, _POINTER, _SIZE, _SIZE, _SIZE])
        for name in ("bshuf_bitunshuffle", "bshuf_decompress_lz4", "bshuf_decompress_zstd")
    },
}
_BLOSC_OVERHEAD = 16
_BITSHUFFLED = {0: "bshuf_bitunshuffle", 2: "bshuf_decompress_lz4", 3: "bshuf_decompress_zstd"}
_WHOLE_ITEMS = 8  # bitshuffle leaves what is left after groups of so many items


class Undecodable(ValueError):
    """A chunk cannot be decoded by its filters."""


def hdf5plugin() -> Any:
    """Import hdf5plugin, which registers its filters with HDF5. Raises MissingExtra."""
    with needed_for("Blosc, Zstandard, LZ4 or bitshuffle in HDF5", "hdf5plugin"):
        import hdf5plugin
    return hdf5plugin


def load_codecs(name: str) -> None:
    """Load the codecs of one of hdf5plugin's libraries. Raises MissingExtra if they are missing."""
    with needed_for(f"the filter {name}", "hdf5plugin"):
        try:
            for codec, (library, *_) in _CODECS.items():
                if library == name:
                    _codec(codec)
        except (AttributeError, OSError) as error:
            raise ImportError(str(error)) from None


@functools.cache
def _codec(name: str) -> Callable[..., int]:
    library, result, arguments = _CODECS[name]
    path = Path(hdf5plugin().PLUGIN_PATH) / f"libh5{library}.so"
    found: Any = getattr(ctypes.CDLL(str(path)), name)
    found.restype, found.argtypes = result, arguments
    return found  # type: ignore[no-any-return]


def decode_zstd(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    """Decompress a Zstandard frame to at most `most` bytes. Raises Undecodable."""
    out = np.empty(most, np.uint8)
    length = _codec("ZSTD_decompress")(out.ctypes.data, most, data.ctypes.data, len(data))
    if length > most:  # errors are numbers near the largest
        raise Undecodable(f"no Zstandard frame of at most {most} bytes")
    return out[:length]


def decode_blosc(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    """Decompress a Blosc buffer to at most `most` bytes. Raises Undecodable."""
    # Its header has the length of the data, and that of the buffer, which is not an argument.
    head = data[:_BLOSC_OVERHEAD].tobytes()
    length, whole = int.from_bytes(head[4:8], "little"), int.from_bytes(head[12:], "little")
    if len(head) < _BLOSC_OVERHEAD or length > most or whole != len(data):
        raise Undecodable("its header is damaged")
    out = np.empty(length, np.uint8)
    found = _codec("blosc_decompress_ctx")(data.ctypes.data, out.ctypes.data, len(out), 1)
    if found != len(out):
        raise Undecodable("a Blosc buffer is damaged")
    return out


def compress_blosc(data: Bytes, codec: str, level: int, item: int) -> bytes:
    """Compress with shuffled bytes of items; the result may be longer than the data."""
    out = np.empty(len(data) + _BLOSC_OVERHEAD, np.uint8)
    ends = (out.ctypes.data, len(out), codec.encode(), 0, 1)
    compress = _codec("blosc_compress_ctx")
    length = compress(level, 1, item, len(data), data.ctypes.data, *ends)
    return out[:length].tobytes()


def decode_lz4(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    """Decompress the blocks of HDF5's LZ4 filter to at most `most` bytes. Raises Undecodable."""
    length, step = _header(data, most)
    out = np.empty(length, np.uint8)
    source, target = data.ctypes.data, out.ctypes.data
    sizes = [min(step, length - low) for low in range(0, length, step)]
    low = 0
    for (start, stop), size in zip(_blocks(data, len(sizes)), sizes, strict=True):
        if stop - start == size:
            out[low : low + size] = data[start:stop]
        else:
            decompress = _codec("LZ4_decompress_safe")
            if decompress(source + start, target + low, stop - start, size) != size:
                raise Undecodable("an LZ4 block is damaged")
        low += size
    return out


def decode_bitshuffle(data: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    """Undo bitshuffle, with LZ4 or Zstandard if there is any, to at most `most` bytes.

    Raises Undecodable.
    """
    item, step, compressor = (*values[2:], 0, 0)[:3]
    length, skip = len(data), 0
    if compressor:
        length, block_bytes = _header(data, most)
        step, skip = block_bytes // item, 12
    items, left = divmod(length, item)
    if left or step % _WHOLE_ITEMS or (compressor and not step):
        raise Undecodable(f"{length} bytes in blocks of {step} items of {item} bytes")
    if compressor:
        whole, rest = divmod(items, step)
        (_, end), *_ = [(0, skip), *_blocks(data, whole + (rest >= _WHOLE_ITEMS))][::-1]
        if end + items % _WHOLE_ITEMS * item > len(data):
            raise Undecodable("its last block is cut off")
    out = np.empty(length, np.uint8)
    undo = _codec(_BITSHUFFLED[compressor])
    if undo(data.ctypes.data + skip, out.ctypes.data, items, item, step) < 0:
        raise Undecodable("a block of bitshuffle is damaged")
    return out


def _header(data: Bytes, most: int) -> tuple[int, int]:
    """Return the bytes of all blocks and of one block, as the header of 12 bytes has them."""
    head = data[:12].tobytes()
    length, step = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
    if len(head) < 12 or not 0 < length <= most or not step:
        raise Undecodable(f"{length} bytes in blocks of {step}, {most} have room")
    return length, step


def _blocks(data: Bytes, count: int) -> list[tuple[int, int]]:
    """Return where the compressed blocks after the header lie, each after its length."""
    found, start, view = [], 12, data.data
    for _ in range(count):
        stop = start + 4 + int.from_bytes(view[start : start + 4], "big")
        if stop > len(view):
            raise Undecodable("its blocks are cut off")
        found.append((start + 4, stop))
        start = stop
    return found
