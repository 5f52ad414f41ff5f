"""WarmupPolynomialLR: linear warm-up and polynomial decay of the learning rate."""

from __future__ import annotations

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

__all__ = ["WarmupPolynomialLR"]


class WarmupPolynomialLR(LRScheduler):
    """Linear warm-up from 0, then polynomial decay; a torch scheduler, stepped after each batch.

    With base rates lr_0 of the groups at the start, step t = 0, 1, ...::

        lr = lr_0 * t / warmup_steps                                               t <= warmup_steps
        lr = (lr_0 - end_lr) * (1 - (t - warmup_steps) / (total_steps - warmup_steps + 1))^power
             + end_lr                                                              afterwards

    After `total_steps` the rate stays. The first step has rate 0, as in the MLPerf training
    reference, image_classification/tensorflow2/lars_util.py.

    Args:
        optimizer: its groups' "lr" are changed.
        warmup_steps: >= 0 and <= total_steps.
        total_steps: of the training, > 0.
        power: > 0; 2 in the reference.
        end_lr: >= 0; 1e-4 in the reference.
        last_epoch: the number of the last step taken, for resuming without a state_dict.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        total_steps: int,
        power: float = 2.0,
        end_lr: float = 1e-4,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_steps <= total_steps or total_steps < 1:
            raise ValueError(
                f"WarmupPolynomialLR: {warmup_steps} warm-up steps of {total_steps}; give "
                "0 <= warmup_steps <= total_steps and total_steps >= 1"
            )
        if not power > 0 or not end_lr >= 0:
            raise ValueError(
                f"WarmupPolynomialLR: power is {power} and end_lr {end_lr}; give power > 0 and "
                "end_lr >= 0"
            )
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.power = power
        self.end_lr = end_lr
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        step = min(self.last_epoch, self.total_steps)
        if step < self.warmup_steps:
            return [base * step / self.warmup_steps for base in self.base_lrs]
        left = 1 - (step - self.warmup_steps) / (self.total_steps - self.warmup_steps + 1)
        return [(base - self.end_lr) * left**self.power + self.end_lr for base in self.base_lrs]
