"""The allreduce family: plain, in place, asynchronous, grouped, sparse, differentiable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.torch.collectives.allgather import allgather_async
from hsgd.torch.collectives.submission import coordinator_of, hand_over, named, submit, synchronize
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.operations.adasum import Adasum
from hsgd.torch.operations.reductions import ADASUM, AVERAGE, SUM, Allreduce

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "reduce_op",
    "sparse_allreduce_async",
]

_Scales = tuple[float, float]


def reduce_op(op: int | None, average: bool | None) -> int:
    """Return the operation for `op` and the old argument `average`; raises ValueError for both."""
    if op is not None:
        if average is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        return op
    if average is None:
        return AVERAGE
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0",
        DeprecationWarning,
        stacklevel=3,
    )
    return AVERAGE if average else SUM


def _start(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    scales: _Scales,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    grouped: bool = False,
    wake: bool = True,
) -> int:
    handed = hand_over(
        tensors,
        "allreduce",
        grouped=grouped,
        suffix="_" * in_place,
        name=name,
        op=op,
        prescale_factor=scales[0],
        postscale_factor=scales[1],
    )
    if handed is not None:
        return handed
    coordinator = coordinator_of(process_set, "Allreduce")
    kind = "grouped_allreduce" if grouped else "allreduce"
    operation = (Adasum if op == ADASUM else Allreduce)(
        named(kind, name, process_set), tensors, op, scales, in_place=in_place, grouped=grouped
    )
    return submit(coordinator, operation, wake=wake)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce into a new tensor and return its handle; collective, not blocking.

    Arguments are those of allreduce. `tensor` must not be written before the operation is done.
    """
    scales = (prescale_factor, postscale_factor)
    return _start([tensor], name, reduce_op(op, average), scales, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce in place and return its handle; collective, not blocking."""
    scales = (prescale_factor, postscale_factor)
    return _start([tensor], name, reduce_op(op, average), scales, process_set, in_place=True)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine tensors over a process set into a new tensor; collective, blocking, differentiable.

    Args:
        tensor: float32, float64, float16, bfloat16, int8, int32, int64 or uint8 in host memory,
            contiguous; shape and dtype equal on all ranks.
        average: old form of `op`.
        name: equal on all ranks; None numbers the unnamed operations.
        compression: how the tensor is sent.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies before the reduction, equal on all ranks.
        postscale_factor: multiplies after it, equal on all ranks.
        process_set: the ranks.

    Raises:
        ValueError: the tensor is unusable.
        HorovodInternalError: ranks disagree or one is lost.
    """
    compressed, context = compression.compress(tensor)
    chosen, scales = reduce_op(op, average), (prescale_factor, postscale_factor)
    if compressed.requires_grad and torch.is_grad_enabled():
        (reduced,) = _Allreduce.apply(name, chosen, scales, process_set, False, compressed)  # type: ignore[no-untyped-call]
    else:
        reduced = synchronize(_start([compressed], name, chosen, scales, process_set, wake=False))
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine tensors in place and return `tensor`; collective, blocking, not differentiable."""
    chosen, scales = reduce_op(op, average), (prescale_factor, postscale_factor)
    handle = _start([tensor], name, chosen, scales, process_set, in_place=True, wake=False)
    result: Tensor = synchronize(handle)
    return result


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of several tensors as one operation; the result is a tuple."""
    scales = (prescale_factor, postscale_factor)
    return _start(tensors, name, reduce_op(op, average), scales, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of several tensors in place, as one operation."""
    chosen, scales = reduce_op(op, average), (prescale_factor, postscale_factor)
    return _start(tensors, name, chosen, scales, process_set, in_place=True, grouped=True)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Combine several tensors as one operation; collective, blocking, differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    chosen, scales = reduce_op(op, average), (prescale_factor, postscale_factor)
    reduced = _Allreduce.apply(  # type: ignore[no-untyped-call]
        name, chosen, scales, process_set, True, *(tensor for tensor, _ in pairs)
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Combine several tensors in place; collective, blocking, not differentiable."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    result: tuple[Tensor, ...] = synchronize(handle)
    return result


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum (or the mean, for Average) of sparse COO tensors; collective, not blocking.

    Returns a function that waits and returns the sparse result, which may have duplicate entries.
    """
    indices = tensor._indices().transpose(0, 1).contiguous()
    of_indices = allgather_async(indices, f"{name}.indices", process_set)
    of_values = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)

    def finish() -> Tensor:
        values, places = synchronize(of_values), synchronize(of_indices)
        if op == AVERAGE:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(
            places.transpose(0, 1),
            values,
            tensor.size(),
            device=values.device,
            check_invariants=False,
        )

    return finish


class _Allreduce(torch.autograd.Function):
    """The gradient of a reduction over ranks is the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        scales: _Scales,
        process_set: Any,
        grouped: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.arguments = (op, scales, process_set, grouped)
        return _Allreduce.reduced(tensors, name, *ctx.arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = [gradient.contiguous() for gradient in gradients]
        return (None, None, None, None, None, *_Allreduce.reduced(given, None, *ctx.arguments))

    @staticmethod
    def reduced(
        tensors: Sequence[Tensor],
        name: str | None,
        op: int,
        scales: _Scales,
        process_set: Any,
        grouped: bool,
    ) -> tuple[Tensor, ...]:
        handle = _start(tensors, name, op, scales, process_set, grouped=grouped, wake=False)
        result = synchronize(handle)
        return tuple(result) if grouped else (result,)
