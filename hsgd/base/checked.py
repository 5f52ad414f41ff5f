"""Checks of numbers from callers, with refusals of one line; `__index__` makes a whole number."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

__all__ = ["INT_MAX", "MOST_BYTES", "UINT32_MAX", "c_int", "extents", "natural", "seconds", "whole"]

MOST_BYTES = 2**63 - 1  # of an array: the largest pointer difference
INT_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1


def whole(what: str, value: Any) -> int:
    """Return `value` as an int; TypeError if it is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{what} is {value!r} ({kind}); give a whole number") from None


def natural(what: str, value: Any, most: int = MOST_BYTES) -> int:
    """Return `value` as an int from 0 to `most`; ValueError or TypeError if it is not one."""
    number = whole(what, value)
    if number < 0:
        raise ValueError(f"{what} is {number}; give 0 or more")
    if number > most:
        raise ValueError(f"{what} is {number}; give {most} or less")
    return number


def c_int(what: str, value: Any) -> int:
    """Return `value` as an int that fits a C int; the core checks the allowed range.

    Raises TypeError if it is no whole number, ValueError if it does not fit.
    """
    number = whole(what, value)
    if abs(number) > INT_MAX:
        raise ValueError(f"{what} is {number}; give {-INT_MAX} to {INT_MAX}")
    return number


def seconds(what: str, value: Any) -> float:
    """Return `value` as a float; TypeError if it is no number. The core checks the range."""
    if isinstance(value, numbers.Real):
        return float(value)
    kind = type(value).__name__
    raise TypeError(f"{what} is {value!r} ({kind}); give a number of seconds")


def extents(what: str, shape: int | Sequence[int], itemsize: int) -> list[int]:
    """Return the extents of an array; ValueError if one is negative or the array is too large."""
    given = shape if isinstance(shape, Sequence) else _listed(what, shape)
    sizes = [whole(f"{what}: an extent", extent) for extent in given]
    if any(size < 0 for size in sizes):
        raise ValueError(f"{what}: shape is {shape}; give extents of 0 or more")
    # An empty array may have any other extents, if each of them fits the messages to other ranks.
    nbytes = max(math.prod(sizes) * itemsize, max(sizes, default=0))
    if nbytes > MOST_BYTES:
        raise ValueError(
            f"{what}: an array of shape {tuple(sizes)} has {nbytes} bytes, more than can be "
            "addressed; give smaller extents"
        )
    return sizes


def _listed(what: str, shape: Any) -> list[Any]:
    try:
        return list(shape)
    except TypeError:
        return [whole(f"{what}: shape", shape)]
