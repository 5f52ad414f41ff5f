"""Autograd functions over the operators: collectives with a new tensor, and their gradients.

Gradients are of the sum of all ranks' losses, as in torch.distributed.nn.functional. torch.compile
traces through these functions, so a compiled program has only the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hsgd.operators.schemas import ops

__all__ = ["Allgather", "Allreduce", "ReduceScatter"]


def _allreduced(tensor: Tensor, comm: int, op: str) -> Tensor:
    out = tensor.new_empty(tensor.shape)
    ops().allreduce_into(out, tensor, comm, op)
    return out


def _gathered(tensor: Tensor, size: int, comm: int) -> Tensor:
    rows, *rest = tensor.shape or (1,)
    out = tensor.new_empty((rows * size, *rest))
    ops().allgather_into(out, tensor, comm)
    return out


def _scattered(tensor: Tensor, size: int, comm: int, op: str) -> Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not tensor.dim() or rows % size:
        raise ValueError(f"reduce_scatter: {rows} rows cannot be split evenly over {size} ranks")
    out = tensor.new_empty((rows // size, *tensor.shape[1:]))
    ops().reduce_scatter_into(out, tensor, comm, op)
    return out


def _check_linear(what: str, op: str) -> None:
    if op not in ("sum", "mean"):
        raise ValueError(f"{what}: op {op!r} has no gradient; use sum or mean")


class Allreduce(torch.autograd.Function):
    """Allreduce with gradient: apply(tensor, comm, op)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: int, op: str) -> Tensor:
        ctx.comm, ctx.op = comm, op
        return _allreduced(tensor, comm, op)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _check_linear("allreduce", ctx.op)
        return _allreduced(gradients[0], ctx.comm, ctx.op), None, None


class Allgather(torch.autograd.Function):
    """Allgather with gradient: apply(tensor, size, comm)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, comm: int) -> Tensor:
        ctx.size, ctx.comm, ctx.shape = size, comm, tensor.shape
        return _gathered(tensor, size, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own = _scattered(gradients[0], ctx.size, ctx.comm, "sum")
        return own.view(ctx.shape), None, None


class ReduceScatter(torch.autograd.Function):
    """Reduce-scatter with gradient: apply(tensor, size, comm, op)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, comm: int, op: str) -> Tensor:
        ctx.size, ctx.comm, ctx.op = size, comm, op
        return _scattered(tensor, size, comm, op)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _check_linear("reduce_scatter", ctx.op)
        whole = _gathered(gradients[0], ctx.size, ctx.comm)
        return whole / ctx.size if ctx.op == "mean" else whole, None, None, None
