"""What torch knows of the operators of `torch.ops.hsgd`: arguments, shapes of results, gradients.

Owns the definitions, which are made once, whoever implements them: see kernels.py. The size of a
communicator is an argument wherever a shape depends on it: torch keeps compiled code on disk, and
finds it by the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hsgd.operators import kernels

__all__ = ["define", "ops"]

_SCHEMAS = {
    "allreduce": "(Tensor tensor, int comm, str op) -> Tensor",
    "allreduce_": "(Tensor(a!) tensor, int comm, str op) -> ()",
    "broadcast_": "(Tensor(a!) tensor, int root, int comm) -> ()",
    "allgather": "(Tensor tensor, int size, int comm) -> Tensor",
    "reduce_scatter": "(Tensor tensor, int size, int comm, str op) -> Tensor",
}


def ops() -> Any:
    """torch.ops.hsgd; local."""
    return torch.ops.hsgd


@functools.cache
def define() -> None:
    """Make the operators known to torch, with kernels for CPU tensors; local, once."""
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"hsgd::{name}", schema)
    fakes: list[tuple[str, Callable[..., Tensor | None]]] = [
        ("allreduce", _fake_allreduce),
        ("allreduce_", _fake_nothing),
        ("broadcast_", _fake_nothing),
        ("allgather", _fake_allgather),
        ("reduce_scatter", _fake_reduce_scatter),
    ]
    for name, fake in fakes:
        torch.library.register_fake(f"hsgd::{name}", fake)
    for name, backward, remember in (
        ("allreduce", _allreduce_backward, _remember_reduction),
        ("allgather", _allgather_backward, _remember_gathering),
        ("reduce_scatter", _reduce_scatter_backward, _remember_scattering),
    ):
        torch.library.register_autograd(f"hsgd::{name}", backward, setup_context=remember)
    kernels.install()


def _fake_allreduce(tensor: Tensor, comm: int, op: str) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _fake_nothing(tensor: Tensor, *_: Any) -> None:
    return None


def _fake_allgather(tensor: Tensor, size: int, comm: int) -> Tensor:
    rows, *rest = tensor.shape or (1,)
    return tensor.new_empty((rows * size, *rest))


def _fake_reduce_scatter(tensor: Tensor, size: int, comm: int, op: str) -> Tensor:
    rows, *rest = tensor.shape
    return tensor.new_empty((rows // size, *rest))


def _remember_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.comm, ctx.op = inputs


def _allreduce_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    _check_linear("allreduce", ctx.op)
    return ops().allreduce(gradient, ctx.comm, ctx.op), None, None


def _remember_gathering(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensor, ctx.size, ctx.comm = inputs
    ctx.is_row = tensor.dim() == 0


def _allgather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    own = ops().reduce_scatter(gradient, ctx.size, ctx.comm, "sum")
    return own.squeeze(0) if ctx.is_row else own, None, None


def _remember_scattering(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.size, ctx.comm, ctx.op = inputs


def _reduce_scatter_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    _check_linear("reduce_scatter", ctx.op)
    whole = ops().allgather(gradient, ctx.size, ctx.comm)
    return whole / ctx.size if ctx.op == "mean" else whole, None, None, None


def _check_linear(what: str, op: str) -> None:
    if op not in ("sum", "mean"):
        raise ValueError(f"{what}: op {op!r} has no gradient; sum and mean have")
