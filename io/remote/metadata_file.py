"""MetadataFile: an object as a file from which h5py reads the metadata of HDF5, not samples.

Slabs of one dataset are alike: the pages that the first slab needed, one by one, are fetched
together for the others.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hsgd.errors import DataError

from .object_reader import ObjectMissing, ObjectReader

__all__ = ["MetadataFile", "open_objects"]

_PAGE_BYTES = 64 << 10
_REQUESTS = 32  # in flight


class MetadataFile(io.RawIOBase):
    """A read-only file; `failure` is the error that h5py got and hides behind one of its own."""

    def __init__(self, url: str, reader: ObjectReader) -> None:
        super().__init__()
        self.url, self._reader = url, reader
        self.identity, head = reader.open(url, _PAGE_BYTES)
        self._pages = {0: head}
        self._position = 0
        self.failure: DataError | None = None

    def __repr__(self) -> str:
        return self.url  # h5py's name for the file

    @property
    def pages(self) -> list[int]:
        """Numbers of the pages that were needed so far."""
        return sorted(self._pages)

    def fetch(self, pages: Iterable[int]) -> None:
        """Fetch missing pages, consecutive ones with one request."""
        last = -(-self.identity[0] // _PAGE_BYTES)
        missing = sorted({page for page in pages if page < last} - self._pages.keys())
        runs = itertools.groupby(enumerate(missing), lambda pair: pair[1] - pair[0])
        for _, run in runs:
            numbers = [page for _, page in run]
            start = numbers[0] * _PAGE_BYTES
            stop = min((numbers[-1] + 1) * _PAGE_BYTES, self.identity[0])
            found = bytearray(stop - start)
            self._reader.read_into(self.url, self.identity, start, memoryview(found))
            for place, number in enumerate(numbers):
                low = place * _PAGE_BYTES
                self._pages[number] = bytes(found[low : low + _PAGE_BYTES])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.identity[0]}
        self._position = base[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self.identity[0] - self._position))
        first, last = self._position // _PAGE_BYTES, (self._position + count - 1) // _PAGE_BYTES
        try:
            self.fetch(range(first, last + 1) if count else ())
        except DataError as error:
            self.failure = error
            raise OSError(str(error)) from None
        done = 0
        while done < count:
            page, inside = divmod(self._position, _PAGE_BYTES)
            part = self._pages[page][inside : inside + count - done]
            out[done : done + len(part)] = part
            done += len(part)
            self._position += len(part)
        return count


def open_objects(
    urls: Sequence[str], reader: ObjectReader, pages: Sequence[int]
) -> list[MetadataFile | None]:
    """Open the objects at `urls` and fetch their `pages`, in parallel.

    Returns None for an object that does not exist. Raises DataError.
    """

    def one(url: str) -> MetadataFile | None:
        try:
            file = MetadataFile(url, reader)
        except ObjectMissing:
            return None
        file.fetch(pages)
        return file

    if not urls:
        return []
    with ThreadPoolExecutor(min(_REQUESTS, len(urls)), "hsgd-metadata") as pool:
        return list(pool.map(one, urls))
