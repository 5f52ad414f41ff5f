"""natural_order: the order of names by the numbers in them."""

from __future__ import annotations

import re

__all__ = ["natural_order"]

_DIGITS = re.compile("([0-9]+)")


def natural_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sorting key with which 9 comes before 10."""
    parts = _DIGITS.split(name)
    numbers = (part.lstrip("0") if at % 2 else part for at, part in enumerate(parts))
    return [(len(part) if at % 2 else 0, part) for at, part in enumerate(numbers)], name
