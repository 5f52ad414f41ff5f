"""Reading ranges of rows from the places that a DataMap names.

Owns `RowReader`, the open files of one thread: large preadv calls straight to where rows are wanted
where the DataMap allows to bypass HDF5 (native.py), h5py elsewhere. Never decides who reads what
(partition.py), and never trusts a file that changed since it was examined (datamap.py).
"""

from __future__ import annotations

import bisect
import errno
import itertools
import mmap
import os
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from hsgd.io import native
from hsgd.io.datamap import DataMap, Extent, SlabMap, first_line, identity_of, open_hdf5
from numpy.typing import NDArray

from hsgd.errors import DataError

if TYPE_CHECKING:
    import h5py

__all__ = ["ReadStats", "RowReader"]

_READ_BYTES = 16 << 20  # per preadv call
_OPEN_FILES = 64  # kept open by one RowReader
_STAGING_BYTES = 1 << 20  # small rows pass through so much, which stays in the cache
_DIRECT_BYTES = 4 << 20  # one read past the page cache
_SECTOR_BYTES = 4096  # what O_DIRECT asks for, on any disk


@dataclass
class ReadStats:
    """What was read so far. Written by the reading thread."""

    bytes_read: int = 0
    preadv_calls: int = 0
    h5py_calls: int = 0
    read_s: float = 0.0
    direct_refusal: str = ""  # why some file was read through the page cache although asked not to


@dataclass
class _OpenSlab:
    """Handles of one file: a descriptor for preadv, and an h5py file where some field needs it."""

    descriptor: int
    file: h5py.File | None = None
    alignment: int = 1  # of reads: more than 1 where the descriptor is past the page cache

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self.file is not None:
            self.file.close()
            self.file = None


class RowReader:
    """Reads ranges of rows. Belongs to one thread of one process; opens files when needed.

    direct: read past the page cache (O_DIRECT) where the file system can.
    A forked child closes its copies of the descriptors at once; it makes its own RowReader from the
    DataMap.
    """

    def __init__(
        self, data: DataMap, stats: ReadStats | None = None, *, direct: bool = False
    ) -> None:
        self.data = data
        self.stats = stats if stats is not None else ReadStats()
        self._direct = direct
        self._staging: mmap.mmap | None = None
        self._method = native.Method()
        self._open: OrderedDict[int, _OpenSlab] = OrderedDict()
        self._inherited = self._open  # after a fork: the parent's, kept so that nothing closes them
        self._specs = {spec.name: spec for spec in data.fields}
        self._stops = list(itertools.accumulate(data.slab_counts))
        _live_readers.add(self)

    def __enter__(self) -> RowReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        while self._open:
            self._open.popitem()[1].close()

    def read(self, name: str, start: int, out: NDArray[Any]) -> None:
        """Fill `out` with rows [start, start + len(out)) of field `name`.

        out: C-contiguous, of the native dtype of the field.
        Raises DataError, naming the file and the byte range, when it cannot be read or changed
        since it was examined.
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
            if extent.refusal:
                self._read_h5py(number, name, row, part)
            else:
                self._read_direct(number, extent, row * self._specs[name].row_bytes, part)
            done += rows
        self.stats.bytes_read += out.nbytes
        self.stats.read_s += time.perf_counter() - began

    def scatter(
        self,
        name: str,
        number: int,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        places: native.Addresses,
    ) -> None:
        """Rows [starts[i], starts[i] + counts[i]) of slab `number`, each to an address of its own.

        Rows are counted from the first of the slab. places: one address per row, range after range;
        0 for a row that nobody wants. Memory there is of the native dtype of the field. Raises
        DataError as read() does; rows may then have arrived in part.
        """
        began = time.perf_counter()
        slab, spec = self.data.slabs[number], self._specs[name]
        extent = slab.extents[name]
        rows = len(places)
        if spec.row_bytes == 0:
            return
        if extent.refusal or not extent.stored_dtype.isnative:
            largest = int(counts.max())
            buffer = np.empty((largest, *spec.shape), spec.dtype)
            done = 0
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
                part = buffer[:count]
                if extent.refusal:
                    self._read_h5py(number, name, start, part)
                else:
                    self._read_direct(number, extent, start * spec.row_bytes, part)
                native.move_rows(part, places[done : done + count])
                done += count
        else:
            self._scatter_direct(number, extent.offset, spec.row_bytes, starts, counts, places)
        self.stats.bytes_read += rows * spec.row_bytes
        self.stats.read_s += time.perf_counter() - began

    def _scatter_direct(
        self,
        number: int,
        offset: int,
        row_bytes: int,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        places: native.Addresses,
    ) -> None:
        slab = self.data.slabs[number]
        handle = self._slab(number)
        _check_unchanged(slab, os.fstat(handle.descriptor))
        method = self._prepared_method(handle.alignment)
        status, calls, position = native.read_rows(
            handle.descriptor, offset, row_bytes, starts, counts, places, method
        )
        if status == errno.EINVAL and handle.alignment > 1:
            self._leave_direct(number, "reading failed")
            handle = self._slab(number)
            status, calls, position = native.read_rows(
                handle.descriptor, offset, row_bytes, starts, counts, places, method
            )
        self.stats.preadv_calls += calls
        end = offset + int((starts + counts).max()) * row_bytes
        if status == native.END:
            raise DataError(
                f"{slab.path}: truncated, bytes [{position}, {end}) are missing; "
                "copy or convert it again"
            )
        if status:
            raise DataError(
                f"{slab.path}: reading bytes [{position}, {end}) failed: {os.strerror(status)}"
            )

    def _prepared_method(self, alignment: int) -> native.Method:
        """Staging memory of this reader, made when it is first needed."""
        if self._staging is None:
            count = _DIRECT_BYTES if self._direct else _STAGING_BYTES
            self._staging = mmap.mmap(-1, count)  # begins at a page
            self._method.staging_bytes = count
            self._method.staging = np.frombuffer(self._staging, np.uint8).ctypes.data
        self._method.alignment = alignment
        return self._method

    def _leave_direct(self, number: int, reason: str) -> None:
        """Go on through the page cache, for all files: they lie on one file system mostly."""
        self._direct = False
        self.stats.direct_refusal = f"{self.data.slabs[number].path}: {reason}"
        self.close()

    def _read_direct(self, number: int, extent: Extent, skip: int, out: NDArray[Any]) -> None:
        """preadv straight into `out`, then fix the byte order."""
        slab = self.data.slabs[number]
        handle = self._slab(number)
        if handle.alignment > 1:  # the caller's memory is not aligned
            self._leave_direct(number, "rows need conversion")
            handle = self._slab(number)
        descriptor = handle.descriptor
        _check_unchanged(slab, os.fstat(descriptor))
        view = out.reshape(-1).view(np.uint8).data
        position = extent.offset + skip
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
        if extent.stored_dtype != out.dtype:
            out.byteswap(inplace=True)

    def _read_h5py(self, number: int, name: str, row: int, out: NDArray[Any]) -> None:
        slab = self.data.slabs[number]
        handle = self._slab(number)
        try:
            if handle.file is None:
                cache = max(1 << 20, *(2 * e.chunk_bytes for e in slab.extents.values()))
                handle.file = open_hdf5(slab.path, cache)
            _check_unchanged(slab, Path(slab.path).stat())
            handle.file[name].read_direct(out, np.s_[row : row + len(out)])
        except DataError:
            raise
        except (OSError, KeyError) as error:
            raise DataError(
                f"{slab.path}: h5py cannot read rows [{row}, {row + len(out)}) of {name!r}: "
                f"{first_line(error)}"
            ) from error
        self.stats.h5py_calls += 1

    def _slab(self, number: int) -> _OpenSlab:
        """The handles of a slab, opened when needed; the least recently used ones give way."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        slab = self.data.slabs[number]
        handle = self._open_direct(slab.path) if self._direct else None
        if handle is None:
            try:
                handle = _OpenSlab(os.open(slab.path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                raise DataError(f"{slab.path}: cannot be opened: {error.strerror}") from error
        self._open[number] = handle
        _check_unchanged(slab, os.fstat(handle.descriptor))
        return handle

    def _open_direct(self, path: str) -> _OpenSlab | None:
        """A descriptor past the page cache; None where the file system refuses."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            self._direct = False
            self.stats.direct_refusal = f"{path}: {error.strerror}"
            return None
        return _OpenSlab(descriptor, alignment=_SECTOR_BYTES)

    def _abandon(self) -> None:
        """After fork, in the child: close descriptors, forget h5py files without closing them.

        Closing takes h5py's lock, which a thread of the parent may have held (h5py before 3.14).
        """
        for handle in self._open.values():
            if handle.descriptor >= 0:
                os.close(handle.descriptor)
                handle.descriptor = -1
        self._inherited = self._open
        self._open = OrderedDict()


def _check_unchanged(slab: SlabMap, status: os.stat_result) -> None:
    size = slab.identity[0]
    if status.st_size < size:
        raise DataError(
            f"{slab.path}: truncated since it was opened, bytes [{status.st_size}, {size}) are "
            "missing; copy or convert it again"
        )
    if identity_of(status) != slab.identity:
        raise DataError(
            f"{slab.path}: changed since it was opened (size, mtime_ns, inode: {slab.identity}, "
            f"now {identity_of(status)}); open the dataset again"
        )


_live_readers: weakref.WeakSet[RowReader] = weakref.WeakSet()


def _abandon_all() -> None:
    for reader in list(_live_readers):
        reader._abandon()


os.register_at_fork(after_in_child=_abandon_all)
