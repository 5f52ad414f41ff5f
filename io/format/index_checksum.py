"""The checksum at the end of index.h5, as HDF5 has none for the maps of virtual datasets.

These 16 bytes lie after all that HDF5 uses: MAGIC, then the CRC-32 of all bytes before,
little-endian. HDF5 2.0 crashes when it opens a virtual dataset with a damaged map, so the file is
checked first. A program that changes the file through HDF5 cuts the checksum off.
"""

from __future__ import annotations

import os
import zlib
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

from hsgd.errors import DataError

from .slab_folder import INDEX_NAME

__all__ = ["append_checksum", "check_index", "check_index_stream", "unchecked_index"]

MAGIC = b"hsgd-crc-32\n"
_BYTES = len(MAGIC) + 4
_PART = 1 << 20


def append_checksum(path: Path) -> None:
    """Append the checksum to a complete file. Raises OSError."""
    with open(path, "r+b") as file:
        checksum = _checksum(file, file.seek(0, os.SEEK_END))
        file.seek(0, os.SEEK_END)
        file.write(MAGIC + checksum.to_bytes(4, "little"))


def check_index(path: Path) -> bool:
    """Read a file and return whether it has a checksum; blocking.

    Raises DataError if the checksum is wrong or the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return check_index_stream(file, str(path))
    except DataError:  # an OSError as well
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def unchecked_index(folder: str) -> list[str]:
    """Return a line if a slab folder's index has no checksum. Raises as check_index()."""
    path = Path(folder) / INDEX_NAME
    if check_index(path):
        return []
    return [
        f"{path}: not checked, it has no checksum: another program has changed it, or an older "
        "hsgd made it; convert the data again to have one"
    ]


def check_index_stream(file: BinaryIO | RawIOBase, where: str) -> bool:
    """Check an open file like check_index()."""
    end = file.seek(0, os.SEEK_END) - _BYTES
    if end < 0:
        return False
    file.seek(end)
    found = file.read(_BYTES) or b""
    if not found.startswith(MAGIC):
        return False
    wanted, checksum = int.from_bytes(found[len(MAGIC) :], "little"), _checksum(file, end)
    if checksum != wanted:
        raise DataError(
            f"{where}: damaged, its checksum is {checksum:08x} and should be {wanted:08x}; restore "
            "this file, or convert the data again"
        )
    return True


def _checksum(file: BinaryIO | RawIOBase, count: int) -> int:
    file.seek(0)
    checksum = 0
    while count > 0 and (part := file.read(min(count, _PART))):
        checksum = zlib.crc32(part, checksum)
        count -= len(part)
    return checksum
