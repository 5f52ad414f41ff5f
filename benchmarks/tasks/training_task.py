"""What a training of rarely.py needs of its task, and the tasks by name."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.character_model import CharacterTask
from tasks.skewed_digits import SkewedDigits

__all__ = ["TASKS", "Batch", "TrainingTask", "loss_of"]

Batch = tuple[Tensor, Tensor]
"""What the model is given, and the classes that it shall name: int64."""


class TrainingTask(Protocol):
    """Classification: the loss is the mean cross entropy."""

    rate: ClassVar[float]
    """Of AdamW, from random weights."""
    outer: ClassVar[tuple[float, float]]
    """Of DiLoCo's outer steps: learning rate and momentum. Chosen on seed 99."""

    def model(self, seed: int) -> nn.Module:
        """With the first weights of this seed; its outputs end in a dimension of classes."""

    def adamw(self, net: nn.Module) -> torch.optim.AdamW: ...

    def batch(self, seed: int, rank: int, size: int, count: int, draw: torch.Generator) -> Batch:
        """`count` samples of what rank `rank` of `size` trains on."""

    def held_out(self, size: int) -> list[Batch]:
        """Equal parts of what nobody trains on, whose number `size` divides; the same ones at each
        call.
        """


def loss_of(outputs: Tensor, classes: Tensor) -> Tensor:
    """The mean cross entropy. outputs: of the model for a batch; classes: of the batch."""
    return functional.cross_entropy(outputs.flatten(0, -2), classes.flatten())


TASKS: dict[str, type[TrainingTask]] = {"text": CharacterTask, "vision": SkewedDigits}
