"""DiskCache: reads ranges of objects from blocks on a local disk, and fetches missing blocks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .block_files import BlockFiles, DiskOptions
from .made_once import MadeOnce

__all__ = ["DiskCache", "ObjectKey", "RequestCounts", "disk_cache_of"]

_REQUEST_BYTES = 16 << 20  # fetched at once
_WAIT_S = 120.0  # longest wait for another thread that fetches the same block

Fetch = Callable[[int, memoryview], None]


@dataclass
class RequestCounts:
    """Counters of requests."""

    requests: int = 0  # all that were sent
    retries: int = 0  # those after a failed request
    fetched_bytes: int = 0  # from servers
    disk_bytes: int = 0  # from the cache on disk instead
    disk_damaged: int = 0  # damaged blocks there


@dataclass(frozen=True)
class ObjectKey:
    """An object as it was opened; with another size or ETag it is another object."""

    url: str
    size: int
    etag: str


class DiskCache:
    """Reader of ranges of objects through the blocks in a folder, for several threads."""

    def __init__(self, options: DiskOptions, *, required: bool) -> None:
        self._files = BlockFiles(options, required=required)
        self._block_bytes = options.block_bytes
        self._changed = threading.Condition()
        self._fetched_now: set[tuple[ObjectKey, int]] = set()

    def read_into(
        self, key: ObjectKey, start: int, out: memoryview, counts: RequestCounts, fetch: Fetch
    ) -> None:
        """Fill `out` from byte `start` on; `fetch` fills a buffer from a byte on, or raises."""
        wanted = _Range(key, start, out, counts)
        missing = [n for n in self._blocks(start, len(out)) if not self._load(wanted, n)]
        while missing:
            claimed = self._claim(key, missing)
            try:
                # Another thread may have fetched some in between.
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
        for number in self._blocks(start, nbytes):
            self._files.remove(self._digest(key, number))

    def _blocks(self, start: int, nbytes: int) -> range:
        return range(start // self._block_bytes, -(-(start + nbytes) // self._block_bytes))

    def _load(self, wanted: _Range, number: int, *, claimed: bool = False) -> bool:
        """Copy a block's part of a range; False without it. If `claimed`, drop a damaged block."""
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
        """Return the name of a block, which depends on all that determines its content."""
        named = (key.url, key.size, key.etag, self._block_bytes, number)
        return hashlib.sha256(repr(named).encode()).digest()

    def _runs(self, numbers: Sequence[int]) -> Iterator[range]:
        """Yield runs of consecutive blocks, each for one request."""
        most = max(1, _REQUEST_BYTES // self._block_bytes)
        first = 0
        for at in range(1, len(numbers) + 1):
            ends = at == len(numbers) or numbers[at] != numbers[at - 1] + 1
            if ends or at - first == most:
                yield range(numbers[first], numbers[at - 1] + 1)
                first = at

    def _fetch_run(self, wanted: _Range, run: range, fetch: Fetch) -> None:
        """Fetch whole blocks and keep them; if there is no room, fetch only the bytes needed."""
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
        """Return the blocks that no other thread fetches; from now on this thread does."""
        with self._changed:
            free = [number for number in numbers if (key, number) not in self._fetched_now]
            self._fetched_now.update((key, number) for number in free)
            return free

    def _unclaim(self, key: ObjectKey, numbers: Sequence[int]) -> None:
        with self._changed:
            self._fetched_now.difference_update((key, number) for number in numbers)
            self._changed.notify_all()

    def _wait(self, key: ObjectKey, numbers: Sequence[int]) -> bool:
        """Wait until no other thread fetches these blocks; return False after _WAIT_S."""
        names = {(key, number) for number in numbers}
        with self._changed:
            return self._changed.wait_for(
                lambda: names.isdisjoint(self._fetched_now), timeout=_WAIT_S
            )


@dataclass(frozen=True)
class _Range:
    key: ObjectKey
    start: int
    out: memoryview
    counts: RequestCounts

    def part(self, low: int, high: int) -> tuple[int, memoryview]:
        """Return where bytes [low, high) of the object meet the range, and their place in `out`."""
        first, stop = max(low, self.start), min(high, self.start + len(self.out))
        return first, self.out[first - self.start : stop - self.start]


_caches: MadeOnce[DiskOptions, DiskCache] = MadeOnce()


def disk_cache_of(options: DiskOptions, *, required: bool = False) -> DiskCache:
    """Return the cache of this process with these options.

    A folder that cannot be used raises ValueError if `required`; otherwise it gives a warning, and
    data comes from the server.
    """
    return _caches.get(options, lambda: DiskCache(options, required=required))
