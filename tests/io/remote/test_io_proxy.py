"""Datasets behind a proxy, which may want a login."""

from __future__ import annotations

import base64
import select
import socket
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hsgd.io import open_map
from hsgd.io.remote import clients
from hsgd.io.remote.object_reader import RemoteAccess

from hdf5_samples import make_slabs
from hsgd.errors import DataError
from toolkit.range_server import RangeServer

__all__: list[str] = []

CERTIFICATE = Path(__file__).with_name("loopback.pem")
LOGIN = "user@site:p:w/d"
QUOTED = "user%40site:p%3Aw%2Fd"
PROMPTLY = RemoteAccess(retry_s=1e6)  # what is tried again does not end


class Proxy(ThreadingHTTPServer):
    """Passes requests on; a context manager. asked: targets, of those that gave the login. turned
    away: how many did not. refuses: the status of all answers.
    """

    daemon_threads = True

    def __init__(self, login: str = "", refuses: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.turned_away, self.refuses = 0, refuses
        words = base64.b64encode(login.encode()).decode()
        self.login = f"Basic {words}" if login else ""
        self.host = f"127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def is_let_in(self):
        refused = self.headers["Proxy-Authorization"] != self.server.login
        if self.server.refuses or (self.server.login and refused):
            self.server.turned_away += 1
            self.send_response(self.server.refuses or 407)
            self.send_header("Proxy-Authenticate", "Basic")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        self.server.asked.append(self.path)
        return True

    def do_GET(self):
        if not self.is_let_in():
            return
        place = urlsplit(self.path)
        onward = HTTPConnection(place.netloc, timeout=30)
        own = {"proxy-authorization", "proxy-connection"}
        headers = {name: text for name, text in self.headers.items() if name.lower() not in own}
        onward.request("GET", place.path, headers=headers)
        answer = onward.getresponse()
        self.send_response(answer.status)
        for name, text in answer.getheaders():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(answer.read())
        onward.close()

    def do_CONNECT(self):
        if not self.is_let_in():
            return
        host, _, port = self.path.partition(":")
        with socket.create_connection((host, int(port)), 30) as onward:
            self.send_response(200)
            self.end_headers()
            sides = {self.connection: onward, onward: self.connection}
            while True:
                for side in select.select(list(sides), [], [], 30)[0]:
                    data = side.recv(1 << 16)
                    if not data:
                        self.close_connection = True
                        return
                    sides[side].sendall(data)

    def log_message(self, *_):
        pass


@pytest.fixture(params=["http", "https"])
def server(request, tmp_path, monkeypatch):
    make_slabs(tmp_path / "plain", 20, 2)
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    monkeypatch.setattr(clients._clients, "made", {})
    certificate = CERTIFICATE if request.param == "https" else None
    with RangeServer(tmp_path, certificate=certificate) as server:
        yield server


def name_of_proxy(server):
    return f"{urlsplit(server.url).scheme}_proxy"


@pytest.mark.parametrize("login", ["", LOGIN])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_dataset_is_read_through_a_proxy(server, monkeypatch, login, scheme):
    with Proxy(login) as proxy:
        before = f"{QUOTED}@" if login else ""
        monkeypatch.setenv(name_of_proxy(server), f"{scheme}{before}{proxy.host}")
        assert open_map(f"{server.url}/plain").num_samples == 20
        assert proxy.asked


def test_no_proxy_is_heeded(server, monkeypatch):
    with Proxy() as proxy:
        monkeypatch.setenv(name_of_proxy(server), f"http://{proxy.host}")
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        assert open_map(f"{server.url}/plain").num_samples == 20
        assert not proxy.asked


@pytest.mark.parametrize("given", ["", "user:wrong-word@"])
def test_a_login_that_is_missing_or_wrong_is_one_line_after_one_try(server, monkeypatch, given):
    with Proxy(LOGIN) as proxy:
        monkeypatch.setenv(name_of_proxy(server), f"http://{given}{proxy.host}")
        wanted = "status 407: the proxy wants another login; give it in http_proxy"
        with pytest.raises(DataError, match=wanted) as caught:
            open_map(f"{server.url}/plain", access=PROMPTLY)
        assert "wrong-word" not in str(caught.value) and "\n" not in str(caught.value)
        assert not proxy.asked and not server.requests
        assert proxy.turned_away == 1


@pytest.mark.parametrize("server", ["https"], indirect=True)
@pytest.mark.parametrize("status", [403, 404])
def test_what_a_proxy_refuses_is_not_told_of_the_object(server, monkeypatch, status):
    with Proxy(refuses=status) as proxy:
        monkeypatch.setenv(name_of_proxy(server), f"http://{proxy.host}")
        wanted = f"the proxy opens no connection: it answers with status {status}"
        with pytest.raises(DataError, match=wanted):
            open_map(f"{server.url}/plain", access=PROMPTLY)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/plain", "https://127.0.0.1:1/x", "s3://b/x"])
@pytest.mark.parametrize(
    "proxy",
    [
        *("socks5://user:word@127.0.0.1:1", "http://user:wo/rd@127.0.0.1:1"),
        *("http://user:wo#rd@127.0.0.1:1", "http://user:wo[rd@127.0.0.1:1"),
        *("http://user:wo?rd@127.0.0.1:1", "http://user:wo\u0141rd@127.0.0.1:1"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_refused_without_its_login(monkeypatch, url, proxy):
    monkeypatch.setattr(clients._clients, "made", {})
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "tests")
    with pytest.raises(DataError, match="proxy that the environment names is none of http") as e:
        open_map(url, access=PROMPTLY)
    assert "user" not in str(e.value) and "wo" not in str(e.value)
