"""Equal weights on all ranks, where training begins.

Owns nothing. Never changes the root's tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from hsgd.comm.communicator import Comm
from torch import Tensor, nn

__all__ = ["broadcast_initial", "broadcast_values"]


def broadcast_initial(
    comm: Comm, params: nn.Module | Iterable[Tensor], tensors: Sequence[Tensor], root: int = 0
) -> None:
    """Give all ranks the root's values of `tensors`, or if `params` is a model, of all of its
    parameters and buffers; collective, blocking.
    """
    if isinstance(params, nn.Module):
        tensors = [*params.parameters(), *params.buffers()]
    broadcast_values(comm, tensors, root)


def broadcast_values(comm: Comm, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Give all ranks the root's values of tensors of any dtypes, on any device; collective,
    blocking.
    """
    for tensor in (one.detach() for one in tensors):
        whole = tensor.cpu().contiguous().clone().view(-1)
        raw = whole.view(torch.uint8) if whole.numel() else whole
        comm.broadcast(raw, root, name="initial weights")
        tensor.copy_(whole.view(tensor.shape))
