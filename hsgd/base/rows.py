"""Division of an array's rows among ranks."""

from __future__ import annotations

__all__ = ["even_rows"]


def even_rows(rows: int, size: int) -> list[int]:
    """Return the rows of each of `size` ranks, as even as possible; first ranks get one more."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]
