"""Limits of HTTP answers in time and bytes, whatever the server sends.

Both are checked before each read from the socket. Status, headers, bodies of redirects and errors,
and chunk framing count, too.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

__all__ = ["AnswerTooLong", "AnswerTooSlow", "Limits", "limit_pools", "limited"]

_FRAME_BYTES = 256 << 10  # for headers and chunk framing


class AnswerTooSlow(TimeoutError):
    """The time is over, or the answer is not needed any more."""


class AnswerTooLong(OSError):
    """The server sends more bytes than requested."""


@dataclass(frozen=True)
class Limits:
    """Limits of the answers to one request."""

    end_s: float  # by time.monotonic()
    nbytes: int  # that were requested
    stopped: threading.Event = field(default_factory=threading.Event)  # the answer is not needed


class _Limited(threading.local):
    limits: Limits | None = None


_now = _Limited()


@contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """Apply `limits` to answers in the block, and to the last one also after it."""
    before, _now.limits = _now.limits, limits
    try:
        yield
    finally:
        _now.limits = before


def limit_pools(pools: Mapping[str, Any]) -> dict[str, Any]:
    """Return classes of urllib3's connection pools, by scheme, that apply limited()."""

    def one(pool: Any) -> Any:
        heeding = {"response_class": _Answer}
        connection = type("LimitedConnection", (pool.ConnectionCls,), heeding)
        return type("LimitedPool", (pool,), {"ConnectionCls": connection})

    return {scheme: one(pool) for scheme, pool in pools.items()}


class _Answer(HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        if _now.limits is not None:
            self.fp = io.BufferedReader(_LimitedSocket(self.fp.detach(), sock, _now.limits))


class _LimitedSocket(io.RawIOBase):
    """The data from a socket; `raw` reads from it once per call."""

    def __init__(self, raw: Any, sock: Any, limits: Limits) -> None:
        super().__init__()
        self._raw, self._sock, self._limits = raw, sock, limits
        self._silence_s = sock.gettimeout()
        self._left = 2 * limits.nbytes + _FRAME_BYTES

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        if self._limits.stopped.is_set():
            raise AnswerTooSlow("the loader was closed")
        left_s = self._limits.end_s - time.monotonic()
        if left_s <= 0:
            raise AnswerTooSlow("the answer came too slowly")
        if self._left <= 0:
            raise AnswerTooLong(f"asked for {self._limits.nbytes} bytes, the server sends far more")
        self._sock.settimeout(left_s if self._silence_s is None else min(left_s, self._silence_s))
        try:
            count = int(self._raw.readinto(memoryview(buffer)[: self._left]))
        except TimeoutError:
            if time.monotonic() < self._limits.end_s:
                raise
            raise AnswerTooSlow("the answer came too slowly") from None
        self._left -= count
        return count
