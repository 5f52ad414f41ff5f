"""libhsgd_io by ctypes: rows of a file to the addresses where a batch wants them.

The functions give the GIL away while they work. Whoever passes an address keeps what is there
alive.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hsgd.errors

__all__ = [
    "END",
    "MISMATCH",
    "MOST_ROWS",
    "TASK",
    "Addresses",
    "BatchRows",
    "Staging",
    "TaskBatch",
    "addresses_of",
    "batch_rows",
    "crc32c",
    "crop_image",
    "move_rows",
]

END = -1  # HSGD_IO_END: the file ended before the rows did
MISMATCH = -2  # HSGD_IO_MISMATCH: a checksum is wrong

Addresses = NDArray[np.uint64]
BatchRows = NDArray[np.uint64]
"""Rows of batches, as tasks with `bases` take them: ((batch + 1) << 32) + row; 0 is none."""

_BATCH_SHIFT = 32
MOST_ROWS = 1 << _BATCH_SHIFT  # of a batch

# struct hsgd_io_task; starts, counts, places, bases, sizes, memory and checksums are addresses.
TASK = np.dtype(
    [
        ("offset", "i8"),
        ("row_bytes", "i8"),
        ("ranges", "i8"),
        ("starts", "u8"),
        ("counts", "u8"),
        ("places", "u8"),
        ("bases", "u8"),
        ("base_offset", "u8"),
        ("sizes", "u8"),
        ("memory", "u8"),
        ("checksums", "u8"),
        ("alignment", "i8"),
        ("file", "i4"),
        ("status", "i4"),
        ("calls", "i8"),
        ("position", "i8"),
        ("slept", "i8"),
    ]
)


def batch_rows(batch: NDArray[np.int64], row: NDArray[np.int64]) -> BatchRows:
    """Return row row[i], below MOST_ROWS, of batch batch[i]."""
    found = batch + 1
    found <<= _BATCH_SHIFT
    found += row
    return found.view(np.uint64)


def addresses_of(rows: BatchRows, bases: Addresses, base_offset: int, row_bytes: int) -> Addresses:
    """Return where these rows lie in memory; 0 for none. bases: addresses of the batches."""
    batch = (rows >> np.uint64(_BATCH_SHIFT)).astype(np.int64) - 1
    row = rows & np.uint64(MOST_ROWS - 1)
    found: Addresses = bases[batch] + np.uint64(base_offset) + row * np.uint64(row_bytes)
    found[batch < 0] = 0
    return found


class _Batch(ctypes.Structure):
    """struct hsgd_io_batch."""

    _fields_ = (
        ("tasks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("finished", ctypes.c_int64),
    )


class _Crop(ctypes.Structure):
    """struct hsgd_io_crop."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("row_pixels", ctypes.c_int64),
        ("left", ctypes.c_double),
        ("top", ctypes.c_double),
        ("width", ctypes.c_double),
        ("height", ctypes.c_double),
        ("size", ctypes.c_int64),
        ("flip", ctypes.c_int64),
        ("to", ctypes.c_void_p),
    )


class Staging:
    """Page-aligned memory of one thread, for small rows, unaligned ends and checks."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class TaskBatch:
    """Tasks (an array of TASK) that several threads do together, each once.

    keep: what the tasks point at, kept alive with them.
    """

    def __init__(self, tasks: NDArray[Any], keep: Any) -> None:
        self.tasks = tasks
        self._keep = keep
        self._batch = _Batch(tasks.ctypes.data, len(tasks), 0, 0)

    def has_work(self) -> bool:
        """Return whether some task was taken by nobody yet; a hint while threads are at work."""
        return bool(self._batch.next < self._batch.count)

    def cancel(self) -> None:
        """Let no more tasks be taken; those under way go on."""
        self._batch.next = self._batch.count

    def work(self, staging: Staging) -> bool:
        """Do tasks until none is left; True for the thread that finished the last of all.

        Blocks as long as the file system does. Results are in the tasks: status is 0, an errno
        value, END or MISMATCH.
        """
        return bool(
            _library().hsgd_io_work(ctypes.byref(self._batch), staging.address, staging.nbytes)
        )


def move_rows(
    rows: NDArray[Any], places: Addresses, sizes: NDArray[np.int64] | None = None
) -> None:
    """Copy row i of `rows` (contiguous) to address places[i], or nowhere if that is 0.

    sizes: bytes of each row where they differ; together they are those of `rows`.
    """
    row_bytes = rows.nbytes // len(rows) if len(rows) else 0
    each = None if sizes is None else sizes.ctypes.data
    _library().hsgd_io_move_rows(rows.ctypes.data, row_bytes, each, len(places), places.ctypes.data)


def crop_image(
    pixels: NDArray[np.uint8],
    part: tuple[float, float, float, float],
    to: NDArray[np.uint8],
    *,
    flip: bool,
    scratch: NDArray[np.uint64] | None,
) -> NDArray[np.uint64]:
    """Scale `part` (left, top, width, height) of an image to `to`, mirrored with flip; both are
    contiguous, of 3 bytes to a pixel, and `to` is a square. Returns memory to pass as `scratch`.
    """
    height, width, _ = pixels.shape
    left, top, wide, high = part
    if min(left, top) < 0 or max(left + wide - width, top + high - height) > 1e-6:
        raise ValueError(f"the part {part} is not inside an image of {width} x {height}")
    wide, high = min(wide, width - left), min(high, height - top)
    crop = _Crop(pixels.ctypes.data, width, left, top, wide, high, len(to), flip, to.ctypes.data)
    scale = _library().hsgd_io_crop_image
    if scratch is None:
        scratch = np.empty(0, np.uint64)
    needed = scale(ctypes.byref(crop), scratch.ctypes.data, scratch.nbytes)
    if needed:
        scratch = np.empty(-(-needed // 8), np.uint64)
        scale(ctypes.byref(crop), scratch.ctypes.data, scratch.nbytes)
    return scratch


def crc32c(values: NDArray[Any], crc: int = 0) -> int:
    """CRC-32C of the bytes of a contiguous array, going on from `crc`."""
    return int(_library().hsgd_io_crc32c(crc, values.ctypes.data, values.nbytes))


@functools.cache
def _library() -> ctypes.CDLL:
    """Beside hsgd/errors.py: in an editable installation hsgd.io is another folder."""
    library = ctypes.CDLL(str(Path(hsgd.errors.__file__).with_name("libhsgd_io.so")))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.hsgd_io_work.argtypes = [pointer, pointer, count]
    library.hsgd_io_move_rows.argtypes = [pointer, count, pointer, count, pointer]
    library.hsgd_io_move_rows.restype = None
    library.hsgd_io_crc32c.argtypes = [ctypes.c_uint32, pointer, count]
    library.hsgd_io_crc32c.restype = ctypes.c_uint32
    library.hsgd_io_crop_image.argtypes = [pointer, pointer, count]
    library.hsgd_io_crop_image.restype = count
    return library
