"""Default values and stability bounds of moving_rate and pull_rate.

Without gradients, u = weights - centre of p workers follows a linear rule. If the centre pulls with
the rate that it is moved with, the eigenvalues are:

- All read one centre, then all push: 1 - rate * (p + 1) for the sum of u, 1 - rate for the
  differences between workers. Stable below 2 / (p + 1); from 1 / (p + 1) on the centre overshoots
  the workers' mean, as with 0.9 / p for p < 9; with p = 1 the two nearly swap (-0.8).
- One after another, each push at once: 1 - 2 rate for the pair. Stable below 1.
- One after another, each push as late as possible, just before that worker's next read. For many
  workers this is x'(t) = -rate * p * x(t - 1), which is stable below pi / (2 p); for 8 workers the
  bound is 0.200 instead of 0.196, for 2 it is 0.73.

With a separate pull rate the first case has 1 - pull - rate * p for the sum and 1 - pull for
differences, stable for rates below (2 - pull) / p. Late pushes were stable up to 1.2 / p and more
for pulls from 0.3 to 1 and up to 16 workers (from the eigenvalues). 1 / p is below all of these.

Why a stronger pull helps: under a steady gradient g a worker rests at u = step * g / pull. With one
rate for both, about 1 / p, this grows with p, and workers with different data each fit their own,
far from the centre. The centre then moves by rate / pull of the sum of their steps: with 1 / p and
1, by the mean of them.
"""

from __future__ import annotations

import math
import warnings

__all__ = [
    "checked_moving_rate",
    "checked_pull_rate",
    "default_moving_rate",
    "greatest_moving_rate",
]


def default_moving_rate(workers: int) -> float:
    """Return 0.9 / (workers + 1), which shrinks the sum of distances to a tenth without overshoot.

    This holds if all workers push at once. For many workers it is EASGD's 0.9 / p
    (arXiv:1412.6651).
    """
    return 0.9 / (workers + 1)


def greatest_moving_rate(workers: int, *, own_pull: bool = False) -> float:
    """Return the bound below which workers and centre converge, for prompt and late pushes.

    `own_pull`: the centre pulls with a separate rate, of at most 1.
    """
    if own_pull:
        return 1 / workers
    return min(2 / (workers + 1), math.pi / (2 * workers))


def checked_pull_rate(given: float | None, moving_rate: float) -> float:
    """Return the pull rate to use; raises ValueError."""
    if given is None:
        return moving_rate
    if not 0 < given <= 1:
        raise ValueError(f"ElasticAveraging: pull_rate is {given}; give one above 0, up to 1")
    return float(given)


def checked_moving_rate(given: float | None, workers: int, *, own_pull: bool, warn: bool) -> float:
    """Return the moving rate to use; raises ValueError, warns from the greatest stable rate on."""
    if given is None:
        return default_moving_rate(workers)
    if not 0 < given <= 1:
        raise ValueError(f"ElasticAveraging: moving_rate is {given}; give one above 0, up to 1")
    bound = greatest_moving_rate(workers, own_pull=own_pull)
    if given >= bound and warn:
        warnings.warn(
            f"ElasticAveraging: moving_rate {given:g} is not below {bound:.3g}; {workers} workers "
            "that push at the same time, or late, may make the centre oscillate with growing "
            "amplitude; give less, or None",
            stacklevel=4,
        )
    return float(given)
