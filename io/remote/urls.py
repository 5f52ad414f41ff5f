"""URLs of objects and folders.

URLs with secrets in them are refused, as URLs appear in error messages.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

__all__ = ["child_url", "is_url", "names_a_file", "parent_url", "s3_place", "url_of"]

_SCHEMES = ("http", "https", "s3")
_FILE_ENDINGS = (".h5", ".hdf5", ".hdf", ".he5", ".nc")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, of any scheme."""
    return "://" in os.fspath(path)


def url_of(path: str | os.PathLike[str]) -> str:
    """Return a URL without a slash at its end. Raises ValueError if it cannot be read."""
    text = os.fspath(path)
    scheme, _, rest = text.partition("://")
    shown = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
    if scheme not in _SCHEMES:
        raise ValueError(f"{shown}: unknown scheme {scheme!r}; use one of {', '.join(_SCHEMES)}")
    parts = urlsplit(text)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(
            f"{shown}: URLs with a user, a query or a signature are not taken, as paths stand in "
            "messages; use s3:// with credentials in the environment, or a server without them"
        )
    try:
        known = bool(parts.hostname) and (parts.port is None or scheme != "s3")
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{shown}: no host, or no valid port; write {scheme}://HOST/PATH")
    return text.rstrip("/")


def names_a_file(url: str) -> bool:
    """Return whether a URL is that of one HDF5 file, by its ending, and not of a slab folder."""
    return url.lower().endswith(_FILE_ENDINGS)


def child_url(folder: str, name: str) -> str:
    """Return the URL of a file in a folder."""
    return f"{folder}/{name}"


def parent_url(url: str) -> str:
    """Return the folder of a file."""
    return url.rpartition("/")[0]


def s3_place(url: str) -> dict[str, Any]:
    """Return bucket and key of an s3 URL, as arguments for its client."""
    bucket, _, key = url.partition("://")[2].partition("/")
    return {"Bucket": bucket, "Key": key}
