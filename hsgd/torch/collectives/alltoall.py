"""The alltoall family, with Horovod's arguments, checks and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.torch.collectives.submission import coordinator_of, hand_over, named, submit, synchronize
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.operations.movements import Alltoall

__all__ = ["alltoall", "alltoall_async"]

Splits = Tensor | Sequence[int] | None


def _start(
    tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet, *, wake: bool = True
) -> int:
    if (handed := hand_over([tensor], "alltoall", splits, name)) is not None:
        return handed
    coordinator = coordinator_of(process_set, "Alltoall")
    rows = _rows(tensor, splits, coordinator.comm.size)
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    operation = Alltoall(named("alltoall", name, process_set), tensor, rows, like)
    return submit(coordinator, operation, wake=wake)


def _rows(tensor: Tensor, splits: Splits, size: int) -> list[int]:
    """Return the number of rows for each rank; raises ValueError with Horovod's messages."""
    if tensor.dim() == 0:
        raise ValueError("alltoall: a 0-d tensor has no rows to split")
    if splits is None:
        splits = torch.empty(0, dtype=torch.int32, device="cpu")
    elif not isinstance(splits, Tensor):
        splits = torch.tensor(splits, dtype=torch.int32, device="cpu")
    if splits.dim() > 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    if splits.dtype != torch.int32:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    rows: list[int] = splits.reshape(-1).tolist()
    if not rows:
        each, rest = divmod(tensor.shape[0], size)
        if rest:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the "
                "number of workers."
            )
        return [each] * size
    if len(rows) != size:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if sum(rows) > tensor.shape[0] or min(rows) < 0:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    return rows


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an alltoall and return its handle, whose result is a pair; collective, not blocking."""
    return _start(tensor, splits, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows to each rank and concatenate those received; collective, blocking, differentiable.

    Args:
        tensor: any dtype, in host memory, contiguous, at least 1-d.
        splits: int32, rows for each rank; None sends equal numbers.
        name: equal on all ranks.
        process_set: the ranks.

    Returns:
        The received rows, and with `splits` also their number from each rank.

    Raises:
        ValueError: the tensor or the splits are unusable.
        HorovodInternalError: ranks disagree or one is lost.
    """
    result: Tensor | tuple[Tensor, Tensor] = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return result


class _Alltoall(torch.autograd.Function):
    """Gradients are sent back to the rows' ranks."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        output, received = synchronize(_start(tensor, splits, name, process_set, wake=False))
        ctx.process_set, ctx.received = process_set, received
        if splits is None:
            return output  # type: ignore[no-any-return]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        handle = _start(gradient, ctx.received, None, ctx.process_set, wake=False)
        return synchronize(handle)[0], None, None, None
