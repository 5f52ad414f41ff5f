"""Checks of torch.distributed's arguments, without communication: each raises one line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hsgd.c10d import dtypes

__all__ = ["alike", "apart", "elements", "parts", "reducible", "size"]


def reducible(op: Any, tensor: Tensor) -> None:
    """Raise TypeError if `op` has no meaning for the tensor."""
    if tensor.layout == torch.sparse_coo:
        if op != dist.ReduceOp.SUM:
            raise TypeError("sparse tensors can be summed only; use SUM")
        return
    if dtypes.bitwise(op, tensor.dtype) is None:
        dtypes.reducing(op, tensor.dtype)


def alike(what: str, tensors: Sequence[Tensor]) -> None:
    """Raise TypeError unless all tensors are dense, and of one dtype and device."""
    first = tensors[0] if tensors else None
    for tensor in tensors:
        assert first is not None
        if tensor.layout != torch.strided:
            raise TypeError(f"{what}: a tensor is {tensor.layout}; give dense ones")
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise TypeError(
                f"{what}: tensors of {first.dtype} on {first.device} and of {tensor.dtype} on "
                f"{tensor.device}; give all of one dtype on one device"
            )


def apart(what: str, outputs: Sequence[Tensor]) -> None:
    """Raise ValueError if two outputs share memory: the later one would overwrite the other."""
    ends: list[tuple[int, int, int]] = []
    for index, output in enumerate(outputs):
        if output.numel():
            begin, nbytes = output.data_ptr(), output.numel() * output.element_size()
            # Tensors with gaps may interleave without overlap: those count as one byte.
            ends.append((begin, begin + (nbytes if output.is_contiguous() else 1), index))
    ends.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(ends):
        if begin < end:
            raise ValueError(
                f"{what}: outputs {min(one, other)} and {max(one, other)} share memory; give each "
                "its own"
            )


def size(what: str, tensor: Tensor, elements: int) -> None:
    """Raise ValueError unless the joined tensor has as many elements as the parts of all ranks."""
    if tensor.numel() != elements:
        raise ValueError(
            f"{what}: the joined tensor has {tensor.numel()} elements, the parts of all ranks "
            f"{elements}; make them equal"
        )


def parts(what: str, parts: Sequence[Tensor], size: int, elements: int) -> None:
    """Raise ValueError unless there is a tensor of `elements` for each of `size` ranks."""
    if len(parts) != size or any(part.numel() != elements for part in parts):
        raise ValueError(
            f"{what}: the list has tensors of {[part.numel() for part in parts]} elements on "
            f"{size} ranks; give one of {elements} for every rank"
        )


def elements(what: str, tensor: Tensor, splits: list[int], size: int) -> list[int]:
    """Return each rank's elements, by split sizes, else equal parts; ValueError if they misfit."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: {what} has {rows} rows on {size} ranks; give split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single: {what} split sizes are {list(splits)}, rows {rows}; give one for "
            f"each of {size} ranks, {rows} in all"
        )
    width = tensor.numel() // rows if rows else 0
    return [split * width for split in splits]
