"""Moto's S3 on this machine, which fails when it is told to.

Owns the server, the list of what was asked for and the faults. What S3 does is moto's, but for the
check of Content-MD5, which moto leaves out.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import io
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from moto.backends import get_backend
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

__all__ = ["MotoServer"]


_MOTOS_DATE = b"2010-11-10T20:48:33.000Z"


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Nothing on the terminal."""


@dataclass
class _Fault:
    match: Callable[[str], bool]
    status: int
    code: str


@dataclass
class MotoServer:
    """A context manager. requests: "METHOD /bucket/key?query" in the order in which they came, with
    the bytes of their bodies. begun: when files that come in parts were begun, which moto does not
    know.
    """

    begun: datetime.datetime = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc)
    )

    requests: list[tuple[str, int]] = field(default_factory=list)
    _faults: list[_Fault] = field(default_factory=list)
    _holds: list[tuple[str, threading.Event, threading.Event]] = field(default_factory=list)
    _lock: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> MotoServer:
        get_backend("s3").reset()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail(self, text: str, status: int, code: str, times: int = 1) -> None:
        """Let the next requests with `text` in them have an error of S3."""
        with self._lock:
            self._faults += [_Fault(lambda line: text in line, status, code)] * times

    def hold(self, text: str, come: threading.Event, go: threading.Event) -> None:
        """Let the next request with `text` in it set `come`, and wait for `go`."""
        with self._lock:
            self._holds.append((text, come, go))

    def wait_for(self, method: str, times: int) -> None:
        """Until so many requests of a method have come."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.sent(method)) >= times, timeout=60)

    def sent(self, method: str) -> list[str]:
        """The keys of requests of a method, in their order."""
        lines = [line.split(" ", 1) for line, _ in self.requests]
        return [rest.partition("?")[0] for name, rest in lines if name == method]

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}" + (query and f"?{query}")
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        with self._lock:
            self.requests.append((line, len(body)))
            self._lock.notify_all()
            fault = next((fault for fault in self._faults if fault.match(line)), None)
            if fault is not None:
                self._faults.remove(fault)
            hold = next((hold for hold in self._holds if hold[0] in line), None)
            if hold is not None:
                self._holds.remove(hold)
        if hold is not None:
            hold[1].set()
            assert hold[2].wait(60)
        if environ.get("HTTP_CONTENT_MD5", digest) != digest:
            fault = _Fault(lambda _: True, 400, "BadDigest")
        if fault is None:
            date = f"{self.begun:%Y-%m-%dT%H:%M:%S}.000Z".encode()
            return [part.replace(_MOTOS_DATE, date) for part in self._app(environ, start)]
        text = f"<Error><Code>{fault.code}</Code><Message>told to</Message></Error>".encode()
        start(f"{fault.status} told to", [("Content-Length", str(len(text)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else text]
