"""ObjectWriter: sends files to S3, complete and correct, or raises an error in one line.

s3transfer is not used: it does not return the ETag of what it sent, which shows mixed uploads, and
takes no Content-MD5 for parts. botocore's retries count tries, not the seconds of `retry_s`.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import email.utils
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hsgd.errors import DataError

from .clients import RequestFailed, s3_client
from .urls import s3_place

__all__ = ["ObjectWriter", "StoredObject", "UnseenObject", "md5_of"]

_PART_BYTES = 16 << 20  # sent by one request, and kept in memory
_MOST_PARTS = 9_000  # S3 takes 10,000
_READ_BYTES = 4 << 20
_ABANDONED_S = 24 * 3600  # an upload in parts that takes longer was given up
# In an object's metadata: the ETag is not the MD5 of an object that is encrypted or came in parts.
_MD5 = "hsgd-md5"
_NOT_THERE = frozenset({"NoSuchKey", "404"})
# Without permission to list a bucket, this is also the answer for missing objects.
_PERHAPS_THERE = frozenset({"AccessDenied", "403"})
_AGAIN = frozenset({"BadDigest", "InternalError", "RequestTimeout", "SlowDown"})
_CREDENTIALS = "check the credentials"
_REMEDIES = {
    "NoSuchBucket": "make the bucket, or check its name, AWS_DEFAULT_REGION and AWS_ENDPOINT_URL",
    "AccessDenied": f"{_CREDENTIALS}: they need s3:PutObject and s3:GetObject here",
    "403": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredObject:
    """An object in S3; `md5` is "" if unknown, `etag` is that of this upload, as S3 answered."""

    size: int
    md5: str
    etag: str = field(default="", compare=False)

    def may_be(self, sent: StoredObject) -> bool:
        """Return whether this can be the object `sent`: nothing known contradicts it."""
        if self.size != sent.size:
            return False
        return "" in (self.md5, sent.etag) or self.md5 == sent.md5 or self.etag == sent.etag


class ObjectWriter:
    """Writer of files to S3, for several threads; `retry_s` is how long one request is tried."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._stopped = threading.Event()
        self._s3 = s3_client()

    def stop(self) -> None:
        self._stopped.set()

    def check(self, url: str) -> None:
        """Raise DataError if the bucket does not exist or the credentials are refused."""
        wanted = {**s3_place(url), "Range": "bytes=0-0"}
        with contextlib.suppress(_Absent):
            self._tried(url, "looking for it", "get_object", wanted)["Body"].close()

    def find(self, url: str, *, unseen_is_absent: bool = True) -> StoredObject | None:
        """Return the object at a URL; None if there is none. Raises DataError.

        If the credentials may not see whether there is one: None, or with unseen_is_absent=False
        UnseenObject is raised.
        """
        try:
            found = self._tried(url, "looking for it", "head_object", s3_place(url))
        except UnseenObject:
            if unseen_is_absent:
                return None
            raise UnseenObject(
                f"{url}: these credentials may not see whether a dataset is there; they need "
                "s3:GetObject and s3:ListBucket, or replace what is there with --overwrite "
                "(overwrite=True)"
            ) from None
        except _Absent:
            return None
        etag = _etag_of(found)
        md5 = found.get("Metadata", {}).get(_MD5, "" if "-" in etag else etag)
        return StoredObject(int(found["ContentLength"]), md5, etag)

    def remove(self, url: str) -> None:
        """Remove an object if it exists. Raises DataError."""
        self._tried(url, "removing it", "delete_object", s3_place(url))

    def send(self, url: str, path: str, md5: str, advance: Callable[[int], object]) -> StoredObject:
        """Send a file to a URL, where it appears complete. Raises DataError.

        `md5` is that of the file; `advance` is called with the bytes of each request that is done.
        """
        place: dict[str, Any] = {**s3_place(url), "Metadata": {_MD5: md5}}
        size = os.stat(path).st_size
        parts = _parts(path, size)
        if size <= _PART_BYTES:
            body = next(parts, b"")
            if hashlib.md5(body, usedforsecurity=False).hexdigest() != md5:
                raise _changed(path)
            answer = self._tried(url, "sending it", "put_object", {**place, **_checked(body)})
            advance(size)
        else:
            answer = self._send_parts(url, path, place, parts, advance)
        return StoredObject(size, md5, _etag_of(answer))

    def _send_parts(
        self,
        url: str,
        path: str,
        place: dict[str, Any],
        parts: Iterator[bytes],
        advance: Callable[[int], object],
    ) -> Any:
        """Send a file in parts, which become an object at the end; return S3's answer.

        Removes the parts of a killed process after a day; earlier, another process may still be
        sending them.
        """
        key = s3_place(url)
        self._abort_others(url, key)
        begun = self._tried(url, "sending it", "create_multipart_upload", place)
        upload = {**key, "UploadId": begun["UploadId"]}
        total, sent = hashlib.md5(usedforsecurity=False), []
        try:
            for number, body in enumerate(parts, 1):
                total.update(body)
                wanted = {**upload, "PartNumber": number, **_checked(body)}
                answer = self._tried(url, f"sending part {number}", "upload_part", wanted)
                sent.append({"PartNumber": number, "ETag": answer["ETag"]})
                advance(len(body))
            if total.hexdigest() != place["Metadata"][_MD5]:
                raise _changed(path)
            complete = {**upload, "MultipartUpload": {"Parts": sent}}
            what = "putting its parts together"
            return self._tried(url, what, "complete_multipart_upload", complete)
        except BaseException:
            with contextlib.suppress(Exception):  # stored parts cost money; raise the first error
                self._s3.client.abort_multipart_upload(**upload)
            raise

    def _abort_others(self, url: str, key: dict[str, Any]) -> None:
        # Skipped without permission to list or abort, and if the server does not send the time.
        with contextlib.suppress(DataError, KeyError, ValueError):
            wanted = {"Bucket": key["Bucket"], "Prefix": key["Key"]}
            found = self._tried(url, "listing its parts", "list_multipart_uploads", wanted)
            latest = _time_of(found).timestamp() - _ABANDONED_S
            for other in found.get("Uploads", []):
                if other["Key"] == key["Key"] and other["Initiated"].timestamp() <= latest:
                    abort = {**key, "UploadId": other["UploadId"]}
                    self._tried(url, "removing parts", "abort_multipart_upload", abort)

    def _tried(self, url: str, what: str, operation: str, wanted: dict[str, Any]) -> Any:
        """Return the answer of the server; repeat the request until it comes.

        Raises DataError; _Absent if the object does not exist, UnseenObject if it may exist but the
        credentials may not see it.
        """
        began = time.monotonic()
        tries = 0
        while True:
            if self._stopped.is_set():
                raise DataError(f"{url}: {what} was given up")
            tries += 1
            try:
                return getattr(self._s3.client, operation)(**wanted)
            except Exception as error:
                failure = self._s3.failure(error)
                if failure is None:
                    raise
                code = _code_of(error)
                asks = operation in ("get_object", "head_object")
                if asks and code in _NOT_THERE | _PERHAPS_THERE:
                    raise (_Absent if code in _NOT_THERE else UnseenObject)(url) from None
                spent_s = time.monotonic() - began
                delay_s = failure.delay_s(tries)
                again = failure.again or code in _AGAIN
                if not again or spent_s + delay_s > self._retry_s or self._stopped.wait(delay_s):
                    text = _explain(failure, code, tries if again else 1, spent_s)
                    raise DataError(f"{url}: {what} failed {text}") from None


class _Absent(DataError):
    """There is no such object, as far as the credentials may see."""


class UnseenObject(_Absent):
    """The credentials may not see whether there is such an object."""


def _etag_of(answer: dict[str, Any]) -> str:
    etag: str = answer.get("ETag", "")
    return etag.removeprefix("W/").strip('"')


def md5_of(path: str) -> str:
    """Return the MD5 of a file in hexadecimal digits; S3 checks it. Raises DataError."""
    found = hashlib.md5(usedforsecurity=False)
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_READ_BYTES):
                found.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return found.hexdigest()


def _parts(path: str, size: int) -> Iterator[bytes]:
    nbytes = max(_PART_BYTES, -(-size // _MOST_PARTS))
    with open(path, "rb") as file:
        while body := file.read(nbytes):
            yield body


def _time_of(answer: dict[str, Any]) -> datetime.datetime:
    """Return when the server answered, by its own clock if it sends the time."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    if date is None:
        return datetime.datetime.now(datetime.timezone.utc)
    return email.utils.parsedate_to_datetime(date)


def _checked(body: bytes) -> dict[str, Any]:
    """Return a request's body with the MD5 that the server checks."""
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return {"Body": body, "ContentMD5": base64.b64encode(digest).decode()}


def _changed(path: str) -> DataError:
    return DataError(f"{path}: changed while it was sent; send the folder again")


def _code_of(error: Exception) -> str:
    """Return S3's name of an error; "" for an error without an answer."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _explain(failure: RequestFailed, code: str, tries: int, spent_s: float) -> str:
    named = f"{failure}, {code}" if code and not code.isdecimal() else str(failure)
    if tries > 1:
        return (
            f"{tries} times in {spent_s:.1f} s, at last: {named}; check the server, or try for "
            "longer (--retry-s)"
        )
    remedy = _REMEDIES.get(code)
    if remedy is None or "credentials" in named:  # already explained
        return f"({named})"
    return f"({named}); {remedy}"
