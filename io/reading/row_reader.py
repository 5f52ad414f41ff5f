"""RowReader: reads ranges of rows from the places that a DataMap names.

Data goes by large preadv calls into the caller's array if the DataMap allows to bypass HDF5,
otherwise by h5py. Shuffled batches are read by filler.py and row_copies.py; they come here for
rows that need h5py or another byte order.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hsgd.base.closing import Closing
from hsgd.base.forked import in_forked_child
from hsgd.errors import DataError

from ..format.data_map import DataMap, Extent, Offsets
from ..format.fields import stored_name
from ..format.filters import load_filters
from ..format.opening import first_line, object_identity, open_hdf5
from ..format.ragged import Ragged, join
from ..format.table_columns import as_column, find_field
from ..order.epoch_order import IntArray
from ..remote.disk_cache import RequestCounts
from ..remote.object_reader import ObjectReader, RemoteAccess
from . import row_copies
from .chunk_reader import ChunkReader
from .claimed_memory import claimed_memory
from .slab_files import SlabFiles, check_file

if TYPE_CHECKING:
    import h5py

__all__ = ["ReadStats", "RowReader", "WrongChecksum", "check_offsets"]

_READ_BYTES = 16 << 20  # per preadv call
_OPEN_FILES = 64  # kept open by one RowReader


class WrongChecksum(DataError):
    """The values of a block are not those that were stored."""


@dataclass
class ReadStats(RequestCounts):
    """Counters of what was read so far; written by the reading thread."""

    bytes_read: int = 0
    preadv_calls: int = 0
    h5py_calls: int = 0
    read_s: float = 0.0
    direct_refusal: str = ""  # why a file was read through the page cache despite direct=True


class RowReader(Closing):
    """Reader of ranges of rows, for one thread of one process; opens files when it needs them.

    A forked child closes its copies of the descriptors at once, and opens its own when it reads.
    Several readers may share `objects`, the reader of objects behind URLs.
    """

    def __init__(
        self, data: DataMap, stats: ReadStats | None = None, objects: ObjectReader | None = None
    ) -> None:
        self.data = data
        self.stats = stats if stats is not None else ReadStats()
        self._files = SlabFiles(data)
        self._objects = objects or ObjectReader(data.access or RemoteAccess())
        self._hdf5: OrderedDict[int, h5py.File] = OrderedDict()
        self._inherited = self._hdf5  # after a fork: the parent's files, kept so that none closes
        self._specs = {spec.name: spec for spec in data.fields}
        self._chunks = ChunkReader(data, self._read_bytes, self._forget)
        self._stops = list(itertools.accumulate(data.slab_counts))
        self._element_stops: dict[str, list[int]] = {}  # of ragged fields, by slab
        # For a packed dataset: reads the samples that its windows consist of.
        self._source: RowReader | None = None
        if data.windows is not None:
            self._source = RowReader(data.windows.source, self.stats, objects)
        in_forked_child(self, RowReader._abandon)

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        self._files.close()
        while self._hdf5:
            with contextlib.suppress(RuntimeError):  # HDF5's, for damage; what was read was read
                self._hdf5.popitem()[1].close()
        if self._source is not None:
            self._source.close()

    def read(self, name: str, start: int, out: NDArray[Any]) -> None:
        """Fill `out` with rows [start, start + len(out)) of field `name`; blocking.

        `out` is C-contiguous, of the field's dtype in native byte order. Raises DataError, naming
        file and byte range, if rows cannot be read or the file changed since it was examined.
        """
        began = time.perf_counter()
        done = 0
        while done < len(out):
            number = bisect.bisect_right(self._stops, start + done)
            slab = self.data.slabs[number]
            row = start + done - slab.start
            rows = min(len(out) - done, slab.count - row)
            part = out[done : done + rows]
            extent = slab.extents[name]
            if extent.gathered and self._source is not None:
                self._source.read_stream(name, (start + done) * part.shape[1], part)
                self.stats.bytes_read -= part.nbytes  # read_stream() counts them, and so do we
            elif extent.refusal:
                self._read_h5py(number, name, row, part)
            elif extent.positions:
                positions = np.frombuffer(extent.positions, np.int64)[row : row + rows]
                for at, position in enumerate(positions.tolist()):
                    self._read_direct(number, extent, position, part[at : at + 1])
            elif extent.chunks is not None:
                self._read_chunks(number, name, row, part)
            else:
                self._read_direct(number, extent, row * self._specs[name].row_bytes, part)
            done += rows
        self.stats.bytes_read += out.nbytes
        self.stats.read_s += time.perf_counter() - began

    def read_ragged(self, name: str, start: int, count: int) -> Ragged:
        """Read samples [start, start + count) of a ragged field; raises as read()."""
        spec = self._specs[name]
        parts = [Ragged(np.empty((0, *spec.shape), spec.dtype), np.zeros(1, np.int64))]
        while count:
            number = bisect.bisect_right(self._stops, start)
            slab = self.data.slabs[number]
            samples = min(count, slab.start + slab.count - start)
            ends = self.read_offsets(number, name, start - slab.start, samples)
            elements = int(ends[-1] - ends[0])
            what = f"{elements} elements of {name!r}"
            with claimed_memory(slab.path, what, elements * spec.row_bytes):
                values = np.empty((elements, *spec.shape), spec.dtype)
            self.read_elements(number, name, int(ends[0]), values)
            parts.append(Ragged(values, ends - ends[0]))
            start, count = start + samples, count - samples
        joined = join(parts)
        assert isinstance(joined, Ragged)
        return joined

    def read_elements(self, number: int, name: str, first: int, out: NDArray[Any]) -> None:
        """Fill `out` with a slab's elements of a ragged field from `first` on; raises as read()."""
        extent = self.data.slabs[number].extents[name]
        if extent.refusal:
            self._read_h5py(number, name, first, out)
        elif extent.chunks is not None:
            self._read_chunks(number, name, first, out)
        else:
            self._read_direct(number, extent, first * self._specs[name].row_bytes, out)
        self.stats.bytes_read += out.nbytes

    def read_stream(self, name: str, first: int, out: NDArray[Any]) -> None:
        """Fill `out` with elements, counted over all slabs, of a ragged field; raises as read()."""
        flat = out.reshape(-1, *self._specs[name].shape)
        for number, low, high in self.element_ranges(name, first, first + len(flat)):
            part, flat = flat[: high - low], flat[high - low :]
            self.read_elements(number, name, low, part)

    def element_ranges(self, name: str, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield where elements [first, stop) of a ragged field lie: slab, and range in the slab.

        `first` and `stop` count over all slabs; the ranges [low, high) count inside each slab.
        """
        stops = self._element_stops.get(name)
        if stops is None:
            found = [slab.extents[name].offsets for slab in self.data.slabs]
            stops = list(itertools.accumulate(o.elements if o else 0 for o in found))
            self._element_stops[name] = stops
        number = bisect.bisect_right(stops, first)
        while first < stop:
            before = stops[number - 1] if number else 0
            end = min(stop, stops[number])
            if end > first:
                yield number, first - before, end - before
            first, number = max(first, end), number + 1

    def read_offsets(
        self, number: int, name: str, start: int, count: int, *, verify: bool = False
    ) -> IntArray:
        """Return where samples [start, start + count) of a slab begin, and where the last ends.

        The count + 1 offsets are in elements of the slab. With `verify` the samples must be one
        checksum block, whose checksum is checked. Raises DataError as read(), and for impossible
        offsets.
        """
        slab = self.data.slabs[number]
        extent = slab.extents[name]
        offsets = extent.offsets
        assert offsets is not None
        if offsets.held:
            return np.frombuffer(offsets.held, np.int64)[start : start + count + 1]
        with claimed_memory(slab.path, f"{count + 1} offsets of {name!r}", 8 * (count + 1)):
            ends = np.empty(count + 1, np.int64)
        position = offsets.offset + ends.itemsize * start
        self._read_bytes(number, position, ends)
        self.stats.bytes_read += ends.nbytes
        if verify:
            block = start // self.data.checksum_rows
            (expected,) = np.frombuffer(offsets.checksums, np.uint32)[block : block + 1]
            if row_copies.crc32c(ends) != expected and self._forget(number, position, ends.nbytes):
                self._read_bytes(number, position, ends)
            if row_copies.crc32c(ends) != expected:
                raise DataError(
                    f"{slab.path}: the checksum of the offsets at byte {position} is wrong; "
                    "restore this file, see hsgd data verify"
                )
        ends -= offsets.first
        check_offsets(slab.path, name, start, ends, offsets)
        return ends

    def scatter(
        self,
        name: str,
        number: int,
        start: int,
        places: row_copies.Addresses,
        *,
        first: int | None = None,
        sizes: IntArray | None = None,
        verify: bool = False,
    ) -> None:
        """Read samples of slab `number` from `start` on, each to its own address; blocking.

        `places` has one address per sample, 0 to skip it; the memory has the field's dtype in
        native byte order. For a ragged field, `first` is its first element, and `sizes` are the
        bytes of each sample. With `verify` the samples must be one checksum block; if its checksum
        is wrong, WrongChecksum is raised after the memory was written. Raises DataError as read().
        """
        began = time.perf_counter()
        spec = self._specs[name]
        extent = self.data.slabs[number].extents[name]
        row, rows = start, len(places)
        if first is not None and sizes is not None:
            row, rows = first, int(sizes.sum()) // spec.row_bytes

        def move() -> int:
            crc = 0
            for low, block in self._parts(number, name, row, rows):
                if verify:
                    crc = row_copies.crc32c(block, crc)
                if sizes is None:
                    row_copies.move_rows(block, places[low : low + len(block)])
                else:
                    _move_parts(block, low * spec.row_bytes, places, sizes)
            return crc

        crc = move()
        if verify:
            index = start // self.data.checksum_rows
            expected = np.frombuffer(extent.checksums, np.uint32)[index]
            if crc != expected and self._forget_rows(number, name, row, rows):
                crc = move()
            if crc != expected:
                raise WrongChecksum(
                    f"{self.data.slabs[number].path}: the checksum of the block "
                    f"{_place_of(extent, row)} of {name!r} is wrong; restore this file, see hsgd "
                    "data verify"
                )
        if extent.chunks is not None:  # read() counts its own time
            self.stats.read_s += time.perf_counter() - began

    def _forget_rows(self, number: int, name: str, row: int, rows: int) -> bool:
        """Drop rows, or elements, from the cache on disk; False if there is no such cache."""
        extent, row_bytes = self.data.slabs[number].extents[name], self._specs[name].row_bytes
        if extent.chunks is not None:
            return self._chunks.forget(number, name, row, rows)
        return self._forget(number, extent.offset + row * row_bytes, rows * row_bytes)

    def _forget(self, number: int, position: int, nbytes: int) -> bool:
        slab = self.data.slabs[number]
        identity = object_identity(slab.identity)
        return identity is not None and self._objects.forget(slab.path, identity, position, nbytes)

    def _parts(
        self, number: int, name: str, row: int, rows: int
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield rows, or elements, of a slab in parts, each with the number of rows before it.

        For data that cannot be read straight to its place. A part is valid until the next one.
        """
        slab, spec = self.data.slabs[number], self._specs[name]
        if slab.extents[name].chunks is None:
            with claimed_memory(slab.path, f"{rows} rows of {name!r}", rows * spec.row_bytes):
                block = np.empty((rows, *spec.shape), spec.dtype)
            if slab.extents[name].offsets is None:
                self.read(name, slab.start + row, block)
            else:  # of an object
                self.read_elements(number, name, row, block)
            yield 0, block
            return
        for low, block in self._chunks.parts(number, name, row, rows):
            self.stats.bytes_read += block.nbytes
            yield low, block

    def _read_chunks(self, number: int, name: str, row: int, out: NDArray[Any]) -> None:
        for low, block in self._chunks.parts(number, name, row, len(out)):
            out[low : low + len(block)] = block

    def _read_direct(self, number: int, extent: Extent, skip: int, out: NDArray[Any]) -> None:
        """Read with preadv straight into `out`, then fix the byte order."""
        self._read_bytes(number, extent.offset + skip, out)
        if extent.stored_dtype != out.dtype:
            out.byteswap(inplace=True)

    def _read_bytes(self, number: int, position: int, out: NDArray[Any]) -> None:
        slab = self.data.slabs[number]
        if (identity := object_identity(slab.identity)) is not None:
            view = out.reshape(-1).view(np.uint8).data
            self._objects.read_into(slab.path, identity, position, view, self.stats)
            return
        descriptor, _ = self._files.acquire(number)
        self._files.release([number])
        view = out.reshape(-1).view(np.uint8).data
        while view:
            wanted = view[:_READ_BYTES]
            try:
                got = os.preadv(descriptor, [wanted], position)
            except OSError as error:
                raise DataError(
                    f"{slab.path}: reading bytes [{position}, {position + len(wanted)}) failed: "
                    f"{error.strerror}"
                ) from error
            if got == 0:
                raise DataError(
                    f"{slab.path}: truncated, bytes [{position}, {position + len(view)}) are "
                    "missing; copy or convert it again"
                )
            self.stats.preadv_calls += 1
            view = view[got:]
            position += got

    def _read_h5py(self, number: int, name: str, row: int, out: NDArray[Any]) -> None:
        slab = self.data.slabs[number]
        try:
            file = self._hdf5_file(number)
            check_file(slab.path, slab.identity)
            if (linked := slab.extents[name].linked) is not None:
                check_file(*linked)
            stored = out.view(slab.extents[name].stored_dtype)  # HDF5 does not swap bit fields
            if places := slab.extents[name].places:
                for at, place in enumerate(places[row : row + len(out)]):
                    item = file[f"{place}/{name}"]
                    item.read_direct(stored[at : at + 1].reshape(item.shape))
            else:
                item, column = find_field(file, self._stored_name(number, name))
                rows = as_column(stored, item, column) if column else stored
                item.read_direct(rows, np.s_[row : row + len(out)])
            if stored.dtype != out.dtype:
                out.byteswap(inplace=True)
        except DataError:
            raise
        except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{slab.path}: h5py cannot read rows [{row}, {row + len(out)}) of {name!r}: "
                f"{first_line(error)}"
            ) from error
        self.stats.h5py_calls += 1

    def _hdf5_file(self, number: int) -> h5py.File:
        """Return a slab opened by h5py; close the least recently used one if too many are open."""
        if number in self._hdf5:
            self._hdf5.move_to_end(number)
            return self._hdf5[number]
        if len(self._hdf5) >= _OPEN_FILES:
            self._hdf5.popitem(last=False)[1].close()
        slab = self.data.slabs[number]
        cache = max(1 << 20, *(2 * extent.chunk_bytes for extent in slab.extents.values()))
        file = self._hdf5[number] = open_hdf5(slab.path, cache)
        for name, extent in slab.extents.items():
            if extent.refusal:
                # Another process may have examined the file.
                first = f"{extent.places[0]}/{name}" if extent.places else ""
                load_filters(find_field(file, first or self._stored_name(number, name))[0])
        return file

    def _stored_name(self, number: int, name: str) -> str:
        stored = self.data.slabs[number].extents[name].stored
        return stored or stored_name(self.data.group, name)

    def _abandon(self) -> None:
        """Forget h5py files, in a forked child: to close them takes h5py's lock (before 3.14)."""
        self._inherited = self._hdf5
        self._hdf5 = OrderedDict()


def check_offsets(path: str, name: str, start: int, ends: IntArray, offsets: Offsets) -> None:
    """Raise DataError if `ends` cannot be the ends of the samples from `start` on in their slab."""
    lengths = np.diff(ends)
    inside = ends[0] >= 0 and ends[-1] <= offsets.elements
    # As an unsigned number a negative length is larger than `longest`.
    if not inside or lengths.view(np.uint64).max(initial=0) > offsets.longest:
        raise DataError(
            f"{path}: the offsets of samples [{start}, {start + len(lengths)}) of {name!r} are "
            "damaged; restore this file"
        )


def _move_parts(
    block: NDArray[Any], before: int, places: row_copies.Addresses, sizes: IntArray
) -> None:
    """Copy bytes of samples of different lengths to their places.

    `block` begins `before` bytes after the start of the first sample; it may begin and end in the
    middle of a sample.
    """
    ends = np.cumsum(sizes)
    starts = ends - sizes
    after = before + block.nbytes
    chosen = slice(
        int(np.searchsorted(ends, before, side="right")),
        int(np.searchsorted(starts, after, side="left")),
    )
    lows, highs = np.maximum(starts[chosen], before), np.minimum(ends[chosen], after)
    skipped = (lows - starts[chosen]).astype(np.uint64)
    to = np.where(places[chosen] > 0, places[chosen] + skipped, np.uint64(0))
    row_copies.move_rows(block, to, highs - lows)


def _place_of(extent: Extent, row: int) -> str:
    chunks = extent.chunks
    if chunks is None or row // chunks.rows * 8 >= len(chunks.offsets):
        return f"at row {row}"
    return f"at byte {chunks.place(chunks.of_blocks(row // chunks.rows, 0).start)[0]}"
