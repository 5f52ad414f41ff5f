"""Outer gradients that wait for no exchange: a worker's own part is of now, that of the others of
one period ago.

Owns the formula. Never communicates. Source: Eager Updates (Kale et al., arXiv:2502.12996).
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["EagerGradient"]


class EagerGradient:
    """Of one fragment on one of `workers`. What a worker gives begin() counts in the outer steps of
    all: in its own now, in those of the others one step later, with 1 / workers each.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._own: Tensor | None = None  # under way
        self._others: Tensor | None = None  # arrived: their sum, over the number of workers

    def begin(self, own: Tensor) -> Tensor:
        """Return the gradient of the outer step to take now, as a new vector; local. own: how far
        this worker came, which is kept, and must not change.

        The others' part is what has arrived, or 0.
        """
        gradient = own / self._workers
        if self._others is not None:
            gradient.add_(self._others)
        self._own, self._others = own, None
        return gradient

    def arrive(self, mean: Tensor) -> None:
        """The mean over the workers of what they gave begin() last; local. A second call for the
        same one does nothing.
        """
        if self._own is None:
            return
        self._others = mean.sub(self._own, alpha=1 / self._workers)
        self._own = None

    @property
    def late(self) -> Tensor | None:
        """What has arrived, and no step has taken yet."""
        return self._others

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next step needs, as copies; local."""
        kept = {"own": self._own, "others": self._others}
        return {name: vector.clone() for name, vector in kept.items() if vector is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take it back; local. Without anything the others' part of the next step is 0."""
        own, others = state.get("own"), state.get("others")
        self._own = None if own is None else own.clone()
        self._others = None if others is None else others.clone()
