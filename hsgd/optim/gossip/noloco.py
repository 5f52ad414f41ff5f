"""NoLoCo: workers train locally, and take an outer step with one partner per round.

Source: NoLoCo (arXiv:2506.10911), in the form of the authors' program: the pull towards the partner
is weighted with the outer learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.optim.flat_vectors import at_least_float32, square
from hsgd.optim.gossip.pair_averaging import Averaged
from hsgd.optim.gossip.pair_rounds import PairRounds, partner_of

__all__ = ["NoLoCo", "OuterRounds"]


@dataclass(frozen=True)
class NoLoCo:
    """Outer step of a pair: v = momentum * v + lr * mean(d) + pull * (mean(w) - w); w += v.

    w are outer weights, d is the local progress since the last round, means are over the pair; a
    rank without a partner is a pair by itself. Defaults are those of the authors' trainings.

    Args:
        lr: above 0.
        momentum: from 0 to below 1.
        pull: 0 or more; None is `lr`.
    """

    lr: float = 0.7
    momentum: float = 0.5
    pull: float | None = None

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"NoLoCo: lr is {self.lr}; give a number above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"NoLoCo: momentum is {self.momentum}; give 0 or more, below 1")
        if self.pull is not None and not self.pull >= 0:
            raise ValueError(f"NoLoCo: pull is {self.pull}; give 0 or more, or None for lr")

    def step(self, weights: Tensor, velocity: Tensor, progress: Tensor, mean: Tensor) -> None:
        """Step in place; `progress` and `mean` (of outer weights) are the pair's means; local."""
        pull = self.lr if self.pull is None else self.pull
        velocity.mul_(self.momentum).add_(progress, alpha=self.lr)
        velocity.add_(mean - weights, alpha=pull)
        weights.add_(velocity)


class OuterRounds:
    """Outer weights and rounds of one rank; the constructor is collective and blocking.

    step() waits only for the partner of its round.

    Args:
        weights: the vectors that local training changes.
        also: vectors that each round averages over the pair, such as buffers.
        seed: from which the pairs are drawn, equal on all ranks.
    """

    def __init__(
        self,
        comm: Comm,
        outer: NoLoCo,
        weights: Sequence[Tensor],
        also: Sequence[Tensor],
        *,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._rank, self._size, self._seed, self._outer = comm.rank, comm.size, seed, outer
        self._weights, self._also = list(weights), list(also)
        self._slow = [at_least_float32(weight).clone() for weight in weights]
        self._velocity = [torch.zeros_like(slow) for slow in self._slow]
        self._number = 0
        like = [*self._slow, *self._slow, *self._also]
        self.pairs = PairRounds(comm, like, timeout_s)

    def step(self, patience_s: float) -> Averaged | None:
        """Make the next round, and set weights to outer weights; blocks at most `patience_s`.

        Returns None if this rank had no partner; `committed` says whether the partner took part.
        """
        self._number += 1
        progress = [
            at_least_float32(weight) - slow
            for weight, slow in zip(self._weights, self._slow, strict=True)
        ]
        partner = partner_of(self._rank, self._size, self._number, self._seed)
        theirs = None
        if partner is not None:
            sent = [*self._slow, *progress, *self._also]
            theirs = self.pairs.swap(self._number, partner, sent, patience_s)
        squares, means = 0.0, self._slow
        if theirs is not None:
            count = len(self._slow)
            squares = sum(
                square(their - slow) for their, slow in zip(theirs[:count], self._slow, strict=True)
            )
            # Ignore a partner that diverged.
            if not all(bool(torch.isfinite(part).all()) for part in theirs):
                theirs = None
        if theirs is not None:
            means = [_mean(s, t) for s, t in zip(self._slow, theirs[:count], strict=True)]
            moved = theirs[count : 2 * count]
            progress = [_mean(p, t) for p, t in zip(progress, moved, strict=True)]
            for own, their in zip(self._also, theirs[2 * count :], strict=True):
                own.copy_(_mean(own, their))
        for k, weight in enumerate(self._weights):
            self._outer.step(self._slow[k], self._velocity[k], progress[k], means[k])
            weight.copy_(self._slow[k])
        if partner is None:
            return None
        committed = theirs is not None
        return Averaged(partner, True, committed, math.sqrt(squares) if committed else math.nan)

    def restart(self) -> None:
        """Take the weights as outer weights; local."""
        for slow, weight in zip(self._slow, self._weights, strict=True):
            slow.copy_(weight)

    def go_on(self, velocity: Sequence[Tensor] | None, rounds: int) -> None:
        """Take the weights as outer weights after `rounds` rounds; local."""
        self.restart()
        for mine, given in zip(self._velocity, velocity or self._velocity, strict=True):
            mine.copy_(given)
        self._number = rounds

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": [slow.clone() for slow in self._slow],
            "velocity": [velocity.clone() for velocity in self._velocity],
            "rounds": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state on all ranks together; raises ValueError for a round already passed."""
        if state["rounds"] < self._number:
            raise ValueError(
                f"Gossip: this state is of round {state['rounds']}, the job is at {self._number}; "
                "close() this Gossip, make a new one and load the state there"
            )
        for mine, saved in ((self._slow, state["weights"]), (self._velocity, state["velocity"])):
            for vector, value in zip(mine, saved, strict=True):
                vector.copy_(value)
        self._number = state["rounds"]


def _mean(one: Tensor, other: Tensor) -> Tensor:
    """Return the mean, with the same bits on both sides."""
    return (one + other) / 2
