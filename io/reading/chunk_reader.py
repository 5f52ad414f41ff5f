"""ChunkReader: reads and decodes the chunks around rows, without HDF5."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.chunks import RUN_BYTES, Chunks, decode
from ..format.data_map import DataMap
from ..format.filters import Undecodable
from .claimed_memory import claimed_memory
from .slab_files import check_file

__all__ = ["ChunkReader"]


class ChunkReader:
    """Reader of blocks of rows, for one thread; the last block stays in memory.

    `read_bytes` fills an array from a position of a slab; `forget` drops a range from the cache on
    disk, and returns whether there is one.
    """

    def __init__(
        self,
        data: DataMap,
        read_bytes: Callable[[int, int, NDArray[Any]], None],
        forget: Callable[[int, int, int], bool],
    ) -> None:
        self._data, self._read_bytes, self._forget = data, read_bytes, forget
        self._specs = {spec.name: spec for spec in data.fields}
        self._memory = np.empty(0, np.uint8)
        self._last: tuple[tuple[int, str, int], NDArray[Any]] | None = None

    def parts(
        self, number: int, name: str, start: int, count: int
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield rows [start, start + count) of a slab in parts, each with the rows before it.

        A part is valid until the next one. Raises DataError if a chunk cannot be read or decoded.
        """
        step = self._chunks(number, name).rows
        row = start
        while row < start + count:
            block = self._block(number, name, row // step)
            first = row % step
            part = block[first : first + start + count - row]
            yield row - start, part
            row += len(part)

    def forget(self, number: int, name: str, start: int, count: int) -> bool:
        """Drop the chunks of rows from the cache on disk; False if there is no such cache."""
        self._last = None
        chunks = self._chunks(number, name)
        blocks = start // chunks.rows, -(-(start + count) // chunks.rows)
        found = [self._forget(number, *chunks.place(n)) for n in chunks.of_blocks(*blocks)]
        return any(found)

    def _chunks(self, number: int, name: str) -> Chunks:
        chunks = self._data.slabs[number].extents[name].chunks
        assert chunks is not None
        return chunks

    def _block(self, number: int, name: str, index: int) -> NDArray[Any]:
        """Return the rows of one block in native byte order."""
        key, slab = (number, name, index), self._data.slabs[number]
        if self._last is not None and self._last[0] == key:
            check_file(slab.path, slab.identity)
            return self._last[1]
        self._last = None
        spec, extent, chunks = self._specs[name], slab.extents[name], self._chunks(number, name)
        count = slab.count if extent.offsets is None else extent.offsets.elements
        rows = min(chunks.rows, count - index * chunks.rows)
        stored = self._stored(number, name, chunks.of_blocks(index, index + 1))
        what, nbytes = f"a block of {name!r}", chunks.decoding_bytes + chunks.joined_bytes
        with claimed_memory(slab.path, what, nbytes):
            if chunks.is_split:
                block = self._memory_for((rows, *spec.shape), spec.dtype)
                for found, part in zip(stored, _parts(block, chunks), strict=True):
                    part[...] = self._decoded(number, name, *found)[tuple(map(slice, part.shape))]
            else:
                block = self._decoded(number, name, *next(stored))[:rows]
                block = block.astype(spec.dtype, copy=False)
        self._last = (key, block)
        return block

    def _memory_for(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return memory of the block before, if that is enough: new memory takes page faults."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(0, np.uint8)  # not both at once
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype).reshape(shape)

    def _stored(
        self, number: int, name: str, numbers: range
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield chunks and their bytes in the file; one read takes chunks that lie together."""
        chunks = self._chunks(number, name)
        starts, sizes = chunks.places(numbers)
        stops = [start + size for start, size in zip(starts, sizes, strict=True)]
        low = 0
        while low < len(numbers):
            first, high = starts[low], low + 1
            while high < len(numbers) and starts[high] == stops[high - 1]:
                if stops[high] - first > RUN_BYTES:
                    break
                high += 1
            run = np.empty(stops[high - 1] - first, np.uint8)
            self._read_bytes(number, first, run)
            for each in range(low, high):
                yield numbers[each], run[starts[each] - first : stops[each] - first]
            low = high

    def _decoded(
        self, number: int, name: str, chunk: int, stored: NDArray[np.uint8], *, again: bool = False
    ) -> NDArray[Any]:
        """Return a chunk without filters, in the byte order of the file.

        `again` is true after the chunk was dropped from the cache on disk.
        """
        slab, chunks = self._data.slabs[number], self._chunks(number, name)
        try:
            flat = decode(chunks, chunk, stored)
        except Undecodable as error:
            position, nbytes = chunks.place(chunk)
            if not again and self._forget(number, position, nbytes):
                (found,) = self._stored(number, name, range(chunk, chunk + 1))
                return self._decoded(number, name, *found, again=True)
            raise DataError(
                f"{slab.path}: the chunk at byte {position} of {name!r} cannot be decompressed: "
                f"{error}; restore this file"
            ) from None
        return flat.view(slab.extents[name].stored_dtype).reshape(chunks.shape)


def _parts(block: NDArray[Any], chunks: Chunks) -> Iterator[NDArray[Any]]:
    """Yield the part of a block that each of its chunks holds."""
    for at in itertools.product(*map(range, chunks.grid)):
        steps = zip(at, chunks.shape[1:], strict=True)
        cut = tuple(slice(n * step, (n + 1) * step) for n, step in steps)
        where = (slice(None), *cut)
        yield block[where]
