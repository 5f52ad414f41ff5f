"""What a call of hsgd comes to: the error that it must raise, as class and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["told_by"]


def told_by(call: Callable[[], Any]) -> tuple[str, str]:
    """Class and line of the error that `call` must raise."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")
