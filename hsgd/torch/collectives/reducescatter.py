"""The reducescatter family, with Horovod's arguments and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.torch.collectives.allgather import grouped_allgather
from hsgd.torch.collectives.submission import coordinator_of, hand_over, named, submit, synchronize
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.exceptions import HorovodInternalError
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.operations.reductions import AVERAGE, SUM, Reducescatter

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def _start(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool = False,
    wake: bool = True,
) -> int:
    factors: dict[str, Any] = {"prescale_factor": scales[0], "postscale_factor": scales[1]}
    handed = hand_over(tensors, "reducescatter", name, op, grouped=grouped, **factors)
    if handed is not None:
        return handed
    coordinator = coordinator_of(process_set, "Reducescatter")
    full_name = named("grouped_reducescatter" if grouped else "reducescatter", name, process_set)
    operation = Reducescatter(full_name, tensors, op, scales, grouped=grouped)
    if op not in (AVERAGE, SUM):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    return submit(coordinator, operation, wake=wake)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter and return its handle; collective, not blocking."""
    return _start([tensor], name, op, (prescale_factor, postscale_factor), process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine tensors and return this rank's rows; collective, blocking, differentiable.

    `tensor` is as for allreduce, at least 1-d; `op` is Average or Sum. Rows are split evenly, and
    the first ranks get one more. Raises as allreduce.
    """
    compressed, context = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    (reduced,) = _Reducescatter.apply(name, op, scales, process_set, False, compressed)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, context)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors as one operation; the result is a tuple."""
    scales = (prescale_factor, postscale_factor)
    return _start(tensors, name, op, scales, process_set, grouped=True)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Combine several tensors, return this rank's rows; collective, blocking, differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    reduced = _Reducescatter.apply(  # type: ignore[no-untyped-call]
        name, op, scales, process_set, True, *(tensor for tensor, _ in pairs)
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


class _Reducescatter(torch.autograd.Function):
    """As in Horovod, gradients are gathered, times the ranks for Sum, times both factors."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        scales: tuple[float, float],
        process_set: Any,
        grouped: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.factor = scales[0] * scales[1]
        ctx.process_set = process_set
        handle = _start(tensors, name, op, scales, process_set, grouped=grouped, wake=False)
        ctx.factor *= process_set.size() if op == SUM else 1
        result = synchronize(handle)
        return tuple(result) if grouped else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [(gradient * ctx.factor).contiguous() for gradient in gradients]
        gathered = grouped_allgather(scaled, process_set=ctx.process_set)
        return (None, None, None, None, None, *gathered)
