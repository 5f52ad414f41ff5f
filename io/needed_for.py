"""Errors for optional packages that are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hsgd.errors import MissingExtra

__all__ = ["needed_for"]


@contextmanager
def needed_for(what: str, package: str) -> Iterator[None]:
    """Turn an ImportError inside the block into MissingExtra, which says what to install."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(f"{what} needs {package} ({error}); pip install {package}") from None
