"""How the rows of an array are divided among ranks."""

from __future__ import annotations

__all__ = ["even_rows"]


def even_rows(rows: int, size: int) -> list[int]:
    """Rows of each of `size` ranks, as even as can be: the first ranks get one more."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]
