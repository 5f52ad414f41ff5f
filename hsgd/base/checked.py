"""Numbers that callers give: whole, and within what the core can hold.

Owns the wording of the refusals, each one line. Whatever has `__index__` is a whole number, so
NumPy's are, too. Never changes a value.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

__all__ = ["INT_MAX", "MOST_BYTES", "UINT32_MAX", "c_int", "extents", "natural", "seconds", "whole"]

MOST_BYTES = 2**63 - 1  # of an array: what a pointer difference can say
INT_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1


def whole(what: str, value: Any) -> int:
    """`value` as an int; TypeError for what is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{what} is {value!r} ({kind}); give a whole number") from None


def natural(what: str, value: Any, most: int = MOST_BYTES) -> int:
    """`value` as an int from 0 to `most`; ValueError, TypeError."""
    number = whole(what, value)
    if number < 0:
        raise ValueError(f"{what} is {number}; give 0 or more")
    if number > most:
        raise ValueError(f"{what} is {number}; give {most} or less")
    return number


def c_int(what: str, value: Any) -> int:
    """`value` as an int that C has, too; ValueError, TypeError. What it may be the core says."""
    number = whole(what, value)
    if abs(number) > INT_MAX:
        raise ValueError(f"{what} is {number}; give {-INT_MAX} to {INT_MAX}")
    return number


def seconds(what: str, value: Any) -> float:
    """`value` as a float; TypeError for what is no number. What it may be the core says."""
    if isinstance(value, numbers.Real):
        return float(value)
    kind = type(value).__name__
    raise TypeError(f"{what} is {value!r} ({kind}); give a number of seconds")


def extents(what: str, shape: int | Sequence[int], itemsize: int) -> list[int]:
    """The extents of an array; ValueError where one is negative, or all of it cannot be had."""
    given = shape if isinstance(shape, Sequence) else _listed(what, shape)
    sizes = [whole(f"{what}: an extent", extent) for extent in given]
    if any(size < 0 for size in sizes):
        raise ValueError(f"{what}: shape is {shape}; give extents of 0 or more")
    # An empty array may have any other extents, as long as each can be told to the other ranks.
    nbytes = max(math.prod(sizes) * itemsize, max(sizes, default=0))
    if nbytes > MOST_BYTES:
        raise ValueError(
            f"{what}: an array of shape {tuple(sizes)} has {nbytes} bytes, more than can be "
            "addressed; give smaller extents"
        )
    return sizes


def _listed(what: str, shape: Any) -> list[Any]:
    """An array of extents, an iterator of them, or one number."""
    try:
        return list(shape)
    except TypeError:
        return [whole(f"{what}: shape", shape)]
