"""The tasks of rarely.py by name, each a classification, and their loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tasks.character_model import CharacterTask
from tasks.skewed_digits import SkewedDigits

__all__ = ["TASKS", "Batch", "TrainingTask", "loss_of"]

Batch = tuple[Tensor, Tensor]
"""What the model is given, and the classes that it shall name: int64."""


TrainingTask = CharacterTask | SkewedDigits


def loss_of(outputs: Tensor, classes: Tensor) -> Tensor:
    """The mean cross entropy. outputs: of the model for a batch; classes: of the batch."""
    return functional.cross_entropy(outputs.flatten(0, -2), classes.flatten())


TASKS: dict[str, type[TrainingTask]] = {"text": CharacterTask, "vision": SkewedDigits}
