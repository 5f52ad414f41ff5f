"""The loss of a closure, made that of all ranks: optimizers that look at it decide alike."""

from __future__ import annotations

from typing import Any

import torch
from hsgd.comm.communicator import Comm, Op
from hsgd.torch.operations.reductions import SUM
from torch import Tensor

__all__ = ["combine_loss"]


def combine_loss(comm: Comm, loss: Any, op: int) -> Any:
    """Return the mean of the ranks' losses, or their sum if gradients are summed, in the type of
    `loss`; collective, blocking. What is no number stays as it is.
    """
    if not isinstance(loss, (int, float, Tensor)) or (
        isinstance(loss, Tensor) and loss.numel() != 1
    ):
        return loss
    total = torch.as_tensor(loss).detach().to("cpu", torch.float64).reshape(1).clone()
    how: Op = "sum" if op == SUM else "mean"
    comm.allreduce(total, how, total, "optimizer loss")
    if isinstance(loss, Tensor):
        return total.reshape(loss.shape).to(loss.device, loss.dtype)
    return float(total)
