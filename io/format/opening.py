"""Opening HDF5 files and slab folders to examine them, on disk or behind a URL."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hsgd.errors import DataError, one_line

from ..remote.metadata_file import MetadataFile, open_objects
from ..remote.object_reader import ObjectIdentity, ObjectMissing, ObjectReader
from ..remote.urls import child_url
from .file_lock import being_written, lock_shared
from .slab_folder import import_h5py, slab_name, slab_number

if TYPE_CHECKING:
    import h5py

__all__ = [
    "Folder",
    "Identity",
    "LocalFolder",
    "RemoteFolder",
    "UnknownFields",
    "examined",
    "examined_object",
    "first_line",
    "identity_of",
    "object_identity",
    "open_hdf5",
]

Identity = tuple[int, int, int] | ObjectIdentity  # of a file: size, mtime_ns, inode

_TRUNCATED = re.compile(r"truncated file: eof = (\d+).*stored_eof = (\d+)")
_LOCKINGS = (None, False, True)  # HDF5's default, never, always
_AHEAD = 64  # objects whose metadata is fetched together
# What h5py and NumPy raise for damaged names, shapes, types and sizes.
_DAMAGED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class UnknownFields(ValueError):
    """The caller named fields that the file does not have; its text is always one line."""

    def __str__(self) -> str:
        return one_line(super().__str__())


def open_hdf5(path: str, cache_bytes: int = 1 << 20) -> h5py.File:
    """Open a file read-only, with a shared lock, closed on exec; raise DataError if that fails."""
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
        raise DataError(f"{path}: not a file; name an HDF5 file or a slab folder")
    file = _open_as_here(path, cache_bytes)
    try:
        if file.id.get_intent() & import_h5py().h5f.ACC_RDWR:
            raise DataError(
                f"{path}: this program has the file open for writing, and what it has not written "
                "yet would be missing; close it first"
            )
        if file.driver == "sec2":
            descriptor = int(file.id.get_vfd_handle())
            fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            lock_shared(descriptor, path)
    except BaseException:
        file.close()
        raise
    return file


def _open_as_here(path: str, cache_bytes: int) -> h5py.File:
    """Open a file with the kind of HDF5 locks that this program already uses for it."""
    h5py = import_h5py()

    for locking in _LOCKINGS:
        try:
            return h5py.File(path, "r", locking=locking, rdcc_nbytes=cache_bytes)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; check the path, or convert the data") from None
        except OSError as error:
            if "flag values don't match" not in str(error) or locking == _LOCKINGS[-1]:
                raise DataError(_explain_open(path, error)) from None
    raise AssertionError


@contextmanager
def examined(path: Path) -> Iterator[h5py.File]:
    """Open a file; HDF5's errors for damaged metadata inside the block become DataError."""
    with _damage_as_error(path), open_hdf5(str(path)) as file:  # closing may fail as well
        yield file


@contextmanager
def examined_object(content: MetadataFile) -> Iterator[h5py.File]:
    """Open an object behind a URL; errors as for examined()."""
    h5py = import_h5py()

    try:
        try:
            file = h5py.File(content, "r")
        except OSError as error:
            raise DataError(_explain_open(content.url, error)) from None
        with _damage_as_error(content.url), file:
            yield file
    finally:
        if content.failure is not None:  # HDF5 hides this error, or goes on after it
            raise content.failure from None


@contextmanager
def _damage_as_error(path: Path | str) -> Iterator[None]:
    try:
        yield
    except (DataError, UnknownFields):
        raise
    except _DAMAGED as error:
        raise DataError(
            f"{path}: damaged: {first_line(error)}; copy or convert it again"
        ) from error


class LocalFolder:
    """A folder of a file system."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.path = folder, str(folder)

    def expect(self, slabs: int) -> int | None:
        """Return how many slabs exist, by their names; None if the folder may not be listed."""
        try:
            with os.scandir(self._folder) as entries:
                return sum(slab_number(entry.name) is not None for entry in entries)
        except PermissionError:
            return None

    def place(self, name: str) -> Path:
        """Return a file's path or URL, for messages and a SlabMap."""
        return self._folder / name

    def has(self, name: str) -> bool:
        return self.place(name).is_file()

    def examined(self, name: str) -> AbstractContextManager[h5py.File]:
        """Open an existing file; raises DataError."""
        return examined(self.place(name))

    def identity(self, name: str) -> Identity:
        return identity_of(self.place(name).stat())


class RemoteFolder:
    """A folder behind a URL; fetches many expected files at once, with the last one's pages."""

    def __init__(self, url: str, reader: ObjectReader) -> None:
        self.path, self._reader = url, reader
        self._slabs = 0
        self._ahead: dict[str, MetadataFile | None] = {}  # None: not there
        self._last: MetadataFile | None = None

    def expect(self, slabs: int) -> int | None:
        """Announce `slabs` slabs to examine in order; return None: it is unknown how many exist."""
        self._slabs = slabs
        return None

    def place(self, name: str) -> str:
        return child_url(self.path, name)

    def has(self, name: str) -> bool:
        return self._fetched(name) is not None

    def examined(self, name: str) -> AbstractContextManager[h5py.File]:
        content = self._fetched(name)
        if content is None:
            raise ObjectMissing(f"{self.place(name)}: no such object; check the URL")
        self._last = content
        return examined_object(content)

    def identity(self, name: str) -> Identity:
        content = self._fetched(name)
        assert content is not None
        return content.identity

    def _fetched(self, name: str) -> MetadataFile | None:
        if name not in self._ahead:
            at = slab_number(name)
            first = not at  # alone: the pages that are needed are still unknown
            ahead = range(at or 0, min((at or 0) + _AHEAD, self._slabs))
            names = [name] if first else [slab_name(number) for number in ahead]
            pages = () if first or self._last is None else self._last.pages
            found = open_objects([self.place(n) for n in names], self._reader, pages)
            self._ahead = dict(zip(names, found, strict=True))
        return self._ahead[name]


Folder = LocalFolder | RemoteFolder
"""The place of the files of a dataset."""


def _explain_open(path: str, error: OSError) -> str:
    truncated = _TRUNCATED.search(str(error))
    if truncated:
        have, want = truncated.groups()
        return f"{path}: truncated, bytes [{have}, {want}) are missing; copy or convert it again"
    if "already open for" in str(error):  # a mark in files of libver="latest" and SWMR
        return (
            f"{path}: a program writes it, or ended without closing it; wait until it is closed "
            "(hsgd does not read along with SWMR), or clear the mark with h5clear -s"
        )
    if "unable to lock file" in str(error):
        return being_written(path)
    if "file signature not found" in str(error):
        return f"{path}: not an HDF5 file; convert .npz and .npy with: hsgd data convert SRC DST"
    return f"{path}: cannot be opened as HDF5: {first_line(error)}"


def identity_of(status: os.stat_result) -> Identity:
    """Return size, mtime_ns and inode, which must not change while a file is in use."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def object_identity(identity: Identity) -> ObjectIdentity | None:
    """Return the identity of an object behind a URL; None for that of a file."""
    return identity if len(identity) == 2 else None


def first_line(error: BaseException) -> str:
    """Return the text of an error, cut to one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
