"""FirstMoments: SGD's momentum_buffer or Adam's exp_avg when models are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hsgd.optim.flat_vectors import Flattened

__all__ = ["FirstMoments", "Momentum"]

Momentum = Literal["keep", "average", "reset"]
_NAMES = ("momentum_buffer", "exp_avg")


class FirstMoments:
    """Keeps, averages or resets first moments; local.

    `vectors` are averaged with the weights: all moments for "average", else none. `how` is Gossip's
    `momentum`; `parameters` has each parameter of the optimizer once.
    """

    def __init__(self, how: Momentum, parameters: Iterable[Tensor]) -> None:
        self._how = how
        self._parameters = list(parameters) if how == "average" else []
        self._flat = Flattened([torch.zeros_like(p) for p in self._parameters])
        self.vectors = self._flat.vectors

    def adopt(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Make existing moments views of `vectors`."""
        places = self._flat.views.values()
        for parameter, place in zip(self._parameters, places, strict=True):
            state = states.get(parameter, {})
            for name in _NAMES:
                moment = state.get(name)
                if isinstance(moment, Tensor) and moment.data_ptr() != place.data_ptr():
                    place.copy_(moment)
                    state[name] = place

    def reset(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Zero the moments for "reset", since the weights are new."""
        for state in states.values() if self._how == "reset" else ():
            for name in _NAMES:
                if isinstance(state.get(name), Tensor):
                    state[name].zero_()
