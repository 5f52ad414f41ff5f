"""The open files of a dataset: file descriptors for preadv, shared by threads, few at a time."""

from __future__ import annotations

import fcntl
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from hsgd.base.forked import in_forked_child
from hsgd.errors import DataError

from ..format.data_map import DataMap, SlabMap
from ..format.file_lock import lock_shared
from ..format.opening import Identity, identity_of, object_identity

__all__ = ["SECTOR_BYTES", "SlabFiles", "check_file", "descriptor_limit"]

SECTOR_BYTES = 4096  # alignment for O_DIRECT that suits every disk
_OPEN_FILES = 64  # besides those in use


def descriptor_limit() -> int:
    """Return how many files this process may have open, ulimit -n."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


@dataclass
class _File:
    descriptor: int
    alignment: int
    users: int = 0


class SlabFiles:
    """File descriptors of slabs, for several threads; empty in a forked child.

    With `direct` files are opened with O_DIRECT, past the page cache; `direct_refusal` says why a
    file was not.
    """

    def __init__(self, data: DataMap, *, direct: bool = False) -> None:
        self.data = data
        self.direct_refusal = f"{data.path} is no file" if direct and data.access else ""
        self._direct = direct and data.access is None
        self._forget()
        in_forked_child(self, SlabFiles._abandon)

    def acquire(self, number: int) -> tuple[int, int]:
        """Return a slab's descriptor and the alignment for reads, until release().

        Raises DataError if the file cannot be opened, or has changed since it was examined.
        """
        slab = self.data.slabs[number]
        with self._lock:
            file = self._files.get(slab.path)
            if file is None:
                self._make_room()
                file = self._files[slab.path] = self._open(slab)
            self._files.move_to_end(slab.path)
            _check_unchanged(slab.path, slab.identity, os.fstat(file.descriptor))
            file.users += 1
            return file.descriptor, file.alignment

    def release(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                if (file := self._files.get(self.data.slabs[number].path)) is not None:
                    file.users -= 1

    def leave_direct(self, reason: str) -> None:
        """Read through the page cache from now on, also with descriptors in use."""
        with self._lock:
            self._direct = False
            self.direct_refusal = self.direct_refusal or reason
            for file in self._files.values():
                flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
                fcntl.fcntl(file.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                file.alignment = 1

    def close(self) -> None:
        """Close all files; no thread may read any more."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1].descriptor)

    def _make_room(self) -> None:
        most = min(_OPEN_FILES, max(4, descriptor_limit() // 32))
        if len(self._files) < most:
            return
        unused = [path for path, file in self._files.items() if not file.users]
        for path in unused[: len(self._files) - most + 1]:
            os.close(self._files.pop(path).descriptor)

    def _open(self, slab: SlabMap) -> _File:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: never wait for a pipe
        file = None
        if self._direct:
            try:
                file = _File(os.open(slab.path, flags | os.O_DIRECT), SECTOR_BYTES)
            except OSError as error:
                self._direct = False
                self.direct_refusal = f"{slab.path}: {error.strerror}"
        try:
            file = file or _File(os.open(slab.path, flags), 1)
        except OSError as error:
            raise DataError(f"{slab.path}: cannot be opened: {error.strerror}") from error
        if self.data.header is None:  # nobody writes sealed slabs
            try:
                lock_shared(file.descriptor, slab.path)
            except BaseException:
                os.close(file.descriptor)
                raise
        return file

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()

    def _abandon(self) -> None:
        """Close the copies of the descriptors in a forked child, without the parent's lock."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._forget()


def check_file(path: str, identity: Identity) -> None:
    """Raise DataError if the file at `path` is no longer the one that was examined."""
    if object_identity(identity) is None:  # requests for objects send the ETag instead
        _check_unchanged(path, identity, os.stat(path))


def _check_unchanged(path: str, identity: Identity, status: os.stat_result) -> None:
    """Raise DataError if a file differs from the `identity` that it had when it was examined."""
    size = identity[0]
    if status.st_size < size:
        raise DataError(
            f"{path}: truncated since it was opened, bytes [{status.st_size}, {size}) are "
            "missing; copy or convert it again"
        )
    if identity_of(status) != identity:
        raise DataError(
            f"{path}: changed since it was opened (size, mtime_ns, inode: {identity}, "
            f"now {identity_of(status)}); open the dataset again"
        )
