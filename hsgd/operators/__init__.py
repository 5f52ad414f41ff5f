"""Collectives as operators of torch, `torch.ops.hsgd`: torch.compile traces them, and on CPU
tensors they go to the core without Python.

Owns the public functions and the numbers of communicators. An operator takes numbers, texts and
tensors only: group(comm) gives a communicator its number. All functions but group() are collective
over its ranks and blocking, give the bits that Comm gives, and come in the same order on all ranks:
a compiled program keeps it where all ranks compile the same program.

    group = hsgd.operators.group(comm)

    @torch.compile
    def layer(x, weight):
        return hsgd.operators.allreduce(x @ weight, group)

Tensors are on the CPU, of float32, float64, float16, bfloat16, int8, int32, int64 or uint8, of
equal dtype and shape on all ranks; those that are not contiguous are copied. Errors are
RuntimeErrors (or ValueErrors, TypeErrors for values that cannot work) with the line of the error
that Comm raises: a lost rank, a timeout, descriptions that differ. Ctrl-C ends the wait with such
an error, too.

Gradients are those of the sum of all ranks' losses, as torch.distributed.nn.functional has them.
"""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple

from torch import Tensor

from hsgd.comm import Comm, Op
from hsgd.errors import HsgdError
from hsgd.operators import kernels, schemas

__all__ = [
    "Group",
    "allgather",
    "allreduce",
    "allreduce_",
    "broadcast_",
    "group",
    "reduce_scatter",
]


class Group(NamedTuple):
    """What operators take of a communicator.

    number: of the communicator in this process, by the order of calls of group(); size: its ranks.
    Both are constants to torch.compile.
    """

    number: int
    size: int


_numbers = itertools.count()
_groups: weakref.WeakKeyDictionary[Comm, Group] = weakref.WeakKeyDictionary()


def group(comm: Comm) -> Group:
    """Give `comm` a number for operators; local, the same for the same communicator.

    Call it in the same order on all runs of a program whose compiled code torch caches: the number
    is part of the code. Raises HsgdError where `comm` is closed. Close `comm` as ever; operators
    that are called later raise RuntimeError.
    """
    if comm.closed:
        raise HsgdError("operators.group: this communicator is closed")
    known = _groups.get(comm)
    if known is None:
        schemas.define()
        known = Group(next(_numbers), comm.size)
        kernels.keep(known.number, comm)
        number = known.number  # not `known`: a communicator that nobody refers to goes
        comm.before_close(lambda: kernels.forget(number))
        _groups[comm] = known
    return known


def allreduce(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """Combine `tensor` over all ranks elementwise, into a new one: see Comm.allreduce.

    Differentiable for "sum" and "mean": the gradient is the allreduce of the ranks' gradients with
    the same op.
    """
    result: Tensor = schemas.ops().allreduce(tensor, group.number, op)
    return result


def allreduce_(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """allreduce() in place, not differentiable. Returns `tensor`."""
    schemas.ops().allreduce_(tensor, group.number, op)
    return tensor


def allgather(tensor: Tensor, group: Group) -> Tensor:
    """Join the tensors of all ranks along the first dimension, in rank order: `(size * rows, ...)`.

    Unlike Comm.allgather it takes as many rows from each rank, and raises on all where they differ.
    Differentiable: the gradient is the reduce_scatter of the ranks' gradients.
    """
    result: Tensor = schemas.ops().allgather(tensor, group.size, group.number)
    return result


def reduce_scatter(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """Combine `tensor` over all ranks, and keep this rank's rows: `(rows / size, ...)`.

    Rows must be a multiple of the ranks. Differentiable for "sum" and "mean": the gradient is the
    allgather of the ranks' gradients, divided by the size for "mean".
    """
    result: Tensor = schemas.ops().reduce_scatter(tensor, group.size, group.number, op)
    return result


def broadcast_(tensor: Tensor, group: Group, root: int = 0) -> Tensor:
    """Overwrite `tensor` on all ranks by that of `root`, not differentiable. Returns `tensor`."""
    schemas.ops().broadcast_(tensor, root, group.number)
    return tensor
