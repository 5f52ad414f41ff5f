"""lock_shared: HDF5's shared lock on a file that is read, against programs that write it.

It is held while the descriptor is open; any number of readers can hold it at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings

from hsgd.errors import DataError

__all__ = ["being_written", "lock_shared"]

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_warned = False


def lock_shared(descriptor: int, path: str) -> None:
    """Take the lock; local, never waits. Raises DataError if another program writes the file.

    If the file system has no locks, one warning per process says so. HDF5_USE_FILE_LOCKING has the
    same effect as in HDF5: FALSE takes no lock, BEST_EFFORT leaves out the warning.
    """
    global _warned
    wanted = os.environ.get("HDF5_USE_FILE_LOCKING", "").upper()
    if wanted in ("FALSE", "0"):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(being_written(path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise DataError(f"{path}: cannot be locked: {error.strerror}") from error
        if wanted != "BEST_EFFORT" and not _warned:
            _warned = True
            warnings.warn(
                f"{path}: this file system has no locks ({error.strerror}), so nobody would notice "
                "a program that still writes the file; HDF5_USE_FILE_LOCKING=FALSE says that it is "
                "known",
                stacklevel=2,
            )


def being_written(path: str) -> str:
    """Return the message for a file that another program has open for writing."""
    return (
        f"{path}: is being written by another program, and rows may be missing; wait until it has "
        "closed the file"
    )
