"""SealedStore: a store whose values only processes of the job can read and write.

torch's own stores accept any client. `hsgd run` draws a secret for the job, and passes it to the
ranks by a variable. Without one, as under a user's own torchrun, a store is used as it is.

A value is encrypted by a key stream (SHAKE-256 of key and nonce), then signed with the name of its
key (HMAC-SHA256). A PrefixStore's prefix is not signed: keys of a group contain its name. If a
stranger deletes a value, or restores an older one of the same key, this is not detected: keys are
used once, so only the set-up of a communicator fails.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from datetime import timedelta
from typing import Any

from hsgd.errors import LaunchError

__all__ = ["JOB_SECRET", "ForeignValue", "SealedStore", "draw_job_secret", "sealed"]

JOB_SECRET = "HSGD_JOB_SECRET"
_WHOLE, _PART = b"=", b"+"  # of a value that was set, and of one that is appended to
_NONCE_BYTES, _SIGNATURE_BYTES = 16, 32


class ForeignValue(LaunchError):
    """A value in the job's store was not written by a process of this job."""


def draw_job_secret() -> str:
    """Return a secret that nobody outside of a new job can guess; local."""
    return secrets.token_hex(32)


def sealed(store: Any) -> Any:
    """Return `store`, sealed with the secret of this job, or as it is without a secret; local."""
    secret = os.environ.get(JOB_SECRET, "")
    return SealedStore(store, secret) if secret else store


class SealedStore:
    """A Store like board.Store with encrypted, signed values; ForeignValue for other ones."""

    def __init__(self, store: Any, secret: str) -> None:
        self._store = store
        self._hides, self._signs = (
            hmac.digest(secret.encode(), use, "sha256") for use in (b"hide", b"sign")
        )

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._seal(_WHOLE, key, value))

    def get(self, key: str) -> bytes:
        return self._open(key, self._kept(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0; return the sum. Only one process at a time may."""
        number = int(self.get(key)) if self.check([key]) else 0
        self.set(key, str(number + amount))
        return number + amount

    def append(self, key: str, text: str) -> None:
        """Append to a value, which begins empty."""
        self._store.append(key, self._seal(_PART, key, text) + " ")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist, with values of the job; never blocks."""
        are_there = bool(self._store.check(keys))
        if are_there:
            for key in keys:
                self.get(key)
        return are_there

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys exist; raises the store's error after `timeout`."""
        self._store.wait(keys, timeout)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set `value` if the value is `expected` ("" if missing); return the value after that."""
        before = self._kept(key) if self._store.check([key]) else b""
        found = self._open(key, before) if before else b""
        if found != expected.encode():
            return found
        after = self._seal(_WHOLE, key, value)
        return self._open(key, _bytes(self._store.compare_set(key, before.decode(), after)))

    def _kept(self, key: str) -> bytes:
        return _bytes(self._store.get(key))

    def _seal(self, kind: bytes, key: str, value: str) -> str:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hidden = self._masked(nonce, value.encode())
        told = nonce + self._signature(kind, key, nonce, hidden) + hidden
        return (kind + base64.b64encode(told)).decode()

    def _open(self, key: str, kept: bytes) -> bytes:
        pieces = kept.split()
        kinds = [piece[:1] for piece in pieces]
        if kinds != [_WHOLE] and {*kinds} != {_PART}:
            raise _foreign(key, kept)
        found = [self._reveal(key, piece) for piece in pieces]
        if None in found:
            raise _foreign(key, kept)
        return b"".join(piece for piece in found if piece is not None)

    def _reveal(self, key: str, piece: bytes) -> bytes | None:
        """Return the sealed value; None if it was not sealed with this key and secret."""
        try:
            told = base64.b64decode(piece[1:], validate=True)
        except binascii.Error:
            return None
        nonce, hidden = told[:_NONCE_BYTES], told[_NONCE_BYTES + _SIGNATURE_BYTES :]
        signature = told[_NONCE_BYTES : _NONCE_BYTES + _SIGNATURE_BYTES]
        if not hmac.compare_digest(signature, self._signature(piece[:1], key, nonce, hidden)):
            return None
        return self._masked(nonce, hidden)

    def _signature(self, kind: bytes, key: str, nonce: bytes, hidden: bytes) -> bytes:
        name = hashlib.sha256(key.encode()).digest()  # of fixed length: splits are unique
        return hmac.digest(self._signs, kind + nonce + name + hidden, "sha256")

    def _masked(self, nonce: bytes, text: bytes) -> bytes:
        """Encrypt or decrypt; each nonce is used for one text."""
        size = len(text)
        stream = hashlib.shake_256(self._hides + nonce).digest(size)
        mixed = int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")
        return mixed.to_bytes(size, "big")


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _foreign(key: str, kept: bytes) -> ForeignValue:
    return ForeignValue(
        f"the key {key!r} of the job's store holds {len(kept)} bytes that no process of this job "
        "wrote: somebody else writes to its port, or a rank was started with another "
        f"{JOB_SECRET}; start the job again, with all ranks by one `hsgd run`, where no stranger "
        "reaches the port"
    )
