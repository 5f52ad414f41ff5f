"""Reading ranges of rows from the places that a DataMap names.

Owns `RowReader`: large preadv calls straight into the caller's array where the DataMap allows to
bypass HDF5, h5py elsewhere. Never decides who reads what (partition.py), and never trusts a file
that changed since it was examined (files.py). Batches of rows in shuffled order go another way
(fill.py, native.py), which comes here for what needs h5py or another byte order.
"""

from __future__ import annotations

import bisect
import itertools
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
from hsgd.io.datamap import DataMap, Extent, first_line, open_hdf5
from hsgd.io.files import SlabFiles, check_unchanged
from numpy.typing import NDArray

from hsgd.errors import DataError

if TYPE_CHECKING:
    import h5py

__all__ = ["ReadStats", "RowReader"]

_READ_BYTES = 16 << 20  # per preadv call
_OPEN_FILES = 64  # kept open by one RowReader


@dataclass
class ReadStats:
    """What was read so far. Written by the reading thread."""

    bytes_read: int = 0
    preadv_calls: int = 0
    h5py_calls: int = 0
    read_s: float = 0.0
    direct_refusal: str = ""  # why some file was read through the page cache although asked not to


class RowReader:
    """Reads ranges of rows. Belongs to one thread of one process; opens files when needed.

    A forked child closes its copies of the descriptors at once, and opens its own when it reads.
    """

    def __init__(self, data: DataMap, stats: ReadStats | None = None) -> None:
        self.data = data
        self.stats = stats if stats is not None else ReadStats()
        self._files = SlabFiles(data)
        self._hdf5: OrderedDict[int, h5py.File] = OrderedDict()
        self._inherited = self._hdf5  # after a fork: the parent's, kept so that nothing closes them
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
        self._files.close()
        while self._hdf5:
            self._hdf5.popitem()[1].close()

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

    def scatter(self, name: str, number: int, start: int, places: native.Addresses) -> None:
        """Rows of slab `number` from its row `start` on, each to an address of its own.

        places: one address per row, 0 for a row that nobody wants. Memory there is of the native
        dtype of the field. Raises DataError as read() does; nothing has arrived then.
        """
        spec = self._specs[name]
        rows = np.empty((len(places), *spec.shape), spec.dtype)
        self.read(name, self.data.slabs[number].start + start, rows)
        native.move_rows(rows, places)

    def _read_direct(self, number: int, extent: Extent, skip: int, out: NDArray[Any]) -> None:
        """preadv straight into `out`, then fix the byte order."""
        slab = self.data.slabs[number]
        descriptor, _ = self._files.acquire(number)
        self._files.release([number])
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
        try:
            file = self._hdf5_file(number)
            check_unchanged(slab, Path(slab.path).stat())
            file[name].read_direct(out, np.s_[row : row + len(out)])
        except DataError:
            raise
        except (OSError, KeyError) as error:
            raise DataError(
                f"{slab.path}: h5py cannot read rows [{row}, {row + len(out)}) of {name!r}: "
                f"{first_line(error)}"
            ) from error
        self.stats.h5py_calls += 1

    def _hdf5_file(self, number: int) -> h5py.File:
        """A slab opened by h5py; the least recently used ones give way."""
        if number in self._hdf5:
            self._hdf5.move_to_end(number)
            return self._hdf5[number]
        if len(self._hdf5) >= _OPEN_FILES:
            self._hdf5.popitem(last=False)[1].close()
        slab = self.data.slabs[number]
        cache = max(1 << 20, *(2 * extent.chunk_bytes for extent in slab.extents.values()))
        self._hdf5[number] = open_hdf5(slab.path, cache)
        return self._hdf5[number]

    def _abandon(self) -> None:
        """After fork, in the child: forget h5py files without closing them.

        Closing takes h5py's lock, which a thread of the parent may have held (h5py before 3.14).
        """
        self._inherited = self._hdf5
        self._hdf5 = OrderedDict()


_live_readers: weakref.WeakSet[RowReader] = weakref.WeakSet()


def _abandon_all() -> None:
    for reader in list(_live_readers):
        reader._abandon()


os.register_at_fork(after_in_child=_abandon_all)
