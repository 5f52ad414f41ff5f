"""The broadcast family, with Horovod's arguments and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hsgd.torch.collectives.submission import (
    coordinator_of,
    hand_over,
    local_root,
    named,
    submit,
    synchronize,
)
from hsgd.torch.job import runtime
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.operations.movements import Broadcast
from hsgd.torch.operations.reductions import AVERAGE, Allreduce

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]


def _start(
    tensor: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    wake: bool = True,
) -> int:
    handed = hand_over([tensor], "broadcast", root_rank, name, suffix="_" * in_place)
    if handed is not None:
        return handed
    coordinator = coordinator_of(process_set, "Broadcast")
    root = local_root(process_set, root_rank)
    full_name = named("broadcast", name, process_set)
    operation = Broadcast(full_name, tensor, root, root_rank, in_place=in_place)
    return submit(coordinator, operation, wake=wake)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a broadcast into a new tensor and return its handle; collective, not blocking."""
    return _start(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a broadcast in place and return its handle; collective, not blocking."""
    return _start(tensor, root_rank, name, process_set, in_place=True)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a new tensor with the root's data; collective, blocking, differentiable.

    `tensor` has any dtype, is in host memory and contiguous; shape and dtype are equal on all
    ranks. `root_rank` is a global rank, also in process sets.

    Raises:
        ValueError: the tensor or the root is unusable.
        HorovodInternalError: ranks disagree or one is lost.
    """
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor with the root's and return it; collective, blocking, no gradient."""
    handle = _start(tensor, root_rank, name, process_set, in_place=True, wake=False)
    result: Tensor = synchronize(handle)
    return result


class _Broadcast(torch.autograd.Function):
    """As in Horovod, the root gets the mean of the gradients, the others get zeros."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: Any
    ) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: Tensor = synchronize(_start(tensor, root_rank, name, process_set, wake=False))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        coordinator = coordinator_of(ctx.process_set, "Broadcast")
        full_name = named("broadcast_backward", None, ctx.process_set)
        operation = Allreduce(full_name, [gradients[0].contiguous()], AVERAGE)
        mean: Tensor = synchronize(submit(coordinator, operation, wake=False))
        if runtime.current().comm.rank != ctx.root_rank:
            mean = torch.zeros_like(mean)
        return mean, None, None, None
