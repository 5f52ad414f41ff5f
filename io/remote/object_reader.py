"""ObjectReader: reads ranges of objects, with retries, only of the object that was opened.

All that a server sends is checked: range, size, ETag, every byte. The retries of urllib3 and
botocore count tries, not seconds, and start a range again if its answer breaks off; here reading
continues at the first missing byte, within `retry_s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hsgd.errors import DataError

from .block_files import DiskOptions
from .clients import Answer, Client, RequestFailed, client_for
from .disk_cache import ObjectKey, RequestCounts, disk_cache_of
from .limited_answers import Limits

__all__ = ["ObjectChanged", "ObjectIdentity", "ObjectMissing", "ObjectReader", "RemoteAccess"]

ObjectIdentity = tuple[int, str]  # size, ETag, or Last-Modified where there is none

_PIECE_BYTES = 1 << 20  # per read; a connection that breaks may lose a part of it
_LEAST_RATE = 50_000  # bytes per second of an answer, besides this time:
_LEAST_ANSWER_S, _MOST_ANSWER_S = 10.0, 60.0  # between these: the rest of retry_s


@dataclass(frozen=True)
class RemoteAccess:
    """How the objects of a dataset are read: for `retry_s` per range, with the cache on `disk`."""

    retry_s: float = 60.0
    disk: DiskOptions | None = None


class ObjectMissing(DataError):
    """There is no such object."""


class ObjectChanged(DataError):
    """The object is not the one that was opened."""


class ObjectReader:
    """Reader of ranges of objects, for several threads, in any process.

    After a range was given up, others are requested only once each, until one succeeds: so waits
    for a dead server do not add up.
    """

    def __init__(self, access: RemoteAccess) -> None:
        self._retry_s, self._disk = access.retry_s, access.disk
        self._stopped = threading.Event()
        self._gave_up = False

    def stop(self) -> None:
        """Stop all retries from now on."""
        self._stopped.set()

    def open(
        self, url: str, nbytes: int, counts: RequestCounts | None = None
    ) -> tuple[ObjectIdentity, bytes]:
        """Return the identity of an object, and its first bytes, at most `nbytes`.

        Raises DataError; ObjectMissing if there is no such object.
        """
        head = bytearray(nbytes)
        found = self._fetch(url, None, 0, memoryview(head), counts or RequestCounts())
        return found, bytes(head[: found[0]])

    def read_into(
        self,
        url: str,
        identity: ObjectIdentity,
        start: int,
        out: memoryview,
        counts: RequestCounts | None = None,
    ) -> None:
        """Fill `out` with bytes of an object from `start` on, from the cache if it has them.

        Raises DataError; ObjectChanged if it is not the object that was opened.
        """
        if not len(out):
            return
        counted = counts or RequestCounts()

        def fetch(position: int, part: memoryview) -> None:
            self._fetch(url, identity, position, part, counted)

        key = ObjectKey(url, *identity)
        if self._disk is not None and key.etag and start + len(out) <= key.size:
            # Looked up each time: a forked process has its own cache.
            disk_cache_of(self._disk).read_into(key, start, out, counted, fetch)
        else:
            fetch(start, out)

    def forget(self, url: str, identity: ObjectIdentity, start: int, nbytes: int) -> bool:
        """Drop a range from the cache on disk; False without a cache: reading again cannot help."""
        if self._disk is None:
            return False
        disk_cache_of(self._disk).forget(ObjectKey(url, *identity), start, nbytes)
        return True

    def _fetch(
        self,
        url: str,
        identity: ObjectIdentity | None,
        start: int,
        out: memoryview,
        counts: RequestCounts,
    ) -> ObjectIdentity:
        """Try until all bytes are there; with `identity`, go on at the first missing byte."""
        began = time.monotonic()
        tries = done = 0
        while True:
            tries += 1
            counts.requests += 1
            counts.retries += tries > 1
            try:
                left = out[done:]
                found = _fetch_once(url, identity, start + done, left, self._limits(left, began))
                self._gave_up = False
                counts.fetched_bytes += min(len(left), found[0] - start - done)
                return found
            except RequestFailed as failure:
                counts.fetched_bytes += failure.received
                if identity is not None:
                    done += failure.received
                spent_s = time.monotonic() - began
                delay_s = failure.delay_s(tries)
                last = self._gave_up or spent_s + delay_s > self._retry_s
                if not failure.again or last or self._stopped.wait(delay_s):
                    self._gave_up = self._gave_up or failure.again
                    stop = start + len(out)
                    raise _explain(url, identity, (start, stop), failure, tries, spent_s) from None

    def _limits(self, out: memoryview, began: float) -> Limits:
        now = time.monotonic()
        answer_s = min(_MOST_ANSWER_S, max(_LEAST_ANSWER_S, self._retry_s - (now - began)))
        return Limits(now + answer_s + len(out) / _LEAST_RATE, len(out), self._stopped)


def _fetch_once(
    url: str, identity: ObjectIdentity | None, start: int, out: memoryview, limits: Limits
) -> ObjectIdentity:
    """Request a range once, and check the answer. Raises RequestFailed and ObjectChanged."""
    client = client_for(url)
    etag = "" if identity is None else identity[1]
    with _network_errors(client):
        answer = client.get(url, start, start + len(out), etag, limits)
    try:
        found = (answer.size, answer.etag)
        if identity is not None and found != identity:
            raise _changed(url, identity, f"(size, ETag) {found}")
        stop = min(start + len(out), answer.size)
        if (answer.start, answer.stop) != (start, stop) or (identity and stop < start + len(out)):
            raise RequestFailed(
                f"asked for bytes [{start}, {start + len(out)}), got [{answer.start}, "
                f"{answer.stop}) of {answer.size}",
                again=False,
            )
        _read_all(client, answer, out[: stop - start])
        with _network_errors(client):
            answer.finish(True)
        return found
    except BaseException:
        answer.finish(False)
        raise


@contextmanager
def _network_errors(client: Client) -> Iterator[None]:
    """Turn errors of the network inside the block into RequestFailed."""
    try:
        yield
    except RequestFailed:
        raise
    except Exception as error:
        failure = client.failure(error)
        if failure is None and isinstance(error, ValueError):  # a number in a header or a chunk
            failure = RequestFailed(f"the answer is damaged: {error}", again=True)
        if failure is None:
            raise
        raise failure from None


def _read_all(client: Client, answer: Answer, out: memoryview) -> None:
    """Fill `out`. Raises RequestFailed, which says how many bytes arrived."""
    done = 0
    while done < len(out):
        try:
            with _network_errors(client):
                got = answer.read_into(out[done : done + _PIECE_BYTES])
        except RequestFailed as failure:
            failure.received = done
            raise
        if not got:
            text = f"the answer ended after {done} of {len(out)} bytes"
            raise RequestFailed(text, again=True, received=done)
        done += got


def _changed(url: str, identity: ObjectIdentity, now: str) -> ObjectChanged:
    return ObjectChanged(
        f"{url}: changed since it was opened ((size, ETag) {identity}, now {now}); open the "
        "dataset again, or restore the object"
    )


def _explain(
    url: str,
    identity: ObjectIdentity | None,
    span: tuple[int, int],
    failure: RequestFailed,
    tries: int,
    spent_s: float,
) -> DataError:
    if failure.status in (404, 410):
        return ObjectMissing(f"{url}: no such object (status {failure.status}); check the URL")
    if failure.status == 412 and identity is not None:
        return _changed(url, identity, "another: status 412")
    count = f"{tries} times in {spent_s:.1f} s" if tries > 1 else "once"
    where = f"{url}: reading bytes [{span[0]}, {span[1]}) failed"
    if not failure.again:
        remedy = {401: "check the credentials", 403: "check the credentials"}.get(failure.status)
        return DataError(f"{where}: {failure}" + (f"; {remedy}" if remedy else ""))
    return DataError(f"{where} {count}, at last: {failure}; check the server, or raise retry_s")
