"""Errors that name the file whose contents need more memory than there is."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from hsgd.errors import DataError

__all__ = ["claimed_memory"]


@contextmanager
def claimed_memory(path: str, what: str, nbytes: int) -> Iterator[None]:
    """Turn errors of allocating `nbytes` bytes for `what` of a file, in the block, to DataError."""
    try:
        yield
    except (MemoryError, OSError, OverflowError, ValueError) as error:
        other = isinstance(error, ValueError) and type(error) is not ValueError
        if other or (isinstance(error, OSError) and error.errno != errno.ENOMEM):
            raise
        raise DataError(
            f"{path}: {what} needs {nbytes} bytes of memory at once, which are not there; restore "
            "the file if that is not its size, or rewrite it in smaller parts"
        ) from None
