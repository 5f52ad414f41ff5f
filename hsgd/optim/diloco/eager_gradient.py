"""EagerGradient: outer gradients that do not wait for an exchange."""

from __future__ import annotations

from torch import Tensor

__all__ = ["EagerGradient"]


class EagerGradient:
    """The outer gradient of one fragment on one of `workers`; local.

    It is the worker's own current part plus the others' parts of one period ago, each weighted 1 /
    workers. Source: Eager Updates (Kale et al., arXiv:2502.12996).
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._own: Tensor | None = None  # in the exchange under way
        self._others: Tensor | None = None  # the others' parts that arrived, as sum / workers

    def begin(self, own: Tensor) -> Tensor:
        """Return the gradient of the outer step to take now, as a new vector; local.

        `own` is this worker's pseudo-gradient; it is kept and must not change. The others' part is
        what has arrived, or 0.
        """
        gradient = own / self._workers
        if self._others is not None:
            gradient.add_(self._others)
        self._own, self._others = own, None
        return gradient

    def arrive(self, mean: Tensor) -> None:
        """Store the mean of what workers last gave to begin(); idempotent, local."""
        if self._own is None:
            return
        self._others = mean.sub(self._own, alpha=1 / self._workers)
        self._own = None

    @property
    def late(self) -> Tensor | None:
        """What has arrived and was not used in a step yet."""
        return self._others

    def state_dict(self) -> dict[str, Tensor]:
        kept = {"own": self._own, "others": self._others}
        return {name: vector.clone() for name, vector in kept.items() if vector is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the result of state_dict(); local.

        After {} the next outer gradient has this worker's part only.
        """
        own, others = state.get("own"), state.get("others")
        self._own = None if own is None else own.clone()
        self._others = None if others is None else others.clone()
