"""Nesterov: the outer optimizer, which uses the mean of the workers' pseudo-gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Nesterov"]


@dataclass
class Nesterov:
    """Nesterov momentum: v = momentum * v + g; weights -= lr * (g + momentum * v).

    g is the mean pseudo-gradient, which has the sign of a gradient. Source: torch.optim.SGD's
    Nesterov momentum (Sutskever et al., 2013), which DiLoCo uses (arXiv:2311.08105, algorithm 1).

    Args:
        lr: 0.7 in DiLoCo; 1 with momentum=0 takes the mean of the workers' weights. It may be
            assigned between steps, equally on all ranks.
        momentum: from 0 to below 1.
        nesterov: False: weights -= lr * v.
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
        """Make one step in place; local. Float32 of one shape; velocity starts at 0."""
        velocity.mul_(self.momentum).add_(gradient)
        if self.nesterov:
            weights.add_(gradient, alpha=-self.lr)
            weights.add_(velocity, alpha=-self.lr * self.momentum)
        else:
            weights.add_(velocity, alpha=-self.lr)

    def amend(self, weights: Tensor, velocity: Tensor, gradient: Tensor) -> None:
        """Correct the last step in place, as if its gradient had included `gradient`; local."""
        velocity.add_(gradient)
        weights.add_(gradient, alpha=-self.lr * (1 + self.momentum if self.nesterov else 1))
