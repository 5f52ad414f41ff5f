"""Collectives of flat CPU tensors over a Comm, for all of torch's dtypes; they block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.c10d import dtypes

__all__ = ["allgather", "alltoall", "gather", "reduce", "reduce_scatter", "split_into"]


def allgather(comm: Any, array: Tensor) -> Tensor:
    """Return the arrays of all ranks, of equal size, in rank order."""
    out = array.new_empty(comm.size * array.numel())
    comm.allgather(dtypes.as_bytes(array), out=dtypes.as_bytes(out))
    return out


def gather(comm: Any, root: int, array: Tensor) -> Tensor:
    """Return the arrays of all ranks at the root, nothing elsewhere."""
    sent = [array.numel() * (rank == root) for rank in range(comm.size)]
    out = array.new_empty(array.numel() * comm.size * (comm.rank == root))
    alltoall(comm, array, sent, out)
    return out


def alltoall(comm: Any, array: Tensor, sent: list[int], out: Tensor) -> None:
    """Send `sent` elements of the array to each rank."""
    packed = dtypes.as_bytes(array)
    width = 1 if packed.dtype == array.dtype else array.element_size()
    counts = [count * width for count in sent]
    comm.alltoall(packed, counts, out=dtypes.as_bytes(out))


def reduce(comm: Any, source: Tensor, op: Any, target: Tensor) -> None:
    """Reduce source over all ranks into target, which may be the same."""
    if (combine := dtypes.bitwise(op, source.dtype)) is not None:
        rows = dtypes.as_bytes(allgather(comm, source)).view(comm.size, -1)
        target.copy_(functools.reduce(combine, rows).view(source.dtype))
        return
    view = dtypes.reducing(op, source.dtype)
    array = view.into(source)
    in_place = target.data_ptr() == source.data_ptr()
    out = array if in_place else torch.empty_like(array)
    comm.allreduce(array, view.op, out=out)
    back = view.back(out)
    if back.data_ptr() != target.data_ptr():
        target.copy_(back)


def reduce_scatter(comm: Any, source: Tensor, op: Any, output: Tensor) -> None:
    """Reduce source over all ranks and keep this rank's part of it in output, of any layout."""
    if dtypes.bitwise(op, source.dtype) is not None:
        total = torch.empty_like(source)
        reduce(comm, source, op, total)
        own = total[comm.rank * output.numel() :][: output.numel()]
        output.detach().copy_(own.view(output.shape))
        return
    view = dtypes.reducing(op, source.dtype)
    array = view.into(source)
    place = output.detach()
    direct = place.is_contiguous() and array.data_ptr() == source.data_ptr()
    rows = array.numel() // comm.size
    out = view.into(place.view(-1)) if direct else array.new_empty(rows)
    comm.reduce_scatter(array, view.op, out=out)
    if not direct:
        place.copy_(view.back(out).view(place.shape))


def split_into(joined: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of a flat tensor to the tensors; local."""
    begin = 0
    for tensor in tensors:
        tensor.detach().copy_(joined[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
