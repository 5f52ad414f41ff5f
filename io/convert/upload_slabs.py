"""Upload of a slab folder to S3: slabs first, the index last, so it is complete or not there."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hsgd.errors import DataError

from ..format.slab_folder import INDEX_NAME, is_slab_folder, slab_name
from ..layouts.open_map import open_map
from ..remote.object_writer import ObjectWriter, StoredObject, UnseenObject, md5_of
from ..remote.urls import child_url, is_url, names_a_file, url_of
from .progress import Advance, Progress

__all__ = ["Uploaded", "check_target", "upload_slabs"]


@dataclass(frozen=True)
class Uploaded:
    """The result of an upload."""

    sent: int  # objects
    sent_bytes: int  # of these objects
    kept: int  # objects that were there already and equal


def check_target(url: str, *, overwrite: bool = False, retry_s: float = 60.0) -> None:
    """Raise ValueError or DataError if no new dataset can be sent to this URL; blocking."""
    writer, index = ObjectWriter(retry_s), child_url(_target_of(url), INDEX_NAME)
    writer.check(index)
    if not overwrite and writer.find(index, unseen_is_absent=False) is not None:
        raise _taken(url)


def upload_slabs(
    folder: str | os.PathLike[str],
    url: str,
    *,
    overwrite: bool = False,
    threads: int = 8,
    retry_s: float = 60.0,
    progress: bool = False,
) -> Uploaded:
    """Send a slab folder to s3://BUCKET/PREFIX; local, blocking.

    Slabs are sent first and the index last. Until then there is no dataset at the URL; with
    overwrite the old one is gone, too. Objects with the same size and MD5 are not sent again, so
    after a kill the same call continues. Two calls may send the same folder at the same time. If
    two calls send different folders to one URL and their slabs get mixed, one or both fail.

    Args:
        folder: a slab folder.
        url: s3://BUCKET/PREFIX.
        overwrite: replace another dataset at this URL, and remove slabs beyond the new number.
        threads: files sent at once; each needs 16 MiB of memory.
        retry_s: how long a failing request is repeated.
        progress: show a bar on stderr.

    Raises:
        DataError: the folder is damaged or was not converted, another dataset is at the URL, or S3
            refuses a request.
        ValueError: bad arguments.
        MissingExtra: botocore is missing.
    """
    target = _target_of(url)
    if threads < 1 or not (retry_s >= 0 and math.isfinite(retry_s)):
        raise ValueError(f"threads={threads}, retry_s={retry_s}; use at least 1, and seconds")
    home = Path(folder).absolute()
    if is_url(folder) or not is_slab_folder(home):
        raise DataError(f"{folder} is not a slab folder; make one: hsgd data convert SRC DST")
    slabs = [slab.path for slab in open_map(home).slabs]
    index = str(home / INDEX_NAME)
    writer = ObjectWriter(retry_s)
    total = sum(os.stat(path).st_size for path in [*slabs, index])
    with Progress(total, f"upload {folder}", show=progress) as advance:
        upload = _Upload(writer, target, advance)
        if upload.is_other(index, unseen_is_absent=overwrite):
            if not overwrite:
                raise _taken(url)
            writer.remove(child_url(target, INDEX_NAME))
        with ThreadPoolExecutor(min(threads, len(slabs)), "hsgd-upload") as pool:
            try:
                list(pool.map(upload.bring, slabs))
                upload.check(slabs, list(pool.map(upload.look, slabs)))
                upload.bring(index)
                if overwrite:
                    upload.remove_beyond(len(slabs))
                upload.check([*slabs, index], list(pool.map(upload.look, [*slabs, index])))
            except BaseException:
                writer.stop()
                pool.shutdown(cancel_futures=True)
                raise
    return Uploaded(upload.sent, upload.sent_bytes, upload.kept)


def _taken(url: str) -> DataError:
    return DataError(
        f"{url}: there is another dataset already; replace it with --overwrite (overwrite=True), "
        "or use another URL"
    )


class _Upload:
    """The files of one upload, and what was done so far."""

    def __init__(self, writer: ObjectWriter, target: str, advance: Advance) -> None:
        self.sent = self.sent_bytes = self.kept = 0
        self._writer, self._target, self._show = writer, target, advance
        self._brought: dict[str, StoredObject] = {}
        self._lock = threading.Lock()

    def look(self, path: str) -> StoredObject | UnseenObject | None:
        """Return the object at a file's URL; an UnseenObject if the credentials may not see it."""
        try:
            return self._writer.find(self._url(path), unseen_is_absent=False)
        except UnseenObject as error:
            return error

    def is_other(self, path: str, *, unseen_is_absent: bool) -> bool:
        """Return whether something else than this file lies at its URL."""
        found = self._writer.find(self._url(path), unseen_is_absent=unseen_is_absent)
        return found is not None and found != _described(path)

    def bring(self, path: str) -> None:
        """Send a file unless it is there already."""
        wanted = _described(path)
        if (found := self._writer.find(self._url(path))) == wanted:
            self._advance(wanted.size)
            with self._lock:
                self.kept += 1
                self._brought[path] = found
            return
        sent = self._writer.send(self._url(path), path, wanted.md5, self._advance)
        with self._lock:
            self.sent += 1
            self.sent_bytes += wanted.size
            self._brought[path] = sent

    def check(
        self, paths: Sequence[str], found: Sequence[StoredObject | UnseenObject | None]
    ) -> None:
        """Raise DataError unless all files lie there as they were sent.

        `found` is what look() returned after the last file was sent. If two uploads of different
        files got mixed, at least one of them notices: had each found all its own files after its
        last one, each would have sent its last file after the other's.
        """
        may_look = any(isinstance(there, StoredObject) for there in found)
        others = [
            path
            for path, there in zip(paths, found, strict=True)
            if not (
                there.may_be(self._brought[path])
                if isinstance(there, StoredObject)
                else there is not None and not may_look
            )
        ]
        if others:
            raise DataError(
                f"{self._url(others[0])}: {len(others)} of {len(paths)} objects, this one first, "
                "were replaced or removed while the dataset was sent, by another upload to this "
                "URL: neither may be whole; when the other has ended, send the one that is to stay "
                "again, with --overwrite"
            )

    def remove_beyond(self, slabs: int) -> None:
        """Remove the slabs left by a larger dataset."""
        end = slabs
        while self._writer.find(self._url(slab_name(end))) is not None:
            end += 1
        # From the last: an interruption leaves slabs that the next call finds.
        for number in reversed(range(slabs, end)):
            self._writer.remove(self._url(slab_name(number)))

    def _url(self, path: str) -> str:
        return child_url(self._target, os.path.basename(path))

    def _advance(self, count: int) -> None:
        with self._lock:
            self._show(count)


def _described(path: str) -> StoredObject:
    """Return the object that a file becomes when it is sent."""
    return StoredObject(os.stat(path).st_size, md5_of(path))


def _target_of(url: str) -> str:
    target = url_of(url) if is_url(url) else url
    if not target.startswith("s3://") or names_a_file(target):
        raise ValueError(f"{url}: not a place for a dataset; use s3://BUCKET/PREFIX")
    return target
