"""The allgather family, with Horovod's arguments and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.torch.collectives.submission import coordinator_of, hand_over, named, submit, synchronize
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.operations.movements import Allgather
from hsgd.torch.operations.reductions import AVERAGE, Allreduce

__all__ = ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]


def _start(
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool = False,
    wake: bool = True,
) -> int:
    if (handed := hand_over(tensors, "allgather", grouped=grouped, name=name)) is not None:
        return handed
    coordinator = coordinator_of(process_set, "Allgather")
    full_name = named("grouped_allgather" if grouped else "allgather", name, process_set)
    return submit(coordinator, Allgather(full_name, tensors, grouped), wake=wake)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather and return its handle; collective, not blocking."""
    return _start([tensor], name, process_set)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate the rows of all ranks in rank order; collective, blocking, differentiable.

    `tensor` has any dtype, is in host memory, contiguous and at least 1-d; the first extent may
    differ between ranks.

    Raises:
        ValueError: the tensor is unusable.
        HorovodInternalError: ranks disagree or one is lost.
    """
    gathered: Tensor = _Allgather.apply(name, process_set, False, tensor)[0]  # type: ignore[no-untyped-call]
    return gathered


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather of several tensors as one operation; the result is a tuple."""
    return _start(tensors, name, process_set, grouped=True)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Concatenate the rows of several tensors each; collective, blocking, differentiable."""
    result: tuple[Tensor, ...] = _Allgather.apply(name, process_set, True, *tensors)  # type: ignore[no-untyped-call]
    return result


class _Allgather(torch.autograd.Function):
    """As in Horovod, the gradient of a row is the mean of its gradients on all ranks."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: Any, grouped: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        ctx.process_set = process_set
        result = synchronize(_start(tensors, name, process_set, grouped=grouped, wake=False))
        return tuple(result) if grouped else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        process_set = ctx.process_set
        coordinator = coordinator_of(process_set, "Allgather")
        given = [gradient.contiguous() for gradient in gradients]
        full_name = named("allgather_backward", None, process_set)
        mean = Allreduce(full_name, given, AVERAGE, grouped=True)
        rows = _start([torch.tensor([ctx.rows], device="cpu")], None, process_set, wake=False)
        counts: Tensor = synchronize(rows)
        means = synchronize(submit(coordinator, mean, wake=False))
        begins = counts[: process_set.rank()].sum(0).tolist()
        slices = zip(means, begins, ctx.rows, strict=True)
        return (None, None, None, *(mean.narrow(0, begin, own) for mean, begin, own in slices))
