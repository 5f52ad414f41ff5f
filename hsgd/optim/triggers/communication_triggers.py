"""Triggers: rules that say after which steps to communicate.

Sources: the relative change of the local model is that of adaptive gossip (Ho, Wu, Liu, CCGRID
2018), after its abstract; Budget is ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hsgd.optim.triggers.weight_change import Change

__all__ = ["Budget", "FixedPeriod", "JitteredPeriod", "RelativeChange", "Trigger"]

_FIRST_THRESHOLD = 0.05
_GAIN = 0.3  # change of the threshold's logarithm per communication above the rate


@runtime_checkable
class Trigger(Protocol):
    """Says after each local step whether to communicate now; local."""

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        """Return whether to communicate after local step `step`, counted from 1.

        `params` are the weights, the same tensors at each call; `lr` is this step's learning rate.
        """

    def reset(self, params: Sequence[Tensor]) -> None:
        """Note the weights at the start, and after each communication that changed them."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, in a form that torch.save accepts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what state_dict() returned."""


class _IgnoresWeights:
    """A trigger that depends on the step only."""

    def reset(self, params: Sequence[Tensor]) -> None:
        """Do nothing: the period continues."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, since the step says it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class FixedPeriod(_IgnoresWeights):
    """Fires after steps period, 2 * period, and so on."""

    def __init__(self, period: int) -> None:
        self.period = _period(period)

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        return step % self.period == 0

    def __repr__(self) -> str:
        return f"FixedPeriod({self.period})"


class JitteredPeriod(_IgnoresWeights):
    """Fires at random intervals from 1 to 2 * period - 1; give each rank another seed."""

    def __init__(self, period: int, seed: int = 0) -> None:
        self.period, self.seed = _period(period), seed
        self._drawn = 0
        self._next = self._draw()

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        """Return whether the interval is over; if so, draw the next one."""
        if step < self._next:
            return False
        self._next = step + self._draw()
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn, self._next = state["drawn"], state["next"]

    def _draw(self) -> int:
        self._drawn += 1
        return random.Random(f"{self.seed} {self._drawn}").randint(1, 2 * self.period - 1)

    def __repr__(self) -> str:
        return f"JitteredPeriod({self.period}, seed={self.seed})"


class RelativeChange:
    """Fires when |w - w_last| / |w_last| reaches `threshold`; w_last: at the last communication.

    Args:
        threshold: 0 fires after every step, infinity never.
        lr_scaled: multiply the threshold by lr_t / lr_0, so that a rank still communicates at a low
            learning rate; lr_0 is the first one seen.
        sample: share of each large tensor that is measured, in blocks of 4096. 1 measures
            everything, which takes 10% of a step with a batch of 16; a tenth takes 2%.
    """

    def __init__(self, threshold: float, lr_scaled: bool = True, sample: float = 0.1) -> None:
        if not threshold >= 0:
            raise ValueError(f"RelativeChange: threshold is {threshold}; give 0 or more")
        self.threshold, self.lr_scaled = threshold, lr_scaled
        self._change = Change(sample)
        self._first_lr: float | None = None

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        if self._first_lr is None and lr > 0:
            self._first_lr = lr
        threshold = self.threshold
        if math.isinf(threshold):
            return False
        if self.lr_scaled and self._first_lr:
            threshold *= lr / self._first_lr
        return self._change.measure(params) >= threshold

    def reset(self, params: Sequence[Tensor]) -> None:
        """Take `params` as w_last."""
        self._change.remember(params)

    def state_dict(self) -> dict[str, Any]:
        """Return w_last and lr_0."""
        return {"change": self._change.state_dict(), "first_lr": self._first_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._change.load_state_dict(state["change"])
        self._first_lr = state["first_lr"]

    def __repr__(self) -> str:
        return f"RelativeChange({self.threshold}, lr_scaled={self.lr_scaled})"


class Budget:
    """Fires `rate` times per step over `total_steps`, and in each of the last `reserve` steps.

    An average at the end, at a low learning rate, stays in the model, while an early one is soon
    forgotten. So a share of the budget is kept for the end. The rest is spent evenly, in the same
    steps on all ranks, or by change. After `total_steps` the rate stays.

    Args:
        rate: above 0 and up to 1; 0.08 sends 92% less than communication in every step.
        reserve: 2 * log2(ranks) steps of "exponential2" make models equal; 8 suffice for 16 ranks.
            Never more than the rate allows in total.
        spend: "evenly", or "change": if the relative change reaches a threshold, in proportion to
            the learning rate, which rises with a communication and falls without, to keep the rate.
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
        """Measure change from `params`, if change counts."""
        if self._change is not None:
            self._change.reset(params)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold and w_last, if change counts."""
        if self._change is None:
            return {}
        return {"threshold": self._change.threshold, **self._change.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
