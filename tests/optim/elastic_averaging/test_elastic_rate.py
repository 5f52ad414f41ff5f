"""moving_rate: the bound of what is stable, and the default, with boxes and workers that have no
gradients.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from hsgd import ParameterBox
from hsgd.optim.elastic_averaging.easgd_rate import (
    default_moving_rate,
    greatest_moving_rate,
)
from ranks import meeting_point

__all__: list[str] = []


class Workers:
    """One value each, and a centre that is 0 at the beginning."""

    def __init__(self, box: ParameterBox, starts: list[float]) -> None:
        self._box = box
        self.weights = [np.full(1, start, np.float32) for start in starts]
        self._pushes = [np.zeros(1, np.float32) for _ in starts]

    def exchange(self, rate: float, pull: float, *, late: bool) -> float:
        """How far they were from the centre, |u|. They read one centre, and then all push; or, in
        turns, each pushes as late as it may, just before its next read.
        """
        squares = 0.0
        for weight, push in zip(self.weights, self._pushes, strict=True):
            if late:
                self._box.accumulate(push)
            squares += self._box.elastic([weight], pull, push)[1]
            push *= np.float32(rate / pull)
        for push in () if late else self._pushes:
            self._box.accumulate(push)
        return math.sqrt(squares)


def spread_after(
    rounds: int, workers: int, rate: float, pull: float | None = None, *, late: bool
) -> float:
    with ParameterBox.create(meeting_point().lstrip("@"), count=1) as box:
        crowd = Workers(box, [1.0 + worker for worker in range(workers)])
        spreads = [crowd.exchange(rate, pull or rate, late=late) for _ in range(rounds)]
    return spreads[-1] / spreads[0]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 16])
def test_below_the_greatest_moving_rate_workers_and_centre_come_together(workers: int) -> None:
    for rate in (default_moving_rate(workers), 0.95 * greatest_moving_rate(workers)):
        for late in (False, True):
            assert spread_after(300, workers, rate, late=late) < 0.1, (rate, late)


@pytest.mark.parametrize("pull", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("workers", [1, 2, 8, 16])
def test_so_they_do_when_the_centre_pulls_with_a_rate_of_its_own(workers: int, pull: float) -> None:
    bound = greatest_moving_rate(workers, own_pull=True)
    for rate in (default_moving_rate(workers), 0.95 * bound):
        for late in (False, True):
            assert spread_after(300, workers, rate, pull, late=late) < 0.1, (rate, late)


@pytest.mark.parametrize(("workers", "late"), [(1, False), (3, False), (8, True), (16, True)])
def test_above_the_greatest_moving_rate_they_go_apart(workers: int, late: bool) -> None:
    assert spread_after(100, workers, 1.1 * greatest_moving_rate(workers), late=late) > 10


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_pushes_at_once_do_not_throw_the_centre_beyond_the_workers(workers: int) -> None:
    with ParameterBox.create(meeting_point().lstrip("@"), count=1) as box:
        crowd = Workers(box, [1.0] * workers)
        rate = default_moving_rate(workers)
        crowd.exchange(rate, rate, late=False)
        centre = np.empty(1, np.float32)
        box.read(centre)
    apart = [float(weight[0] - centre[0]) for weight in crowd.weights]
    assert apart == pytest.approx([0.1] * workers)
