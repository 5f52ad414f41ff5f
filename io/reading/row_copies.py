"""libhsgd_io by ctypes: copies rows of a file to the addresses where a batch wants them.

The functions release the GIL while they work. The caller keeps the memory at the addresses alive.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..native_library import native_library

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
"""Rows of batches, for tasks with `bases`: ((batch + 1) << 32) + row; 0 is no row."""

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
    """Encode rows `row`, each below MOST_ROWS, of batches `batch`."""
    found = batch + 1
    found <<= _BATCH_SHIFT
    found += row
    return found.view(np.uint64)


def addresses_of(rows: BatchRows, bases: Addresses, base_offset: int, row_bytes: int) -> Addresses:
    """Return the addresses of `rows`, 0 for no row; `bases` are the addresses of the batches."""
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
    """Tasks (an array of TASK) that several threads share; each is done once."""

    def __init__(self, tasks: NDArray[Any], keep: Any) -> None:
        self.tasks = tasks
        self._keep = keep  # what the tasks point to
        self._batch = _Batch(tasks.ctypes.data, len(tasks), 0, 0)

    def has_work(self) -> bool:
        """Return whether there are tasks that no thread has taken; a hint while threads work."""
        return bool(self._batch.next < self._batch.count)

    def cancel(self) -> None:
        """Let threads take no more tasks; tasks under way go on."""
        self._batch.next = self._batch.count

    def work(self, staging: Staging) -> bool:
        """Do tasks until none is left; True in the thread that finished the last one; blocking.

        Results are in the tasks: `status` is 0, an errno value, END or MISMATCH.
        """
        return bool(
            native_library().hsgd_io_work(
                ctypes.byref(self._batch), staging.address, staging.nbytes
            )
        )


def move_rows(
    rows: NDArray[Any], places: Addresses, sizes: NDArray[np.int64] | None = None
) -> None:
    """Copy row i of the contiguous `rows` to address places[i]; 0 skips the row.

    `sizes` are the bytes of each row if they differ; their sum is rows.nbytes.
    """
    row_bytes = rows.nbytes // len(rows) if len(rows) else 0
    each = None if sizes is None else sizes.ctypes.data
    native_library().hsgd_io_move_rows(
        rows.ctypes.data, row_bytes, each, len(places), places.ctypes.data
    )


def crop_image(
    pixels: NDArray[np.uint8],
    part: tuple[float, float, float, float],
    to: NDArray[np.uint8],
    *,
    flip: bool,
    scratch: NDArray[np.uint64] | None,
) -> NDArray[np.uint64]:
    """Scale a part of an image to the square `to`; return memory to pass as `scratch` next time.

    `pixels` is (height, width, 3), `to` (size, size, 3), both contiguous. `part` is left, top,
    width and height in pixels; `flip` mirrors the result.
    """
    height, width, _ = pixels.shape
    left, top, wide, high = part
    if min(left, top) < 0 or max(left + wide - width, top + high - height) > 1e-6:
        raise ValueError(f"the part {part} is not inside an image of {width} x {height}")
    wide, high = min(wide, width - left), min(high, height - top)
    crop = _Crop(pixels.ctypes.data, width, left, top, wide, high, len(to), flip, to.ctypes.data)
    scale = native_library().hsgd_io_crop_image
    if scratch is None:
        scratch = np.empty(0, np.uint64)
    needed = scale(ctypes.byref(crop), scratch.ctypes.data, scratch.nbytes)
    if needed:
        scratch = np.empty(-(-needed // 8), np.uint64)
        scale(ctypes.byref(crop), scratch.ctypes.data, scratch.nbytes)
    return scratch


def crc32c(values: NDArray[Any], crc: int = 0) -> int:
    """Return the CRC-32C of the bytes of a contiguous array, continued from `crc`."""
    return int(native_library().hsgd_io_crc32c(crc, values.ctypes.data, values.nbytes))
