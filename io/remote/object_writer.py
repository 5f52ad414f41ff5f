"""Files to objects of S3: whole and right, or an error in one line.

Not s3transfer: it tells the ETag of nothing that it has sent, by which mixed uploads are noticed,
and takes no Content-MD5 of its parts; botocore's retries count tries, not the seconds of
`retry_s`.
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
_ABANDONED_S = 24 * 3600  # a file whose parts do not come together in a day was given up
# In an object's metadata: its ETag is not its MD5 if it came in parts, or is encrypted.
_MD5 = "hsgd-md5"
_NOT_THERE = frozenset({"NoSuchKey", "404"})
# Who may not list a bucket gets this answer for objects that are not there, too.
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
    """What lies under a key. md5: "" where that is not known. etag: of this very object, as S3
    answered.
    """

    size: int
    md5: str
    etag: str = field(default="", compare=False)

    def may_be(self, sent: StoredObject) -> bool:
        """Say whether it can be what was sent: nothing that the store tells denies it."""
        if self.size != sent.size:
            return False
        return "" in (self.md5, sent.etag) or self.md5 == sent.md5 or self.etag == sent.etag


class ObjectWriter:
    """Sends files to S3, and asks what is there; safe to use from several threads.

    retry_s: how long one request is tried.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._stopped = threading.Event()
        self._s3 = s3_client()

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped.set()

    def check(self, url: str) -> None:
        """Raise DataError when there is no such bucket, or the credentials do not hold."""
        wanted = {**s3_place(url), "Range": "bytes=0-0"}
        with contextlib.suppress(_Absent):
            self._tried(url, "looking for it", "get_object", wanted)["Body"].close()

    def find(self, url: str, *, unseen_is_absent: bool = True) -> StoredObject | None:
        """What lies there. unseen_is_absent: None also where nobody may ask, else UnseenObject.
        Raises DataError.
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
        """Remove an object, if it is there. Raises DataError."""
        self._tried(url, "removing it", "delete_object", s3_place(url))

    def send(self, url: str, path: str, md5: str, advance: Callable[[int], object]) -> StoredObject:
        """Put a file under a key, where it appears whole. md5: of the file. advance: told the bytes
        of each request that is done. Raises DataError.
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
        """The parts become an object when all are there. What a process left of it that was killed
        goes, after a day: before, another process may be sending it. Returns what S3 answers.
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
            with contextlib.suppress(Exception):  # parts cost money; the first error counts
                self._s3.client.abort_multipart_upload(**upload)
            raise

    def _abort_others(self, url: str, key: dict[str, Any]) -> None:
        # Who may not list or abort leaves them, and so do servers that do not tell the time.
        with contextlib.suppress(DataError, KeyError, ValueError):
            wanted = {"Bucket": key["Bucket"], "Prefix": key["Key"]}
            found = self._tried(url, "listing its parts", "list_multipart_uploads", wanted)
            latest = _time_of(found).timestamp() - _ABANDONED_S
            for other in found.get("Uploads", []):
                if other["Key"] == key["Key"] and other["Initiated"].timestamp() <= latest:
                    abort = {**key, "UploadId": other["UploadId"]}
                    self._tried(url, "removing parts", "abort_multipart_upload", abort)

    def _tried(self, url: str, what: str, operation: str, wanted: dict[str, Any]) -> Any:
        """The answer of the server, asked until it comes. Raises DataError, of what is not there
        (or perhaps not, for who may not look) _Absent.
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
    """There is no such object, as far as one may know."""


class UnseenObject(_Absent):
    """There may be one, for who may look."""


def _etag_of(answer: dict[str, Any]) -> str:
    etag: str = answer.get("ETag", "")
    return etag.removeprefix("W/").strip('"')


def md5_of(path: str) -> str:
    """Return the MD5 of a file, which S3 checks, in hexadecimal digits. Raises DataError."""
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
    """When the server answered, by its own clock where it says so."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    if date is None:
        return datetime.datetime.now(datetime.timezone.utc)
    return email.utils.parsedate_to_datetime(date)


def _checked(body: bytes) -> dict[str, Any]:
    """A body with what the server checks it against."""
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return {"Body": body, "ContentMD5": base64.b64encode(digest).decode()}


def _changed(path: str) -> DataError:
    return DataError(f"{path}: changed while it was sent; send the folder again")


def _code_of(error: Exception) -> str:
    """What S3 calls an error; "" for one without an answer."""
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
    if remedy is None or "credentials" in named:  # says already that there are none
        return f"({named})"
    return f"({named}); {remedy}"
