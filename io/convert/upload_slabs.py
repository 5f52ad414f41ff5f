"""A slab folder to S3: slabs first, the index last, so that it is there whole or not at all."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hsgd.errors import DataError

from ..format.open_map import open_map
from ..format.slab_folder import INDEX_NAME, is_slab_folder, slab_name
from ..remote.object_writer import ObjectWriter, StoredObject, UnseenObject, md5_of
from ..remote.urls import child_url, is_url, names_a_file, url_of
from .progress import Advance, Progress

__all__ = ["Uploaded", "check_target", "upload_slabs"]


@dataclass(frozen=True)
class Uploaded:
    """sent, sent_bytes: objects and their bytes. kept: objects that were there, and the same."""

    sent: int
    sent_bytes: int
    kept: int


def check_target(url: str, *, overwrite: bool = False, retry_s: float = 60.0) -> None:
    """Raise ValueError or DataError when no new dataset can be sent to this URL; blocks for some
    requests.
    """
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

    Slabs come first and the index last: until then there is no dataset, with overwrite not the old
    one either. Objects of the same size and MD5 are not sent again, so that after a kill the same
    call goes on where it was; two calls may send the same folder at once. Where the slabs of two
    that send different folders to one URL get mixed, one fails, or both. overwrite: another dataset
    under this URL is replaced, and slabs that it has more are removed. threads: files that are sent
    at once, each with 16 MiB in memory. retry_s: how long a request that fails is sent again.
    progress: show a bar on stderr.

    Raises DataError for a folder that is damaged or was not converted, another dataset under the
    URL, and what S3 refuses; ValueError for bad arguments, MissingExtra without botocore.
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
    """What was done so far."""

    def __init__(self, writer: ObjectWriter, target: str, advance: Advance) -> None:
        self.sent = self.sent_bytes = self.kept = 0
        self._writer, self._target, self._show = writer, target, advance
        self._brought: dict[str, StoredObject] = {}
        self._lock = threading.Lock()

    def look(self, path: str) -> StoredObject | UnseenObject | None:
        """Return what lies where a file belongs; an UnseenObject where nobody may ask."""
        try:
            return self._writer.find(self._url(path), unseen_is_absent=False)
        except UnseenObject as error:
            return error

    def is_other(self, path: str, *, unseen_is_absent: bool) -> bool:
        """Return whether something else than this file lies where it belongs."""
        found = self._writer.find(self._url(path), unseen_is_absent=unseen_is_absent)
        return found is not None and found != _described(path)

    def bring(self, path: str) -> None:
        """Send a file, unless it is there."""
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
        """Raise DataError unless all files lie there as they were brought. found: looked at after
        the last of them was.

        So of two uploads of different files, whose files got mixed, one sees it at least: had each
        found all its own after its last, each would have sent its last after the other's.
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
        """Remove the slabs that a larger dataset left."""
        end = slabs
        while self._writer.find(self._url(slab_name(end))) is not None:
            end += 1
        for number in reversed(range(slabs, end)):  # so that what an interruption leaves is found
            self._writer.remove(self._url(slab_name(number)))

    def _url(self, path: str) -> str:
        return child_url(self._target, os.path.basename(path))

    def _advance(self, count: int) -> None:
        with self._lock:
            self._show(count)


def _described(path: str) -> StoredObject:
    """What a file is when it lies there."""
    return StoredObject(os.stat(path).st_size, md5_of(path))


def _target_of(url: str) -> str:
    target = url_of(url) if is_url(url) else url
    if not target.startswith("s3://") or names_a_file(target):
        raise ValueError(f"{url}: not a place for a dataset; use s3://BUCKET/PREFIX")
    return target
