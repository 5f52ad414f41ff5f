"""BlockFiles: blocks of objects as files in one folder, complete and checked, within a limit.

The folder serves several processes at once, each of which may be killed at any point:

    hsgd-ledger   bytes of all files, or more; locked by whoever adds a file
    tmp-*         a block that is being written, locked by its writer; otherwise a leftover
    ab/cdef...    a block, by the SHA-256 of its identity

Files with other names are never removed. A folder or a ledger of another user, who could insert
wrong blocks, is never used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import threading
import time
import warnings
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["BlockFiles", "DiskOptions"]

# Each page has a checksum, so small ranges need not read a whole block.
_PAGE_BYTES = 64 << 10
# Magic, key, bytes; then the checksums of pages, and one of all this.
_HEADER = struct.Struct("<8s32sQ")
_MAGIC = b"hsgdblk1"
_CHECKSUM = struct.Struct("<I")
_LEDGER, _USED = "hsgd-ledger", struct.Struct("<8sQ")
_LEDGER_MAGIC = b"hsgdldg1"
_TEMPORARY = re.compile(r"tmp-[0-9a-f]{16}")
_SHARD, _BLOCK = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{62}")
_LOCK_S, _POLL_S = 1.0, 0.002  # longest wait for the ledger; then nothing is kept for _FULL_S
_SPARE = 16  # 1 / 16 of the limit is freed at once, as the folder must be listed for it
_FULL_S = 30.0  # pause after the folder was full, or its ledger locked
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.EINTR})

Found = Literal["here", "missing", "damaged"]


@dataclass(frozen=True)
class DiskOptions:
    """Options of the cache on disk."""

    folder: str  # made if it does not exist
    limit_bytes: int  # of all files
    since_ns: int = field(default_factory=time.time_ns)  # blocks used later are not removed
    block_bytes: int = 1 << 20  # of each block except for the last of an object


class BlockFiles:
    """The blocks in a folder, by a key of 32 bytes; for several threads.

    If there is no more room, the least recently used blocks are removed, but none that was used
    after since_ns: otherwise a dataset larger than the limit would remove its own blocks before it
    uses them again. A folder that cannot be used raises ValueError if `required`; otherwise it
    gives a warning, and nothing is kept.
    """

    def __init__(self, options: DiskOptions, *, required: bool = True) -> None:
        self._folder, self._options = options.folder, options
        self._lock = threading.Lock()  # one thread at a time waits for the ledger
        self._off = self._untrusted = False
        self._full_until = 0.0
        try:
            self._prepare_folder()
        except ValueError as error:
            if required:
                raise
            self._untrusted = True
            self._turn_off(str(error))

    @property
    def keeps(self) -> bool:
        """True if write() would try to keep a block."""
        return not self._off and time.monotonic() >= self._full_until

    def read(self, key: bytes, nbytes: int, start: int, out: memoryview) -> Found:
        """Fill `out` with bytes from `start` on of a block of `nbytes`, or leave it as it is."""
        if self._untrusted:
            return "missing"
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._path(key), flags)
        except OSError:
            return "missing"
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if regular and _read_checked(descriptor, key, nbytes, start, out):
                now = time.time_ns()
                with contextlib.suppress(PermissionError):  # a file of another user
                    os.utime(descriptor, ns=(now, now))
                return "here"
        except OSError:
            pass  # a disk that fails
        finally:
            os.close(descriptor)
        return "damaged"

    def write(self, key: bytes, block: memoryview) -> None:
        """Keep a block if there is room; after a disk error warn once and keep nothing more."""
        if not self.keeps:
            return
        header = _header(key, block)
        try:
            with self._reserved(len(header) + len(block)) as file:
                if file is not None:
                    descriptor, temporary = file
                    _write_all(descriptor, [header, block])
                    now = time.time_ns()
                    os.utime(descriptor, ns=(now, now))
                    self._rename(temporary, self._path(key))
        except OSError as error:
            if error.errno in _PASSING:
                self._pause()
            else:
                self._turn_off(error.strerror or str(error))

    def remove(self, key: bytes) -> bool:
        """Drop a block; return whether it was there."""
        try:
            os.unlink(self._path(key))
        except OSError:
            return False
        return True

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name[2:]}"

    def _prepare_folder(self) -> None:
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            status = os.stat(self._folder)
            if (reason := _refusal(status)) is not None:
                raise ValueError(
                    f"disk_cache={self._folder!r}: the folder {reason}, who could change what is "
                    "in it; use a folder of your own, with mode 700"
                )
            with self._locked() as ledger:
                for name in [] if ledger is None else os.listdir(self._folder):
                    if _TEMPORARY.fullmatch(name):
                        _remove_leftover(f"{self._folder}/{name}")
        except OSError as error:
            if error.errno in _PASSING:
                self._pause()
                return
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise ValueError(
                    f"disk_cache={self._folder!r}: cannot be used: {error.strerror}; name a folder "
                    "that can be written"
                ) from None
            self._turn_off(error.strerror or str(error))

    @contextlib.contextmanager
    def _reserved(self, nbytes: int) -> Iterator[tuple[int, str] | None]:
        """Yield descriptor and path of a new, locked file, or None; remove it unless renamed."""
        temporary = f"{self._folder}/tmp-{secrets.token_hex(8)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        descriptor = -1
        try:
            with self._locked() as ledger:
                if ledger is None:
                    self._pause()
                elif self._make_room(ledger, nbytes):
                    descriptor = os.open(temporary, flags, 0o600)
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.ftruncate(descriptor, nbytes)  # its bytes count from now on
            yield None if descriptor < 0 else (descriptor, temporary)
        finally:
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                os.close(descriptor)

    def _rename(self, temporary: str, path: str) -> None:
        try:
            os.rename(temporary, path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.rename(temporary, path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int | None]:
        """Lock the ledger for this thread; yield its descriptor, or None after _LOCK_S."""
        end = time.monotonic() + _LOCK_S
        if not self._lock.acquire(timeout=_LOCK_S):
            yield None
            return
        try:
            ledger = self._open_ledger()
            try:
                yield ledger if _flock(ledger, end) else None
            finally:
                fcntl.flock(ledger, fcntl.LOCK_UN)  # also if a fork has copied the descriptor
                os.close(ledger)
        finally:
            self._lock.release()

    def _open_ledger(self) -> int:
        """Return a new descriptor of the ledger: a forked child shares locks of inherited ones."""
        path = f"{self._folder}/{_LEDGER}"
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        ledger = os.open(path, flags, 0o600)
        status = os.fstat(ledger)
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        magic = os.pread(ledger, len(_LEDGER_MAGIC), 0) if own and status.st_nlink == 1 else b"?"
        if magic not in (b"", _LEDGER_MAGIC):
            os.close(ledger)
            raise PermissionError(errno.EPERM, f"{path} is not a ledger that this user has made")
        return ledger

    def _pause(self) -> None:
        self._full_until = time.monotonic() + _FULL_S

    def _make_room(self, ledger: int, nbytes: int) -> bool:
        """Count a new file in the ledger before it is made; return False if there is no room."""
        limit = self._options.limit_bytes
        stored = os.pread(ledger, _USED.size, 0)
        used = _USED.unpack(stored)[1] if len(stored) == _USED.size else limit
        if used + nbytes > limit:
            used = self._free(limit - nbytes)
        fits = bool(used + nbytes <= limit)
        os.pwrite(ledger, _USED.pack(_LEDGER_MAGIC, used + nbytes if fits else used), 0)
        if not fits:
            self._pause()
        return fits

    def _free(self, most: int) -> int:
        """Remove the least recently used blocks above `most` bytes; return the bytes left."""
        used, blocks = self._survey()
        if used <= most:
            return used
        least = most - self._options.limit_bytes // _SPARE
        for used_ns, nbytes, path in sorted(blocks):
            if used <= least or used_ns >= self._options.since_ns:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= nbytes
        return used

    def _survey(self) -> tuple[int, list[tuple[int, int, str]]]:
        """Return the bytes of all files, and (last use, bytes, path) by block; remove leftovers."""
        used = 0
        blocks: list[tuple[int, int, str]] = []
        # Temporary files first: one that is renamed meanwhile counts twice, not never.
        for name in filter(_TEMPORARY.fullmatch, os.listdir(self._folder)):
            used += _remove_leftover(f"{self._folder}/{name}")
        for name in filter(_SHARD.fullmatch, os.listdir(self._folder)):
            with os.scandir(f"{self._folder}/{name}") as entries:
                for entry in entries:
                    if _BLOCK.fullmatch(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            blocks.append((status.st_mtime_ns, status.st_size, entry.path))
        return used + sum(nbytes for _, nbytes, _ in blocks), blocks

    def _turn_off(self, reason: str) -> None:
        with self._lock:
            before, self._off = self._off, True
        if not before:
            warnings.warn(
                f"{self._folder}: the disk cache keeps nothing more in this process: "
                f"{reason}; the data comes from the server",
                stacklevel=2,
            )


def _refusal(status: os.stat_result) -> str | None:
    """Return why a folder cannot be trusted; None if it can."""
    if status.st_mode & stat.S_IWOTH:
        return f"can be written by all users (mode {stat.S_IMODE(status.st_mode):o})"
    if status.st_uid != os.geteuid():
        return f"belongs to another user ({status.st_uid}, this is {os.geteuid()})"
    return None


def _flock(descriptor: int, end: float) -> bool:
    """Lock a file; return False if that fails until `end` (of time.monotonic)."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)


def _remove_leftover(path: str) -> int:
    """Remove a temporary file without a writer; return the bytes of one that has a writer."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return 0
    except BlockingIOError:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _header(key: bytes, block: memoryview) -> bytes:
    pages = range(0, len(block), _PAGE_BYTES)
    checksums = array("I", (zlib.crc32(block[low : low + _PAGE_BYTES]) for low in pages))
    header = _HEADER.pack(_MAGIC, key, len(block)) + checksums.tobytes()
    return header + _CHECKSUM.pack(zlib.crc32(header))


def _read_checked(descriptor: int, key: bytes, nbytes: int, start: int, out: memoryview) -> bool:
    """Fill `out` from an open block; return False if the block is damaged."""
    header_bytes = _HEADER.size + _CHECKSUM.size * (-(-nbytes // _PAGE_BYTES) + 1)
    header = os.pread(descriptor, header_bytes, 0)
    body, checksum = header[: -_CHECKSUM.size], header[-_CHECKSUM.size :]
    if len(header) != header_bytes or checksum != _CHECKSUM.pack(zlib.crc32(body)):
        return False
    if _HEADER.unpack_from(body) != (_MAGIC, key, nbytes):
        return False
    checksums = array("I", body[_HEADER.size :])
    low = start // _PAGE_BYTES * _PAGE_BYTES
    stop = min(-(-(start + len(out)) // _PAGE_BYTES) * _PAGE_BYTES, nbytes)
    pages = memoryview(bytearray(stop - low))
    if os.preadv(descriptor, [pages], header_bytes + low) != len(pages):
        return False
    for at in range(0, len(pages), _PAGE_BYTES):
        if zlib.crc32(pages[at : at + _PAGE_BYTES]) != checksums[(low + at) // _PAGE_BYTES]:
            return False
    out[:] = pages[start - low : start - low + len(out)]
    return True


def _write_all(descriptor: int, parts: list[bytes | memoryview]) -> None:
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]
