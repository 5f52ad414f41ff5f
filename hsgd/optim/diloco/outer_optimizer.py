"""Outer optimizers: what is done with the mean of the workers' pseudo-gradients.

Owns the formula. Never communicates. Source: torch.optim.SGD's Nesterov momentum (Sutskever et al.,
2013), which DiLoCo uses (arXiv:2311.08105, algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Nesterov"]


@dataclass
class Nesterov:
    """v = momentum * v + g; weights -= lr * (g + momentum * v), where g is the mean
    pseudo-gradient: how far the workers came, with the sign of a gradient.

    lr: 0.7 in DiLoCo; 1 with momentum=0 makes the weights the mean of the workers'. It may be
        assigned between steps, alike on all ranks.
    momentum: from 0 to below 1. nesterov: False: weights -= lr * v.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"Nesterov: lr is {self.lr}; give a number above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Nesterov: momentum is {self.momentum}; give 0 or more, below 1")

    def step(self, weights: Tensor, velocity: Tensor, gradient: Tensor) -> None:
        """One step, in place; local. All of one shape, float32; velocity is 0 at the beginning."""
        velocity.mul_(self.momentum).add_(gradient)
        if self.nesterov:
            weights.add_(gradient, alpha=-self.lr)
            weights.add_(velocity, alpha=-self.lr * self.momentum)
        else:
            weights.add_(velocity, alpha=-self.lr)

    def amend(self, weights: Tensor, velocity: Tensor, gradient: Tensor) -> None:
        """As if `gradient` had been added to that of the last step, in place; local."""
        velocity.add_(gradient)
        weights.add_(gradient, alpha=-self.lr * (1 + self.momentum if self.nesterov else 1))
