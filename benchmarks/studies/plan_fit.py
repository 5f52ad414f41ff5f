"""The constants of `hsgd plan`, fitted to measured allreduces, and checked on unseen layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hsgd.config import Config
from hsgd.tools.plan.calibration import Calibration
from hsgd.tools.plan.model import Cluster, predict_allreduce

__all__ = ["Measured", "Residual", "descend", "fit", "residuals"]

_START = Calibration(15.0, 3.0, 20.0, 0.9, 8.0, 1.0, 1.0, 1.0, 1.0, "")
_FITTED = (
    "latency_us",
    "message_us",
    "switch_us",
    "efficiency",
    "core_gb_s",
    "core_sends_gb_s",
    "local_us",
)
_LATENCY_OF_MESSAGES = 4.0  # a message arrives later than its sender is busy with it
_Constants = TypeVar("_Constants")
_FACTORS = (2.0, 1.4, 1.15, 1.05, 1.015, 1.005)


@dataclass(frozen=True)
class Measured:
    """The median of one allreduce on one layout."""

    layout: str
    cluster: Cluster
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Residual:
    """What constants fitted to all other layouts predict."""

    case: Measured
    predicted_s: float
    is_small: bool

    @property
    def factor(self) -> float:
        """How far off, either way: at least 1."""
        ratio = self.predicted_s / self.case.seconds
        return max(ratio, 1 / ratio)


def _predicted(case: Measured, constants: Calibration) -> tuple[float, bool]:
    found = predict_allreduce(case.cluster, case.nbytes, constants, Config())
    return found.seconds, found.steps == 0


def _error(cases: Sequence[Measured], constants: Calibration) -> float:
    """Sum of squared logarithms: a factor of two counts alike for microseconds and seconds.

    A few nodes cannot tell rounds from messages, so the two are drawn together a little.
    """
    drawn = math.log(constants.latency_us / (_LATENCY_OF_MESSAGES * constants.message_us)) ** 2
    errors = (_predicted(case, constants)[0] / case.seconds for case in cases)
    return drawn + sum(math.log(error) ** 2 for error in errors)


def descend(
    best: _Constants,
    names: Sequence[str],
    error_of: Callable[[_Constants], float],
    is_allowed: Callable[[_Constants], bool],
) -> _Constants:
    """Coordinate descent on the logarithms of some fields of a dataclass, from `best` on."""
    error = error_of(best)
    for factor in _FACTORS:
        improved = True
        while improved:
            improved = False
            for name, scale in itertools.product(names, (factor, 1 / factor)):
                tried = dataclasses.replace(best, **{name: getattr(best, name) * scale})
                now = error_of(tried) if is_allowed(tried) else math.inf
                if now < error * (1 - 1e-9):
                    best, error, improved = tried, now, True
    return best


def _fit(cases: Sequence[Measured]) -> Calibration:
    return descend(
        *(_START, _FITTED, lambda tried: _error(cases, tried)),
        is_allowed=lambda tried: tried.efficiency <= 1,
    )


def residuals(cases: Sequence[Measured]) -> list[Residual]:
    """Each layout of several nodes predicted with constants that were fitted to the others.

    One node says what memory costs, which no other layout does.
    """
    found = []
    for layout in dict.fromkeys(case.layout for case in cases if case.cluster.nodes > 1):
        constants = _fit([case for case in cases if case.layout != layout])
        for case in cases:
            if case.layout == layout:
                found.append(Residual(case, *_predicted(case, constants)))
    return found


def fit(cases: Sequence[Measured], checked: Sequence[Residual], source: str) -> Calibration:
    """Constants fitted to all layouts, with the bounds that the check found."""
    constants = _fit(cases)
    rounded = {name: float(f"{getattr(constants, name):.3g}") for name in _FITTED}
    return dataclasses.replace(
        constants,
        **rounded,
        spread_small=_spread([one.factor for one in checked if one.is_small]),
        spread_large=_spread([one.factor for one in checked if not one.is_small]),
        source=source,
    )


def _spread(factors: Sequence[float]) -> float:
    """Nine of ten factors are at most this; 1 where there are none."""
    if not factors:
        return 1.0
    ordered = sorted(factors)
    return math.ceil(100 * ordered[math.ceil(0.9 * len(ordered)) - 1]) / 100
