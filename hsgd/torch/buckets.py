"""Bucket: gradients that travel together, in memory that all ranks of a node reach.

Owns the flat array, the views of it that become gradients, and the collective that is under way on
it. Never decides when it starts.

Source of the idea: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", arXiv:2006.15704, section 3.2.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.comm import Comm
from hsgd.handle import Handle
from hsgd.torch.compression import BF16Compressor, Compressor, FP16Compressor, NoneCompressor
from hsgd.torch.reductions import AVERAGE, CORE_OPS

__all__ = ["Bucket", "fill"]

_CASTS: dict[type[Compressor], torch.dtype] = {
    FP16Compressor: torch.float16,
    BF16Compressor: torch.bfloat16,
}


def fill(sizes: Sequence[tuple[torch.dtype, int]], most_bytes: int) -> list[list[int]]:
    """Put tensors of (dtype, bytes), in their order, into buckets of one dtype and at most
    `most_bytes`, if more than one; lists of indices.

    Buckets are in the order in which they become complete.
    """
    done: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, (dtype, size) in enumerate(sizes):
        held, filled = filling.get(dtype, ([], 0))
        if held and filled + size > most_bytes:
            done.append(held)
            held, filled = [], 0
        held.append(index)
        filling[dtype] = (held, filled + size)
    done += [held for held, _ in filling.values()]
    return sorted(done, key=lambda held: held[-1])


class Bucket:
    """Collective, blocking: all ranks of `comm` make it together.

    number: names it in reports. parameters: of one dtype, in the order in the array. scales:
    factors before and after the reduction.
    """

    def __init__(
        self,
        comm: Comm,
        number: int,
        label: str,
        parameters: Sequence[Tensor],
        op: int,
        predivide: float,
        compression: type[Compressor],
        threaded: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.waiting = len(self.parameters)
        """How many gradients are still to come in this step."""
        self.launched_s = 0.0
        """When the collective started, on time.monotonic(); 0 while none is under way."""
        self.label = f"optimizer bucket {number} ({label})"
        self._comm = comm
        self._op, self._predivide = op, predivide
        self._compression = compression
        self._threaded = threaded
        count = sum(parameter.numel() for parameter in parameters)
        dtype = parameters[0].dtype
        self._flat: Tensor = comm.empty(count, dtype, self.label)
        self.views: list[Tensor] = []
        begin = 0
        for parameter in parameters:
            self.views.append(_view(self._flat, begin, parameter))
            begin += parameter.numel()
        wire_dtype = _CASTS.get(compression)
        casts = wire_dtype is not None and dtype.is_floating_point and dtype != wire_dtype
        self._wire: Tensor = comm.empty(count, wire_dtype, self.label) if casts else self._flat
        self._handle: Handle[Any] | None = None
        self._result = self._flat
        self._context: Any = None

    def adopt(self, index: int) -> None:
        """Make the gradient of one parameter a view of the array, with its value."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient is view:
            return
        else:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = view

    def pack(self) -> None:
        """adopt() all gradients that are not views yet; parameters that need none and have none
        add zeros, and stay without.
        """
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
                if not parameter.requires_grad:
                    continue
            elif gradient.is_sparse:
                view.copy_(gradient.to_dense())
            else:
                targets.append(view)
                sources.append(gradient)
            parameter.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)

    def launch(self) -> None:
        """Pack, and start the collective; collective over the ranks of the bucket, not blocking."""
        self.pack()
        self.launched_s = time.monotonic()
        if self._predivide != 1.0:
            self._flat.mul_(1.0 / self._predivide)
        if self._wire is not self._flat:
            self._wire.copy_(self._flat)
            self._result = self._wire
        elif self._compression is not NoneCompressor:
            compressed, self._context = self._compression.compress(self._flat)
            self._result = compressed.contiguous()
        mean = self._op == AVERAGE and self._predivide == 1.0 and self._result.is_floating_point()
        op = "mean" if mean else CORE_OPS[self._op]
        if self._threaded:
            self._handle = self._comm.allreduce_async(self._result, op, self._result, self.label)
        else:
            self._comm.allreduce(self._result, op, self._result, self.label)

    def finish(self) -> None:
        """Wait for the collective, after which the gradients are those of all ranks; blocking.
        Raises as Handle.wait().
        """
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        if self._wire is not self._flat:
            self._flat.copy_(self._wire)
        elif self._compression is not NoneCompressor:
            result = self._compression.decompress(self._result, self._context)
            if result.data_ptr() != self._flat.data_ptr():
                self._flat.copy_(result)
        if self._op == AVERAGE and self._predivide != 1.0:
            self._flat.mul_(self._predivide / self._comm.size)
        self.launched_s = 0.0
        self.waiting = len(self.parameters)

    def release(self) -> None:
        """Give gradients memory of their own again; local."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()


def _view(flat: Tensor, begin: int, parameter: Tensor) -> Tensor:
    """A part of `flat` with the strides of the parameter where it has no gaps."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    if dense:
        return flat.as_strided(parameter.shape, parameter.stride(), begin)
    return flat[begin : begin + parameter.numel()].view(parameter.shape)
