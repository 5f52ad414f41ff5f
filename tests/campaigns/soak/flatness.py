"""Flatness: whether what a rank holds grew between the first and the last tenth of its samples.

Owns the bounds. The first fifth of all samples is the warm-up, in which pools fill and code is
loaded; of what follows, the medians of the first and of the last tenth are compared. Descriptors
and threads may not grow by one. Memory may by 64 pages: that is what pages which are touched for
the first time late, and the allocator's gaps, come to. Divided by the operations between the two
tenths it is what one operation can leave behind unseen: `unseen_bytes`. Never measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from campaigns.soak.footprint import MEASURES

__all__ = ["BOUNDS", "Growth", "growth_of", "tenths"]

WARM_UP = 0.2
BOUNDS = {"rss": 256 << 10, "pss": 256 << 10, "mapped": 256 << 10, "descriptors": 0, "threads": 0}


@dataclass(frozen=True)
class Growth:
    """Of one measure, from the first to the last tenth."""

    measure: str
    first: float
    last: float

    @property
    def by(self) -> float:
        """Bytes, or how many."""
        return self.last - self.first

    @property
    def is_leak(self) -> bool:
        """Whether it grew by more than its bound."""
        return self.by > BOUNDS[self.measure]


def tenths(count: int) -> tuple[range, range]:
    """The numbers of the samples that are compared, of `count`; ValueError below 10."""
    if count < 10:
        raise ValueError(f"{count} samples tell nothing; take at least 10")
    begin = int(WARM_UP * count)
    length = max(1, (count - begin) // 10)
    return range(begin, begin + length), range(count - length, count)


def growth_of(samples: Sequence[Sequence[int]]) -> list[Growth]:
    """Of each measure. samples: one row of all measures for each time; ValueError below 10."""
    first, last = tenths(len(samples))
    return [
        Growth(
            measure,
            statistics.median(samples[number][column] for number in first),
            statistics.median(samples[number][column] for number in last),
        )
        for column, measure in enumerate(MEASURES)
    ]
