"""Damages chunks of every filter at random and decodes them: no crash, no memory beyond a chunk.

    python tests/io/hostile/mutated_chunks.py COUNT [NAME...]

decodes COUNT damaged chunks of each row of filters, in this process.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
from hsgd.io.format.filters import Filter, Undecodable, filters_of, undo_filters
from numpy.typing import NDArray

__all__ = ["ROWS", "decoded", "stored_chunk"]

ITEMS = 20_011  # several blocks of each codec, and a part of one
ROWS: dict[str, dict[str, Any]] = {
    "gzip": {"compression": "gzip"},
    "shuffle + gzip + fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "fletcher32": {"fletcher32": True},
    "bzip2": dict(hdf5plugin.BZip2()),
    "blosc lz4": dict(hdf5plugin.Blosc("lz4", 5, hdf5plugin.Blosc.SHUFFLE)),
    "blosc blosclz": dict(hdf5plugin.Blosc("blosclz", 5, hdf5plugin.Blosc.BITSHUFFLE)),
    "blosc zstd": dict(hdf5plugin.Blosc("zstd", 5, hdf5plugin.Blosc.BITSHUFFLE)),
    "blosc zlib": dict(hdf5plugin.Blosc("zlib", 5, hdf5plugin.Blosc.NOSHUFFLE)),
    "lz4": dict(hdf5plugin.LZ4(4096)),
    "bitshuffle": dict(hdf5plugin.Bitshuffle(cname="none")),
    "bitshuffle lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle zstd": dict(hdf5plugin.Bitshuffle(cname="zstd")),
    "zstd": dict(hdf5plugin.Zstd()),
}


def stored_chunk(name: str, folder: Path) -> tuple[tuple[Filter, ...], bytes, bytes]:
    """Return the filters of a row, a chunk as HDF5 stores it, and its bytes without filters."""
    draw = np.random.default_rng(0)
    values = np.repeat(draw.integers(0, 1000, ITEMS), draw.integers(1, 4, ITEMS))[:ITEMS]
    values = values.astype(np.int32)
    with h5py.File(folder / f"{name}.h5", "w") as file:
        dataset = file.create_dataset("x", data=values, chunks=(ITEMS,), **ROWS[name])
        mask, stored = dataset.id.read_direct_chunk((0,))
        assert not mask
        return filters_of(dataset.id.get_create_plist()), stored, values.tobytes()


class _Guarded:
    """Memory before a page that cannot be read: reading beyond its end is a crash."""

    def __init__(self, nbytes: int) -> None:
        self._size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = np.frombuffer(mmap.mmap(-1, self._size + mmap.PAGESIZE), np.uint8)
        end = ctypes.c_void_p(self._memory.ctypes.data + self._size)
        assert ctypes.CDLL(None).mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def hold(self, data: bytes) -> NDArray[np.uint8]:
        """Return the bytes in this memory, up to its end; the last ones are overwritten."""
        found = self._memory[self._size - len(data) : self._size]
        found[:] = np.frombuffer(data, np.uint8)
        return found


def _damaged(stored: bytes, draw: random.Random) -> bytes:
    """Return a chunk with some bytes changed, mostly near its start, or cut, or lengthened."""
    data = bytearray(stored)
    for _ in range(draw.choice([1, 1, 2, 5, 40])):
        at = draw.randrange(min(len(data), draw.choice([4, 16, 64, 1 << 30])))
        way = draw.randrange(5)
        if way == 0:
            data[at] = draw.randrange(256)
        elif way == 1:
            data[at] ^= 1 << draw.randrange(8)
        elif way == 2:
            data[at : at + 4] = draw.choice([0, 1, 0xFFFFFFFF, 0x7FFFFFFF, len(data)]).to_bytes(
                4, draw.choice(["big", "little"])
            )
        elif way == 3:
            del data[at : at + draw.choice([1, 4, 1000])]
        else:
            data[at:at] = draw.randbytes(draw.choice([1, 4, 100]))
        if not data:
            break
    return bytes(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.1 else data)


def decoded(name: str, count: int, folder: Path) -> Iterator[str]:
    """Decode `count` damaged chunks; yield what came of each."""
    filters, stored, expected = stored_chunk(name, folder)
    whole = undo_filters(filters, np.frombuffer(stored, np.uint8), len(expected))
    assert whole.tobytes() == expected
    draw, guarded = random.Random(name), _Guarded(2 * len(stored) + 65536)
    for _ in range(count):
        data = guarded.hold(_damaged(stored, draw))
        try:
            assert len(undo_filters(filters, data, len(expected))) == len(expected)
        except Undecodable:
            yield "refused"
        else:
            yield "decoded"


def main(words: Sequence[str]) -> int:
    count, *names = words
    for name in names or ROWS:
        print(name, end=" ", flush=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryDirectory() as folder:
            found = Counter(decoded(name, int(count), Path(folder)))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(dict(found), f"{grown} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
