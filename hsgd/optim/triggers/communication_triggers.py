"""When to communicate: rules that look at the step and at how far the weights have moved.

Owns the rules and what they remember. Never communicates, and never changes a tensor. Sources: the
relative change of the local model is that of adaptive gossip (Ho, Wu, Liu, CCGRID 2018), after its
abstract; Budget is ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from hsgd.optim.triggers.weight_change import Change
from torch import Tensor

__all__ = ["Budget", "FixedPeriod", "JitteredPeriod", "RelativeChange", "Trigger"]

_FIRST_THRESHOLD = 0.05
_GAIN = 0.3  # of the threshold's logarithm, for each communication above the rate


@runtime_checkable
class Trigger(Protocol):
    """Says after each local step whether to communicate now.

    step: the number of the local step, from 1. params: the weights, tensor by tensor, the same at
    each call.
    """

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        """Return whether to communicate now; local. `lr` is the learning rate of this step."""

    def reset(self, params: Sequence[Tensor]) -> None:
        """Hear of `params` at the beginning, and after each communication that changed `params`;
        local.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; torch.save takes it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""


class _IgnoresWeights:
    """A trigger that looks at the step only; local."""

    def reset(self, params: Sequence[Tensor]) -> None:
        """Do nothing: the period goes on."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: it all follows from the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class FixedPeriod(_IgnoresWeights):
    """Every `period` steps, whatever happens: after steps period, 2 * period, and so on."""

    def __init__(self, period: int) -> None:
        self.period = _period(period)

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        """Return whether `step` is a multiple of the period."""
        return step % self.period == 0

    def __repr__(self) -> str:
        return f"FixedPeriod({self.period})"


class JitteredPeriod(_IgnoresWeights):
    """Every `period` steps on average: intervals are drawn from 1 to 2 * period - 1, evenly.

    seed: of the draws; another on each rank, or all draw alike.
    """

    def __init__(self, period: int, seed: int = 0) -> None:
        self.period, self.seed = _period(period), seed
        self._drawn = 0
        self._next = self._draw()

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        """Return whether the interval is over; draws the next one then."""
        if step < self._next:
            return False
        self._next = step + self._draw()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return where the draws are."""
        return {"drawn": self._drawn, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._drawn, self._next = state["drawn"], state["next"]

    def _draw(self) -> int:
        self._drawn += 1
        return random.Random(f"{self.seed} {self._drawn}").randint(1, 2 * self.period - 1)

    def __repr__(self) -> str:
        return f"JitteredPeriod({self.period}, seed={self.seed})"


class RelativeChange:
    """When |w - w_last| / |w_last| reaches `threshold`, w_last being the weights after the last
    communication.

    threshold: 0 communicates after every step, infinity never. lr_scaled: the threshold is that
    times lr_t / lr_0, so that a falling learning rate does not silence a rank; lr_0 is the first
    that is seen. sample: share of each large tensor that is looked at, in blocks of 4096; 1 looks
    at all, which takes 10% of a step with a batch of 16, and a tenth takes 2%.
    """

    def __init__(self, threshold: float, lr_scaled: bool = True, sample: float = 0.1) -> None:
        if not threshold >= 0:
            raise ValueError(f"RelativeChange: threshold is {threshold}; give 0 or more")
        self.threshold, self.lr_scaled = threshold, lr_scaled
        self._change = Change(sample)
        self._first_lr: float | None = None

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        """Return whether the weights have moved far enough."""
        if self._first_lr is None and lr > 0:
            self._first_lr = lr
        threshold = self.threshold
        if math.isinf(threshold):
            return False
        if self.lr_scaled and self._first_lr:
            threshold *= lr / self._first_lr
        return self._change.measure(params) >= threshold

    def reset(self, params: Sequence[Tensor]) -> None:
        """Take `params` as w_last from here on."""
        self._change.remember(params)

    def state_dict(self) -> dict[str, Any]:
        """Return w_last and lr_0."""
        return {"change": self._change.state_dict(), "first_lr": self._first_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._change.load_state_dict(state["change"])
        self._first_lr = state["first_lr"]

    def __repr__(self) -> str:
        return f"RelativeChange({self.threshold}, lr_scaled={self.lr_scaled})"


class Budget:
    """`rate` communications per step over a training of `total_steps`, of which the last `reserve`
    steps make one each.

    What an average is worth to a model depends on when it comes: a late one, at a low learning
    rate, stays, while an early one is soon forgotten. So a share of the budget is kept for the end,
    and the rest is spent evenly, in the same steps on all ranks, or by change.

    rate: above 0 and up to 1, so 0.08 sends 92% less than every step does.
    reserve: 2 * log2(ranks) steps of "exponential2" bring models together; 8 will do for 16 ranks.
        Never more than the rate allows in all.
    spend: "evenly", or "change": when the relative change reaches a threshold, in proportion to
        the learning rate, that is raised by a communication and falls without, such that the rate
        is kept.
    After `total_steps` the rate stays.
    """

    def __init__(
        self, rate: float, total_steps: int, reserve: int = 8, spend: str = "evenly"
    ) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"Budget: rate is {rate}; give communications per step, up to 1")
        if total_steps < 1 or not 0 <= reserve <= total_steps:
            raise ValueError(
                f"Budget: reserve is {reserve} of {total_steps} steps; give 0 up to all of them"
            )
        if spend not in ("evenly", "change"):
            raise ValueError(f'Budget: spend is {spend!r}; use "evenly" or "change"')
        reserve = min(reserve, math.floor(rate * total_steps))
        self.rate, self.total_steps, self.reserve, self.spend = rate, total_steps, reserve, spend
        rest = max(0.0, rate * total_steps - reserve)
        self._rest_rate = rest / max(1, total_steps - reserve)
        self._change = RelativeChange(_FIRST_THRESHOLD) if spend == "change" else None

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        """Return whether to spend one now."""
        if step > self.total_steps:
            return math.floor(step * self.rate) > math.floor((step - 1) * self.rate)
        if step > self.total_steps - self.reserve:
            return True
        if self._change is None:
            before = math.floor((step - 1) * self._rest_rate)
            return math.floor(step * self._rest_rate) > before
        due = self._rest_rate > 0 and self._change.step(step, params, lr)
        self._change.threshold *= math.exp(_GAIN * (due - self._rest_rate))
        return due

    def reset(self, params: Sequence[Tensor]) -> None:
        """Count the change from here, if it counts."""
        if self._change is not None:
            self._change.reset(params)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold and w_last, if change counts."""
        if self._change is None:
            return {}
        return {"threshold": self._change.threshold, **self._change.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        if self._change is not None:
            self._change.threshold = state["threshold"]
            self._change.load_state_dict(state)

    def __repr__(self) -> str:
        return (
            f"Budget({self.rate}, {self.total_steps}, reserve={self.reserve}, spend={self.spend!r})"
        )


def _period(period: int) -> int:
    if not isinstance(period, int) or period < 1:
        raise ValueError(f"period is {period!r}; give a number of steps, 1 or more")
    return period
