"""A folder that is written under a hidden name beside its target, and renamed when it is complete.

.NAME.part beside the target NAME holds data/ (the future target), conversion.json (what is being
converted) and one journal per rank and part. From these a conversion that was killed continues.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsgd.errors import DataError

from ..format.slab_folder import is_slab_folder

__all__ = [
    "Journal",
    "Position",
    "Staged",
    "check_target",
    "staged_folder",
    "sync_file",
    "sync_folder",
]

_OWN_FILES = re.compile(r"(index|slab-\d{5,})\.h5")
_JOURNALS = "journal-*.json"


@dataclass(frozen=True)
class Position:
    """The progress of one rank with its slabs of one part."""

    field: int = 0  # number of fields that are done
    digests: tuple[str, ...] = ()  # of these fields
    row: int = 0  # rows of the current field that were appended to their slabs
    chain: str = ""  # digest of these rows
    ordered: int = 0  # slabs of this field that are in their final order
    touched: int = 0  # slabs from `ordered` up to this one may be ordered in part


class Journal:
    """The Position of one rank on disk: one file, always replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Position | None:
        """Return the position saved last; None if there is none."""
        try:
            values = json.loads(self._path.read_text())
            return Position(**{**values, "digests": tuple(values["digests"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def save(self, position: Position) -> None:
        """Save a position; the data that it describes must be on disk already."""
        _write_whole(self._path, asdict(position))


@dataclass(frozen=True)
class Staged:
    """A folder that becomes the target, shared by all ranks that write into it."""

    folder: Path
    dataset_uuid: str

    def journal(self, part: str, rank: int) -> Journal:
        """Return the journal of a rank for one part of the folder."""
        return Journal(self.folder.parent / _JOURNALS.replace("*", f"{part or 'all'}-{rank}"))


@contextmanager
def staged_folder(
    target: Path, settings: Mapping[str, Any], *, overwrite: bool = False
) -> Iterator[Staged]:
    """Make a hidden folder that becomes `target` if the block ends without error.

    `settings` are plain values that determine what is written. A hidden folder with equal settings,
    left by a process that was killed, is used again, with its uuid and journals; any other is
    removed. If the block fails, the hidden folder is removed, unless a journal was saved: then it
    stays for the next attempt, and the error says so.

    With `overwrite` an existing target is replaced once the new folder is complete, but only if it
    holds nothing but slab folders. Raises DataError if it exists otherwise, another process writes
    to it, or writing inside the block fails.
    """
    target = Path(target).absolute()
    check_target(target, overwrite)
    hidden = target.parent / f".{target.name}.part"
    kept = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(hidden, target):
            published = False
            try:
                staged = _take_up(hidden, json.loads(json.dumps(settings)))
                yield staged
                _publish(staged.folder, target, overwrite)
                published = True
            finally:
                kept = not published and any(hidden.glob(_JOURNALS))
                if not kept:
                    shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        if isinstance(error, DataError) and not kept:
            raise
        reason = str(error)
        if not isinstance(error, DataError):
            remedy = "; free space or choose another disk" if error.errno == errno.ENOSPC else ""
            reason = f"cannot write {error.filename or target}: {error.strerror or error}{remedy}"
        if kept:
            reason += f"; the same command goes on from here ({hidden})"
        raise DataError(reason) from error


@contextmanager
def _alone_in(folder: Path, target: Path) -> Iterator[None]:
    """Make the folder if it is missing, and lock it against other processes during the block."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"another process is converting to {target}; wait for it, or choose another name"
            ) from None
        except OSError:
            pass  # not every file system has locks
        yield
    finally:
        os.close(descriptor)


def _take_up(hidden: Path, settings: Mapping[str, Any]) -> Staged:
    """Return what a killed process left of the same conversion, or a new folder."""
    note, data = hidden / "conversion.json", hidden / "data"
    try:
        found = json.loads(note.read_text())
        if found["settings"] == settings and data.is_dir():
            return Staged(data, found["dataset_uuid"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        pass
    for entry in hidden.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    data.mkdir()
    dataset_uuid = uuid.uuid4().hex
    _write_whole(note, {"settings": settings, "dataset_uuid": dataset_uuid})
    return Staged(data, dataset_uuid)


def _publish(data: Path, target: Path, overwrite: bool) -> None:
    sync_folder(data)
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    try:
        if target.exists():
            check_target(target, overwrite)
            target.rename(old)
        data.rename(target)
    except OSError:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """Raise DataError if a new folder must not replace `target`."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise DataError(f"{target} exists and is not a folder; choose another name")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise DataError(f"{target} exists; choose another name or replace it with --overwrite")
    for entry in target.rglob("*"):
        own = _OWN_FILES.fullmatch(entry.name) and is_slab_folder(entry.parent)
        if not own and not entry.is_dir():
            raise DataError(f"{target} holds {entry}, which is no slab: not replaced, move it away")


def _write_whole(path: Path, values: Mapping[str, Any]) -> None:
    """Write a small file to disk so that it is either complete or as before."""
    fresh = path.with_suffix(".new")
    with open(fresh, "w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Flush a file's data to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
