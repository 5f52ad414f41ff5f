"""Clients for one attempt to read one range of one object, by HTTP (urllib3) or S3 (botocore).

A forked child makes new clients. No query and no header appears in a message. Both clients read
from the socket without the GIL, and both also work in forked processes.
"""

from __future__ import annotations

import functools
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from ..needed_for import needed_for
from .limited_answers import AnswerTooLong, AnswerTooSlow, Limits, limit_pools, limited
from .made_once import MadeOnce
from .urls import s3_place

__all__ = ["Answer", "Client", "RequestFailed", "S3Client", "client_for", "s3_client"]

_CONNECTIONS = 64  # kept open to one server
_CONNECT_S, _READ_S = 10.0, 30.0  # longest wait for data
_MOST_REDIRECTS = 5
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 8.0
_UNKNOWN_AUTHORITY = frozenset({18, 19, 20, 21})  # of OpenSSL's X509_V_ERR
_MOST_CAUSES = 64  # of an error, that are examined
_PROXY_LOGIN = 407
_LOGIN = (
    "give it in http_proxy, for https in https_proxy, as http://USER:PASSWORD@HOST:PORT, with "
    "@ : / # ? [ ] % of a login as %40 and so on"
)
_NO_PROXY = f"the proxy that the environment names is none of http; {_LOGIN}"
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
# A new client is made if one of these has changed.
_S3_SETTINGS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"),
)
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")  # below 2**63
_TUNNEL = re.compile(r"Tunnel connection failed: (\d+)")  # of http.client
# Values that do not change the bytes. aws-chunked describes the upload to S3.
_NOT_ENCODED = {
    "Content-Encoding": ("", "identity", "aws-chunked"),
    "Transfer-Encoding": ("", "identity", "chunked"),
}
_MOST_SHOWN = 80  # characters of a header, in a message
_SECRETS = re.compile(r"\?\S*|(?<=//)[^/\s@]*@")


class RequestFailed(Exception):
    """A request that failed.

    Args:
        status: of the answer, 0 without one.
        again: another try may succeed.
        after_s: how long the server asks to wait before it.
        received: bytes of the range that arrived before; they are correct.
    """

    def __init__(
        self, reason: str, status: int = 0, *, again: bool, after_s: float = 0.0, received: int = 0
    ) -> None:
        super().__init__(reason)
        self.status, self.again, self.after_s = status, again, after_s
        self.received = received

    def delay_s(self, tries: int) -> float:
        """Return the seconds to wait after `tries` tries: exponential, and random per client."""
        longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (tries - 1))
        return max(longest * random.uniform(0.5, 1.0), self.after_s)


@dataclass(frozen=True)
class Answer:
    """A range that a server is about to send."""

    start: int  # this, `stop` and `size` are as the server says
    stop: int
    size: int
    etag: str  # "" if there is none
    read_into: Callable[[memoryview], int]  # reads the next bytes into a buffer; 0 at the end
    finish: Callable[[bool], None]  # True if all was read: the connection is used again


class _HttpClient:
    """A client for ranges by HTTP, for several threads."""

    def __init__(self) -> None:
        with needed_for("https://", "urllib3"):
            import urllib3
        self._urllib3 = urllib3
        self._retries = urllib3.Retry(
            connect=0, read=0, redirect=0, status=0, other=0, raise_on_status=False
        )
        options: dict[str, Any] = {
            "maxsize": _CONNECTIONS,
            "timeout": urllib3.Timeout(connect=_CONNECT_S, read=_READ_S),
        }
        self._options = options
        self._pools = limit_pools(urllib3.poolmanager.pool_classes_by_scheme)
        self._plain = urllib3.PoolManager(**options)
        self._plain.pool_classes_by_scheme = self._pools
        self._proxies: dict[str, Any] = {}  # by URL
        self._lock = threading.Lock()

    def get(self, url: str, start: int, stop: int, etag: str, end: Limits) -> Answer:
        """Request bytes [start, stop), if the object still has this ETag ("" for any).

        The whole answer must arrive within the limits `end`. Raises RequestFailed, and exceptions
        that failure() explains.
        """
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if etag.startswith('"'):  # not a weak ETag, which never matches, nor a date
            headers["If-Match"] = etag
        with limited(end):
            response = self._follow(url, headers)
        if response.status not in (200, 206):
            response.close()
            raise _refusal(response.status, response.headers.get("Retry-After", ""))

        tag = response.headers.get("ETag", "") or response.headers.get("Last-Modified", "")
        status, headers = response.status, response.headers
        return _answer(status, headers, tag, response, response.release_conn)

    def _follow(self, url: str, headers: dict[str, str]) -> Any:
        """Return the answer after all redirects, which must not go from https to http."""
        for _ in range(_MOST_REDIRECTS + 1):
            response = self._pool(url).request(
                "GET",
                url,
                headers=headers,
                retries=self._retries,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            location = response.get_redirect_location()
            if not location:
                return response
            if response.length_remaining == 0:
                response.drain_conn()
                response.release_conn()
            else:  # the body is not needed, and may not end
                response.close()
            refused = functools.partial(RequestFailed, status=response.status, again=False)
            before = url
            try:
                url = urljoin(url, location)
                left, entered = urlsplit(before).scheme, urlsplit(url).scheme
            except ValueError:
                raise refused(
                    "the server redirects to an address that is none; check the URL"
                ) from None
            if entered not in ("http", "https"):
                raise refused(
                    f"the server redirects to a {entered} address; only http and https are read"
                )
            if left == "https" and entered == "http":
                raise refused(
                    "the server redirects from https to "
                    f"{url.partition('?')[0].rpartition('@')[2]}, which is not encrypted; use the "
                    "https address of the object, or an http one from the start"
                )
        raise refused(f"more than {_MOST_REDIRECTS} redirects; check the URL")

    def failure(self, error: Exception) -> RequestFailed | None:
        """Return the meaning of an exception of the methods; None if not of the network."""
        if (refused := _refusal_by_cause(error)) is not None:
            return refused
        reason = error.reason if isinstance(error, self._urllib3.exceptions.MaxRetryError) else None
        found = reason or error
        if (refused := _tunnel_refusal(found)) is not None:
            return refused
        if isinstance(found, OSError | self._urllib3.exceptions.HTTPError):
            return RequestFailed(_first_line(found), again=True)
        return None

    def _pool(self, url: str) -> Any:
        """Return connections to the server, or to its proxy in the environment."""
        parts = urlsplit(url)
        proxy = getproxies().get(parts.scheme)
        if not proxy or proxy_bypass(parts.netloc):
            return self._plain
        with self._lock:
            if proxy not in self._proxies:
                self._proxies[proxy] = self._connections_to(proxy)
            return self._proxies[proxy]

    def _connections_to(self, proxy: str) -> Any:
        """Return connections to a proxy; RequestFailed, without its URL, if it is unsupported."""
        try:
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            login = None
            if parts.username is not None:
                words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
                login = self._urllib3.make_headers(proxy_basic_auth=words)
            place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
            if parts.scheme in ("http", "https") and parts.path in ("", "/"):
                found = self._urllib3.ProxyManager(place, proxy_headers=login, **self._options)
                found.pool_classes_by_scheme = self._pools
                return found
        except (ValueError, self._urllib3.exceptions.HTTPError):
            pass
        raise RequestFailed(_NO_PROXY, again=False)


class S3Client:
    """botocore's `client` for S3 without retries; it finds credentials, region and endpoint."""

    def __init__(self) -> None:
        with needed_for("s3://", "botocore"):
            import botocore
            import botocore.config
            import botocore.exceptions
            import botocore.session
            import urllib3
        session = botocore.session.get_session()
        options: dict[str, Any] = {}
        self._signs = session.get_credentials() is not None
        if not self._signs:  # public buckets
            options["signature_version"] = botocore.UNSIGNED
        # Servers other than AWS rarely have a host name for each bucket.
        if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            options["s3"] = {"addressing_style": "path"}
        config = botocore.config.Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            max_pool_connections=_CONNECTIONS,
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            **options,
        )
        region = session.get_config_variable("region") or "us-east-1"
        self.client = session.create_client("s3", region_name=region, config=config)
        # botocore has no public access to the connection pools of a client.
        pools = self.client._endpoint.http_session._pool_classes_by_scheme
        pools.update(limit_pools(pools))
        self._errors, self._urllib3 = botocore.exceptions, urllib3

    def get(self, url: str, start: int, stop: int, etag: str, end: Limits) -> Answer:
        wanted = {**s3_place(url), "Range": f"bytes={start}-{stop - 1}"}
        if etag:
            wanted["IfMatch"] = etag
        with limited(end):
            found = self.client.get_object(**wanted)
        answer = found["ResponseMetadata"]
        status, headers = answer["HTTPStatusCode"], answer["HTTPHeaders"]
        return _answer(status, headers, found.get("ETag", ""), found["Body"])

    def failure(self, error: Exception) -> RequestFailed | None:
        """Return the meaning of an exception of `client`; None if it is not one of the network."""
        if isinstance(error, self._errors.ClientError):
            answer = error.response.get("ResponseMetadata", {})
            after = answer.get("HTTPHeaders", {}).get("retry-after", "")
            refusal = _refusal(int(answer.get("HTTPStatusCode", 0)), after)
            if refusal.status in (401, 403) and not self._signs:
                return RequestFailed(
                    f"status {refusal.status}, and there are no credentials here; set "
                    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
                    refusal.status,
                    again=False,
                )
            return refusal
        if (refused := _refusal_by_cause(error)) is not None:
            return refused
        facts = getattr(error, "kwargs", {})  # of botocore's errors
        cause = facts.get("error")
        for each in (error, cause):
            if (refused := _tunnel_refusal(each)) is not None:
                return refused
        is_odd = facts.get("proxy_url", "").count("//") > 1  # http:// before another scheme
        if is_odd or isinstance(cause, ValueError):  # its text may have a part of the login
            return RequestFailed(_NO_PROXY, again=False)
        lost = (
            self._errors.ConnectionError,
            self._errors.HTTPClientError,
            self._errors.IncompleteReadError,
            self._urllib3.exceptions.HTTPError,
            OSError,
        )
        if isinstance(error, (*lost, self._errors.BotoCoreError)):
            return RequestFailed(_first_line(error), again=isinstance(error, lost))
        return None


Client = _HttpClient | S3Client
_clients: MadeOnce[tuple[object, ...], Client] = MadeOnce()  # connections are of one process


def client_for(url: str) -> Client:
    """Return the client of this process for a URL. Raises MissingExtra."""
    is_s3 = url.startswith("s3:")
    names = _S3_SETTINGS if is_s3 else ()
    key = (is_s3, *map(os.environ.get, names))
    return _clients.get(key, S3Client if is_s3 else _HttpClient)


def s3_client() -> S3Client:
    """Return the S3 client of this process. Raises MissingExtra."""
    client = client_for("s3:")
    assert isinstance(client, S3Client)
    return client


def _answer(
    status: int, headers: Any, etag: str, body: Any, release: Callable[[], object] = lambda: None
) -> Answer:
    """Return a client's answer; `release` gives back the connection of a body that was read."""

    def finish(whole: bool) -> None:
        # The end of a chunked answer must be read before the connection is used again.
        if whole and not body.read(1):
            release()
        else:
            body.close()

    try:
        return Answer(*_range_of(status, headers), etag, body.readinto, finish)
    except RequestFailed:
        body.close()
        raise


def _range_of(status: int, headers: Any) -> tuple[int, int, int]:
    """Return first byte, end and size of the object from the headers of an answer."""
    text = headers.get("Content-Range", headers.get("content-range", ""))
    if status != 206 or not text:
        raise RequestFailed(
            f"status {status} without a range; this server sends whole files only", again=False
        )
    for name, plain in _NOT_ENCODED.items():
        encoding = headers.get(name, headers.get(name.lower(), ""))
        if encoding.lower() not in plain:
            raise RequestFailed(
                f"the server sends it encoded (header {_shown(f'{name}: {encoding}')}); store the "
                "object without that header, or switch compression off for it",
                again=False,
            )
    found = _RANGE.fullmatch(text)
    if found is None:
        raise RequestFailed(
            f"the server names a range that is none (header {_shown(f'Content-Range: {text}')}); "
            "check the server",
            again=False,
        )
    first, last, size = map(int, found.groups())
    return first, last + 1, size


def _shown(header: str) -> str:
    """Return the beginning of a header, printable, for a message."""
    text = ascii(header)[1:-1]
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _refusal(status: int, after: str) -> RequestFailed:
    wait_s = float(after) if after.isdecimal() else 0.0
    reason = f"status {status}"
    if status == _PROXY_LOGIN:
        reason += f": the proxy wants another login; {_LOGIN}"
    return RequestFailed(reason, status, again=status in _AGAIN, after_s=wait_s)


def _tunnel_refusal(error: object) -> RequestFailed | None:
    """Return the failure of a proxy that refuses a connection for https; None for other errors."""
    found = _TUNNEL.search(str(error))
    if found is None:
        return None
    status = int(found[1])
    if status == _PROXY_LOGIN:
        return _refusal(status, "")
    reason = f"the proxy opens no connection: it answers with status {status}"
    return RequestFailed(reason, again=status in _AGAIN)


def _refusal_by_cause(error: BaseException) -> RequestFailed | None:
    """Return the failure for an untrusted certificate or exceeded limits; None for other errors."""
    import ssl

    for found in _causes(error):
        if isinstance(found, AnswerTooSlow | AnswerTooLong):
            return RequestFailed(str(found), again=isinstance(found, AnswerTooSlow))
        if isinstance(found, ssl.SSLCertVerificationError):
            remedy = "use the host that it names, or set the clock right if it is out of date"
            if found.verify_code in _UNKNOWN_AUTHORITY:
                remedy = "name the file of its authority in SSL_CERT_FILE (AWS_CA_BUNDLE for s3://)"
            return RequestFailed(
                f"the certificate of the server is refused ({found.verify_message or found}); "
                f"{remedy}",
                again=False,
            )
    return None


def _causes(error: BaseException) -> Iterator[object]:
    """Yield an error and the errors that urllib3 and botocore put into it."""
    waiting: list[Any] = [error]
    for _ in range(_MOST_CAUSES):
        if not waiting:
            break
        found = waiting.pop()
        yield found
        if isinstance(found, BaseException):
            waiting += [found.__cause__, found.__context__, getattr(found, "reason", None)]
            waiting += [*found.args, getattr(found, "kwargs", {}).get("error")]


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return _SECRETS.sub("", text)
