"""Broadcasts that give all ranks equal weights before training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hsgd.comm.communicator import Comm

__all__ = ["broadcast_initial", "broadcast_values"]


def broadcast_initial(
    comm: Comm, params: nn.Module | Iterable[Tensor], tensors: Sequence[Tensor], root: int = 0
) -> None:
    """Copy the root's `tensors`, or a model's whole state, to all ranks; collective, blocking."""
    if isinstance(params, nn.Module):
        tensors = [*params.parameters(), *params.buffers()]
    broadcast_values(comm, tensors, root)


def broadcast_values(comm: Comm, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Copy the root's tensors, of any dtype and device, to all ranks; collective, blocking."""
    for tensor in (one.detach() for one in tensors):
        whole = tensor.cpu().contiguous().clone().view(-1)
        raw = whole.view(torch.uint8) if whole.numel() else whole
        comm.broadcast(raw, root, name="initial weights")
        tensor.copy_(whole.view(tensor.shape))
