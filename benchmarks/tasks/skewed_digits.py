"""Handwritten digits whose labels are spread unevenly over ranks: the task of the gossip study.

Images, and which of them a rank has, are those of gossip_simulation.py: two pieces for each rank of
the images in the order of their labels.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from studies.gossip_simulation import digits, shards

__all__ = ["SkewedDigits"]

_PARTS = 24  # of the images for the test
_WIDTH = 1600


class SkewedDigits:
    """A perceptron of 120,010 parameters, on 1437 images of 8 x 8 pixels; 360 are held out."""

    rate: ClassVar[float] = 1e-3
    outer: ClassVar[tuple[float, float]] = (0.7, 0.9)

    def __init__(self) -> None:
        self._images, self._labels, self._tests, self._answers = digits()

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10))

    def adamw(self, net: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(net.parameters(), lr=self.rate)

    def batch(
        self, seed: int, rank: int, size: int, count: int, draw: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        own = _images_of(seed, rank, size)
        chosen = own[torch.randint(len(own), (count,), generator=draw)]
        return self._images[chosen], self._labels[chosen]

    def held_out(self, size: int) -> list[tuple[Tensor, Tensor]]:
        if _PARTS % size:
            raise ValueError(f"{size} ranks: give a divisor of {_PARTS}, the parts of the test")
        parts = zip(self._tests.chunk(_PARTS), self._answers.chunk(_PARTS), strict=True)
        return list(parts)


@functools.cache
def _images_of(seed: int, rank: int, size: int) -> Tensor:
    """By number."""
    labels = digits()[1].numpy()
    draw = np.random.default_rng([seed, 1])
    return torch.from_numpy(shards("two-classes", size, draw, labels)[rank])
