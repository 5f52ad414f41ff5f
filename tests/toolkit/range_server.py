"""A server of ranges of files, which fails when it is told to: for tests and benchmarks of URLs.

    python -m toolkit.range_server FOLDER [--host 0.0.0.0] [--port 8000]

Serves the files of a folder with their size and an ETag of size and time, by GET and HEAD, to HTTP
and, as its paths may begin with a bucket, to S3 clients, whose signatures nobody checks. Owns the
faults and the list of what was asked for. Never writes. A server of the standard library, not for
real data.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

__all__ = ["FaultKind", "RangeServer", "Request", "main"]

# cut: half of the body and the end of the connection. dropped: that without an answer. whole: the
# whole file, whatever was asked for. chunked: no fault, a body without its length. A number is the
# status of an answer without a body.
FaultKind = Literal["chunked", "cut", "dropped", "whole"] | int
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Request:
    """What was asked for: a file and bytes [start, stop)."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Fault:
    kind: FaultKind
    name: str
    retry_after: str
    location: str


class RangeServer:
    """Serves `folder` on this machine from the start until stop(); a context manager.

    checks_etag: answer 412 to an If-Match that does not hold, as servers should; without it they
    send what they have. certificate: a PEM file with key and certificate, for https. requests: in
    the order in which they came.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        checks_etag: bool = True,
        certificate: Path | None = None,
    ) -> None:
        self.folder, self.checks_etag = folder, checks_etag
        self.requests: list[Request] = []
        self._faults: deque[_Fault] = deque()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._server = _Server((host, port), _Handler)
        self._server.owner = self
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.context = context
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self) -> RangeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fail(
        self,
        kind: FaultKind,
        times: int = 1,
        *,
        name: str = "",
        retry_after: str = "",
        location: str = "",
    ) -> None:
        """Let the next `times` requests for a file whose name has `name` in it fail. location: of
        a redirect.
        """
        with self._lock:
            self._faults.extend([_Fault(kind, name, retry_after, location)] * times)

    def stop(self) -> None:
        """Refuse connections, and close those that are open."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            with self._lock:
                open_ones = list(self._connections)
            for connection in open_ones:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._thread.join()

    def take_fault(self, name: str) -> _Fault | None:
        """The fault that this request is to have."""
        with self._lock:
            for fault in self._faults:
                if fault.name in name:
                    self._faults.remove(fault)
                    return fault
        return None

    def note(self, request: Request) -> None:
        """Add to the list."""
        with self._lock:
            self.requests.append(request)

    def connected(self, connection: socket.socket, *, now: bool) -> None:
        """A connection was opened, or is closed."""
        with self._lock:
            (self._connections.add if now else self._connections.discard)(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = True
    request_queue_size = 128
    owner: RangeServer
    context: ssl.SSLContext | None = None

    def handle_error(self, *_: object) -> None:
        """Nothing on the terminal: clients break connections off on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        if self.server.context is not None:
            self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.owner.connected(self.connection, now=True)

    def finish(self) -> None:
        self.server.owner.connected(self.connection, now=False)
        with contextlib.suppress(OSError):
            super().finish()
        if self.server.context is not None:  # the server closes what it accepted, and no wrapper
            self.connection.close()

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_request(self, *_: object) -> None:
        """Nothing on the terminal."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        owner = self.server.owner
        name = self.path.partition("?")[0].lstrip("/")
        try:
            descriptor = os.open(owner.folder / name, os.O_RDONLY)
        except OSError:
            owner.note(Request(name, 0, 0))
            self._refuse(404)
            return
        try:
            self._answer_of(descriptor, name, with_body=with_body)
        finally:
            os.close(descriptor)

    def _answer_of(self, descriptor: int, name: str, *, with_body: bool) -> None:
        owner, status = self.server.owner, os.fstat(descriptor)
        size, etag = status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, stop = 0, size
        if asked is not None:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
        owner.note(Request(name, start, stop))
        fault = owner.take_fault(name)
        kind = None if fault is None else fault.kind
        if kind == "dropped":
            self.close_connection = True
            return
        if fault is not None and isinstance(kind, int):
            self._refuse(kind, fault.retry_after, fault.location)
            return
        if owner.checks_etag and self.headers.get("If-Match", etag) != etag:
            self._refuse(412)
            return
        if asked is not None and start >= size:
            self._refuse(416)
            return
        if kind == "whole":
            asked, start, stop = None, 0, size
        self.send_response(200 if asked is None else 206)
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        if kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", etag)
        self.end_headers()
        if with_body:
            if kind == "cut":
                stop = start + (stop - start) // 2
                self.close_connection = True
            if kind == "chunked":
                body = os.pread(descriptor, stop - start, start)
                self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            else:
                self._send(descriptor, start, stop)

    def _send(self, descriptor: int, start: int, stop: int) -> None:
        self.wfile.flush()
        while start < stop and self.server.context is not None:  # encrypted, so not by the kernel
            part = os.pread(descriptor, min(stop - start, 1 << 20), start)
            self.wfile.write(part)
            start += len(part)
        while start < stop:
            sent = os.sendfile(self.connection.fileno(), descriptor, start, stop - start)
            if not sent:
                self.close_connection = True
                return
            start += sent

    def _refuse(self, status: int, retry_after: str = "", location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", "0")
        self.end_headers()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stdin ends; prints the URL first."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.range_server")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args(arguments)
    with RangeServer(options.folder, options.host, options.port) as server:
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            os.read(0, 1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
