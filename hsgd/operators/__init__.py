"""Collectives as operators of torch, `torch.ops.hsgd`, which torch.compile traces.

On CPU tensors a compiled program passes them to the core without Python. An operator takes only
numbers, texts and tensors: group(comm) gives a communicator its number. All functions but group()
are collective over its ranks and blocking, give bitwise the results of Comm, and must be called in
the same order on all ranks: compile the same program on all of them. The same holds for backward():
call it on all ranks, or on none.

    group = hsgd.operators.group(comm)

    @torch.compile
    def layer(x, weight):
        return hsgd.operators.allreduce(x @ weight, group)

Tensors are on the CPU, of float32, float64, float16, bfloat16, int8, int32, int64 or uint8, of
equal dtype and shape on all ranks; those that are not contiguous are copied. Errors are
RuntimeErrors (or ValueErrors and TypeErrors for impossible values) with the message of the error
that Comm raises: a lost rank, a timeout, a mismatch. Ctrl-C ends the wait and breaks the
communicator: with a KeyboardInterrupt if operators go through Python, else with a RuntimeError.
"""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm, Op
from hsgd.errors import HsgdError
from hsgd.operators import kernels, schemas
from hsgd.operators.gradients import Allgather, Allreduce, ReduceScatter

__all__ = ["Group", "allgather", "allreduce", "allreduce_", "broadcast_", "group", "reduce_scatter"]


class Group(NamedTuple):
    """A communicator for operators; both fields are constants to torch.compile.

    Attributes:
        number: of the communicator in this process, in the order of calls of group().
        size: number of its ranks.
    """

    number: int
    size: int


_numbers = itertools.count()
_groups: weakref.WeakKeyDictionary[Comm, Group] = weakref.WeakKeyDictionary()


def group(comm: Comm) -> Group:
    """Give `comm` a number for operators; local, the same for the same communicator.

    Raises HsgdError if `comm` is closed. Close `comm` as usual; operators that are called later
    raise RuntimeError.
    """
    if comm.closed:
        raise HsgdError("operators.group: this communicator is closed")
    known = _groups.get(comm)
    if known is None:
        schemas.define()
        known = Group(next(_numbers), comm.size)
        kernels.keep(known.number, comm)
        comm.before_close(weakref.finalize(comm, kernels.forget, known.number))
        _groups[comm] = known
    return known


def allreduce(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """Combine `tensor` over all ranks elementwise, into a new one: see Comm.allreduce.

    Differentiable for "sum" and "mean": the gradient is the allreduce of the ranks' gradients with
    the same op.
    """
    result: Tensor = Allreduce.apply(tensor, group.number, op)  # type: ignore[no-untyped-call]
    return result


def allreduce_(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """Combine `tensor` in place and return it; ValueError if autograd records it."""
    _check_unrecorded("allreduce_", tensor)
    schemas.ops().allreduce_(tensor, group.number, op)
    return tensor


def allgather(tensor: Tensor, group: Group) -> Tensor:
    """Join the tensors of all ranks along the first dimension, in rank order: `(size * rows, ...)`.

    Unlike Comm.allgather it takes the same number of rows from each rank, and raises on all if they
    differ. Differentiable: the gradient is the reduce_scatter of the ranks' gradients.
    """
    args = (tensor, group.size, group.number)
    result: Tensor = Allgather.apply(*args)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """Combine `tensor` over all ranks, and keep this rank's rows: `(rows / size, ...)`.

    Rows must be a multiple of the ranks. Differentiable for "sum" and "mean": the gradient is the
    allgather of the ranks' gradients, divided by the size for "mean".
    """
    args = (tensor, group.size, group.number, op)
    result: Tensor = ReduceScatter.apply(*args)  # type: ignore[no-untyped-call]
    return result


def broadcast_(tensor: Tensor, group: Group, root: int = 0) -> Tensor:
    """Overwrite `tensor` by that of `root`, and return it; ValueError if autograd records it."""
    _check_unrecorded("broadcast_", tensor)
    schemas.ops().broadcast_(tensor, root, group.number)
    return tensor


def _check_unrecorded(what: str, tensor: Tensor) -> None:
    """Refuse in-place operators, which have no gradient, on tensors that autograd records."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{what}: this tensor requires grad, and the operator has none; use torch.no_grad(), "
            "or allreduce"
        )
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensor)
