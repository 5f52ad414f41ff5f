"""grid_of, number_of: the chunks of a dataset, counted in the order of its axes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["grid_of", "number_of"]


def grid_of(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Return how many chunks of a size there are along each axis."""
    return tuple(-(-length // step) for length, step in zip(shape, chunks, strict=True))


def number_of(at: Sequence[int], steps: Sequence[int], grid: Sequence[int]) -> int:
    """Return the number of the chunk that begins at `at`; -1 if none can."""
    number = 0
    for start, step, count in zip(at, steps, grid, strict=True):
        place, inside = divmod(start, step)
        if inside or place >= count:
            return -1
        number = number * count + place
    return number
