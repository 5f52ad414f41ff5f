"""A server of ranges that answers as a test tells it to, byte by byte.

Owns the sockets. What it sends is up to the test: a function of the range that was asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["Asked", "HostileServer", "dripping"]

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(frozen=True)
class Asked:
    """Bytes [start, stop) of a file of `size` bytes, and what they are."""

    start: int
    stop: int
    size: int
    body: bytes

    def head(self, *lines: str, status: str = "206 Partial Content", length: bool = True) -> bytes:
        """Status and headers, with these lines added to, or in place of, the right ones."""
        right = [
            f"Content-Range: bytes {self.start}-{self.stop - 1}/{self.size}",
            'ETag: "as-it-was"',
            *([f"Content-Length: {len(self.body)}"] if length else []),
        ]
        names = {line.partition(":")[0] for line in lines}
        kept = [line for line in right if line.partition(":")[0] not in names]
        return "\r\n".join([f"HTTP/1.1 {status}", *kept, *lines, "", ""]).encode("latin-1")


Misbehaviour = Callable[[Asked], Iterator[bytes]]


def answer(asked: Asked) -> Iterator[bytes]:
    """Behave."""
    yield asked.head()
    yield asked.body


class HostileServer(ThreadingHTTPServer):
    """Serves `folder`; a context manager. misbehave: what the first `times` requests get, and None
    for all; the others get a right answer. asked: how many requests came.

    b"" lets time go by, until the server ends or the client has gone.
    """

    daemon_threads = True

    def __init__(self, folder: Path, misbehave: Misbehaviour, times: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.misbehave, self.times = folder, misbehave, times
        self.asked, self.ended = 0, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> HostileServer:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HostileServer

    def do_GET(self) -> None:
        server = self.server
        server.asked += 1
        content = (server.folder / self.path.partition("?")[0].lstrip("/")).read_bytes()
        found = _RANGE.fullmatch(self.headers["Range"])
        assert found is not None
        start, stop = int(found[1]), min(int(found[2]) + 1, len(content))
        asked = Asked(start, stop, len(content), content[start:stop])
        misbehaves = server.times is None or server.asked <= server.times
        self.close_connection = True
        with contextlib.suppress(OSError):
            for piece in (server.misbehave if misbehaves else answer)(asked):
                if server.ended.is_set():
                    return
                self.wfile.write(piece)
                if not piece:
                    server.ended.wait(0.05)

    def log_request(self, *_: object) -> None:
        """Nothing on the terminal."""


def dripping(data: bytes) -> Iterator[bytes]:
    """Send these bytes one by one, again and again, with time between them."""
    for byte in itertools.cycle(data):
        yield bytes([byte])
        yield b""
