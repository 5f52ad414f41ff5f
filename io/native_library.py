"""native_library: loads libhsgd_io, whose functions release the GIL while they work."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import hsgd.errors

__all__ = ["native_library"]


@functools.cache
def native_library() -> ctypes.CDLL:
    """Load the library beside hsgd/errors.py; an editable installation has hsgd.io elsewhere."""
    library = ctypes.CDLL(str(Path(hsgd.errors.__file__).with_name("libhsgd_io.so")))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.hsgd_io_work.argtypes = [pointer, pointer, count]
    library.hsgd_io_move_rows.argtypes = [pointer, count, pointer, count, pointer]
    library.hsgd_io_move_rows.restype = None
    library.hsgd_io_crc32c.argtypes = [ctypes.c_uint32, pointer, count]
    library.hsgd_io_crc32c.restype = ctypes.c_uint32
    library.hsgd_io_crop_image.argtypes = [pointer, pointer, count]
    library.hsgd_io_crop_image.restype = count
    library.hsgd_io_lzf.argtypes = [pointer, count, pointer, count]
    library.hsgd_io_lzf.restype = count
    library.hsgd_io_fletcher32.argtypes = [pointer, count]
    library.hsgd_io_fletcher32.restype = ctypes.c_uint32
    library.hsgd_io_unshuffle.argtypes = [pointer, count, count, pointer]
    library.hsgd_io_unshuffle.restype = None
    library.hsgd_io_array_form.argtypes = [
        *(ctypes.c_int, count, ctypes.c_uint64, ctypes.c_char_p),
        *(pointer, count, pointer),
    ]
    library.hsgd_io_array_form.restype = count
    library.hsgd_io_find_arrays.argtypes = [pointer, pointer, count, pointer, pointer]
    library.hsgd_io_find_arrays.restype = None
    return library
