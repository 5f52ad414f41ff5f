"""Ranges of objects out of blocks on a local disk; what is not there is fetched, and kept."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .block_files import BlockFiles, DiskOptions

__all__ = ["DiskCache", "ObjectKey", "RequestCounts", "disk_cache_of"]

_REQUEST_BYTES = 16 << 20  # fetched at once
_WAIT_S = 120.0  # for another thread that fetches the same block

Fetch = Callable[[int, memoryview], None]


@dataclass
class RequestCounts:
    """requests: that were sent. retries: of them, because one before had failed. fetched_bytes:
    that came from servers. disk_bytes: that came from the cache on disk instead. disk_damaged:
    blocks that were damaged there.
    """

    requests: int = 0
    retries: int = 0
    fetched_bytes: int = 0
    disk_bytes: int = 0
    disk_damaged: int = 0


@dataclass(frozen=True)
class ObjectKey:
    """An object as it was opened: what has another size or ETag is another object."""

    url: str
    size: int
    etag: str


class DiskCache:
    """Reads ranges of objects through the blocks of a folder; safe to use from several threads."""

    def __init__(self, options: DiskOptions, *, required: bool) -> None:
        self._files = BlockFiles(options, required=required)
        self._block_bytes = options.block_bytes
        self._changed = threading.Condition()
        self._fetched_now: set[tuple[ObjectKey, int]] = set()

    def read_into(
        self, key: ObjectKey, start: int, out: memoryview, counts: RequestCounts, fetch: Fetch
    ) -> None:
        """Fill `out` with bytes of an object from `start` on. fetch: fills a buffer from a byte on,
        or raises; blocks that follow one another are fetched at once.
        """
        wanted = _Range(key, start, out, counts)
        missing = [n for n in self._blocks(start, len(out)) if not self._load(wanted, n)]
        while missing:
            claimed = self._claim(key, missing)
            try:
                # Another thread may have brought some in between.
                lacking = [
                    number for number in claimed if not self._load(wanted, number, claimed=True)
                ]
                for run in self._runs(lacking):
                    self._fetch_run(wanted, run, fetch)
            finally:
                self._unclaim(key, claimed)
            others = sorted(set(missing).difference(claimed))
            if not self._wait(key, others):
                for run in self._runs(others):
                    self._fetch_run(wanted, run, fetch)
                return
            missing = [number for number in others if not self._load(wanted, number)]

    def forget(self, key: ObjectKey, start: int, nbytes: int) -> None:
        """Drop the blocks that hold a range."""
        for number in self._blocks(start, nbytes):
            self._files.remove(self._digest(key, number))

    def _blocks(self, start: int, nbytes: int) -> range:
        return range(start // self._block_bytes, -(-(start + nbytes) // self._block_bytes))

    def _load(self, wanted: _Range, number: int, *, claimed: bool = False) -> bool:
        """Take what a block has of a range out of its file; False when it is not there. One that is
        damaged is removed, by the thread that will fetch it.
        """
        low = number * self._block_bytes
        nbytes = min(self._block_bytes, wanted.key.size - low)
        inside, part = wanted.part(low, low + nbytes)
        digest = self._digest(wanted.key, number)
        found = self._files.read(digest, nbytes, inside - low, part)
        if found == "here":
            wanted.counts.disk_bytes += len(part)
        if found == "damaged" and claimed:
            self._files.remove(digest)
            wanted.counts.disk_damaged += 1
        return found == "here"

    def _digest(self, key: ObjectKey, number: int) -> bytes:
        """The name of a block, of which no other has the content."""
        named = (key.url, key.size, key.etag, self._block_bytes, number)
        return hashlib.sha256(repr(named).encode()).digest()

    def _runs(self, numbers: Sequence[int]) -> Iterator[range]:
        """Blocks that follow one another, as many as one request brings."""
        most = max(1, _REQUEST_BYTES // self._block_bytes)
        first = 0
        for at in range(1, len(numbers) + 1):
            ends = at == len(numbers) or numbers[at] != numbers[at - 1] + 1
            if ends or at - first == most:
                yield range(numbers[first], numbers[at - 1] + 1)
                first = at

    def _fetch_run(self, wanted: _Range, run: range, fetch: Fetch) -> None:
        """Fetch blocks whole and keep them; without room for them only what is wanted."""
        low = run.start * self._block_bytes
        high = min(run.stop * self._block_bytes, wanted.key.size)
        inside, part = wanted.part(low, high)
        if not self._files.keeps:
            fetch(inside, part)
            return
        content = memoryview(bytearray(high - low))
        fetch(low, content)
        part[:] = content[inside - low : inside - low + len(part)]
        for number in run:
            at = (number - run.start) * self._block_bytes
            self._files.write(
                self._digest(wanted.key, number), content[at : at + self._block_bytes]
            )

    def _claim(self, key: ObjectKey, numbers: Sequence[int]) -> list[int]:
        """Those of the blocks that no other thread fetches; this one does from now on."""
        with self._changed:
            free = [number for number in numbers if (key, number) not in self._fetched_now]
            self._fetched_now.update((key, number) for number in free)
            return free

    def _unclaim(self, key: ObjectKey, numbers: Sequence[int]) -> None:
        with self._changed:
            self._fetched_now.difference_update((key, number) for number in numbers)
            self._changed.notify_all()

    def _wait(self, key: ObjectKey, numbers: Sequence[int]) -> bool:
        """Until no other thread fetches these; False when that takes too long."""
        names = {(key, number) for number in numbers}
        with self._changed:
            return self._changed.wait_for(
                lambda: names.isdisjoint(self._fetched_now), timeout=_WAIT_S
            )


@dataclass(frozen=True)
class _Range:
    """Bytes of an object that somebody asked for."""

    key: ObjectKey
    start: int
    out: memoryview
    counts: RequestCounts

    def part(self, low: int, high: int) -> tuple[int, memoryview]:
        """What lies in bytes [low, high) of the object: where it begins there, and its place."""
        first, stop = max(low, self.start), min(high, self.start + len(self.out))
        return first, self.out[first - self.start : stop - self.start]


def disk_cache_of(options: DiskOptions, *, required: bool = False) -> DiskCache:
    """The cache of this process with these options. A folder that cannot be used is a ValueError
    where it is required, else a warning, and the data comes from the server.
    """
    with _caches.lock:
        cache = _caches.made.get(options)
        if cache is None:
            cache = _caches.made[options] = DiskCache(options, required=required)
        return cache


class _Caches:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: dict[DiskOptions, DiskCache] = {}


_caches = _Caches()


def _forget() -> None:
    """After fork, in the child: the parent's threads may hold the locks."""
    _caches.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)
