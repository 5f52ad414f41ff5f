"""How strongly workers and centre attract each other: what is stable, and what is the default.

Owns the bounds of moving_rate and pull_rate and their reasons. Never moves anything.

Without gradients, u = weights - centre of p workers follows a linear rule. Where the centre pulls
with the same rate as it is moved with, its eigenvalues are:
- all read one centre, and then all push: 1 - rate * (p + 1) for the sum of u, 1 - rate for the
  differences between workers. Stable below 2 / (p + 1); from 1 / (p + 1) on the centre goes beyond
  the mean of the workers, as with 0.9 / p for p < 9, and with p = 1 the two nearly swap (-0.8).
- one after the other, each push at once: 1 - 2 rate for the pair. Stable below 1.
- one after the other, each push as late as it may be, just before that worker's next read. For many
  workers this is x'(t) = -rate * p * x(t - 1), which is stable below pi / (2 p); for 8 the bound is
  0.200 in place of 0.196, for 2 it is 0.73.

With a pull of its own the first is 1 - pull - rate * p for the sum and 1 - pull for differences,
stable for rates below (2 - pull) / p; late pushes were stable up to 1.2 / p and more for pulls from
0.3 to 1 and up to 16 workers (from the eigenvalues). 1 / p is below all of that.

What a stronger pull is for: under a steady gradient g a worker rests at u = step * g / pull, which
with one rate for both, about 1 / p, grows with p: workers with data of their own each fit that, far
from the centre. The centre then moves by rate / pull of the sum of their steps: with 1 / p and 1,
by the mean of them.
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
    """Return the rate with which the sum of the workers' distances shrinks to a tenth when all push
    at once, whatever their number, and never turns round.

    For many workers it is EASGD's 0.9 / p (arXiv:1412.6651).
    """
    return 0.9 / (workers + 1)


def greatest_moving_rate(workers: int, *, own_pull: bool = False) -> float:
    """Below it workers and centre come together, whether pushes come at once or late. own_pull:
    the centre pulls with another rate, whichever up to 1.
    """
    if own_pull:
        return 1 / workers
    return min(2 / (workers + 1), math.pi / (2 * workers))


def checked_pull_rate(given: float | None, moving_rate: float) -> float:
    """Return what to use. Raises ValueError."""
    if given is None:
        return moving_rate
    if not 0 < given <= 1:
        raise ValueError(f"ElasticAveraging: pull_rate is {given}; give one above 0, up to 1")
    return float(given)


def checked_moving_rate(given: float | None, workers: int, *, own_pull: bool, warn: bool) -> float:
    """Return what to use. Raises ValueError; warns, if asked to, from the greatest one on."""
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
