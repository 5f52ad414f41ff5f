"""libhsgd_io by ctypes: rows of a file to the addresses where a batch wants them.

Owns the prototypes of io/csrc/rows.h and the three functions below, which give the GIL away while
they work. Never allocates memory for rows; whoever passes an address keeps what is there alive.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hsgd.errors

__all__ = ["END", "Addresses", "Method", "crc32c", "move_rows", "read_rows"]

END = -1  # HSGD_IO_END: the file ended before the rows did

Addresses = NDArray[np.uint64]
_Ints = NDArray[np.int64]


class _Ranges(ctypes.Structure):
    """struct hsgd_io_ranges."""

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
    )


class Method(ctypes.Structure):
    """struct hsgd_io_method: staging memory, and the alignment that O_DIRECT asks for or 1."""

    _fields_ = (
        ("staging", ctypes.c_void_p),
        ("staging_bytes", ctypes.c_int64),
        ("alignment", ctypes.c_int64),
    )


class _Outcome(ctypes.Structure):
    """struct hsgd_io_outcome."""

    _fields_ = (("calls", ctypes.c_int64), ("position", ctypes.c_int64))


def read_rows(
    file: int,
    offset: int,
    row_bytes: int,
    starts: _Ints,
    counts: _Ints,
    places: Addresses,
    method: Method,
) -> tuple[int, int, int]:
    """Rows [starts[i], starts[i] + counts[i]) of the table at byte `offset`, to `places`.

    places: one address per row, 0 for a row that nobody wants. The arrays are contiguous.
    Returns (status, system calls, byte where it stopped); status is 0, an errno value or END.
    Blocks as long as the file system does.
    """
    outcome = _Outcome()
    ranges = _Ranges(
        offset, row_bytes, len(starts), starts.ctypes.data, counts.ctypes.data, places.ctypes.data
    )
    status = _library().hsgd_io_read_rows(
        file, ctypes.byref(ranges), ctypes.byref(method), ctypes.byref(outcome)
    )
    return status, outcome.calls, outcome.position


def move_rows(rows: NDArray[Any], places: Addresses) -> None:
    """Row i of `rows` (contiguous) to address places[i], or nowhere where that is 0."""
    row_bytes = rows.nbytes // len(rows) if len(rows) else 0
    _library().hsgd_io_move_rows(rows.ctypes.data, row_bytes, len(rows), places.ctypes.data)


def crc32c(values: NDArray[Any], crc: int = 0) -> int:
    """CRC-32C of the bytes of a contiguous array, going on from `crc`."""
    return int(_library().hsgd_io_crc32c(crc, values.ctypes.data, values.nbytes))


@functools.cache
def _library() -> ctypes.CDLL:
    """Beside hsgd/errors.py: in an editable installation hsgd.io is another folder."""
    library = ctypes.CDLL(str(Path(hsgd.errors.__file__).with_name("libhsgd_io.so")))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.hsgd_io_read_rows.argtypes = [ctypes.c_int, pointer, pointer, pointer]
    library.hsgd_io_move_rows.argtypes = [pointer, count, count, pointer]
    library.hsgd_io_move_rows.restype = None
    library.hsgd_io_crc32c.argtypes = [ctypes.c_uint32, pointer, count]
    library.hsgd_io_crc32c.restype = ctypes.c_uint32
    return library
