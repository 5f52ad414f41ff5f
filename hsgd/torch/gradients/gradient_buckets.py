"""Bucket: gradients that are reduced together, in memory shared by a node.

Source of the idea: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", arXiv:2006.15704, section 3.2.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm, Op
from hsgd.comm.handle import Handle
from hsgd.errors import HsgdError, SignatureMismatch
from hsgd.torch.compression import (
    BF16Compressor,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    warn_of_overflow,
)
from hsgd.torch.gradients.packing import Packing
from hsgd.torch.job.process_sets import ProcessSet
from hsgd.torch.operations.reductions import AVERAGE, CORE_OPS

__all__ = ["Bucket", "Collective", "Options", "fill"]

_CASTS: dict[type[Compressor], torch.dtype] = {
    FP16Compressor: torch.float16,
    BF16Compressor: torch.bfloat16,
}


def fill(sizes: Sequence[tuple[Hashable, int]], most_bytes: int) -> list[list[int]]:
    """Divide (kind, bytes) tensors into buckets; return lists of indices.

    A bucket has one kind (dtype and device), and at most `most_bytes` if it has several tensors.
    Tensors stay in order; buckets are in the order in which they become complete.
    """
    done: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, size) in enumerate(sizes):
        held, filled = filling.get(kind, ([], 0))
        if held and filled + size > most_bytes:
            done.append(held)
            held, filled = [], 0
        held.append(index)
        filling[kind] = (held, filled + size)
    done += [held for held, _ in filling.values()]
    return sorted(done, key=lambda held: held[-1])


def _new_array(comm: Comm, count: int, dtype: Any, device: torch.device, label: str) -> Tensor:
    """Return an array of zeros, on the CPU in memory shared by the node."""
    if device.type == "cpu":
        array: Tensor = comm.empty(count, dtype, label)
        return array
    return torch.zeros(count, dtype=dtype, device=device)


@dataclass(frozen=True)
class Options:
    """How gradients are reduced, from DistributedOptimizer's arguments; overlap: as for Overlap."""

    compression: type[Compressor]
    op: int
    predivide: float
    groups: int | list[list[Tensor]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    bucket_cap_mb: float
    overlap: str

    def terms(self, passes: int) -> dict[str, object]:
        """Return what must be equal on all ranks, as text; `passes` is per step."""
        return {
            "backward_passes_per_step": passes,
            "op": self.op,
            "gradient_predivide_factor": self.predivide,
            "compression": self.compression.__qualname__,
            "sparse_as_dense": self.sparse_as_dense,
        }


@dataclass
class Collective:
    """The allreduce of a bucket, without its memory; `label` must be equal on all ranks."""

    comm: Comm
    label: str
    count: int
    dtype: torch.dtype
    op: int
    predivide: float
    compression: type[Compressor]
    device: torch.device

    def start(self, array: Tensor, more: str = "") -> Handle[Any]:
        """Start it in place, with `more` before its label; collective, not blocking."""
        return self.comm.allreduce_async(array, self._core_op(array), array, more + self.label)

    def run(self, array: Tensor, more: str = "") -> None:
        """Run it in place, with `more` before its label; collective, blocking."""
        self.comm.allreduce(array, self._core_op(array), array, more + self.label)

    def run_with_zeros(self) -> None:
        """Take part with zeros; collective, blocking."""
        zeros = torch.zeros(self.count, dtype=self.dtype, device=self.device)
        if self.compression not in (NoneCompressor, *_CASTS):
            zeros = self.compression.compress(zeros)[0].contiguous()
        self.run(zeros)

    def _core_op(self, array: Tensor) -> Op:
        mean = self.op == AVERAGE and self.predivide == 1.0 and array.is_floating_point()
        return "mean" if mean else CORE_OPS[self.op]


class Bucket:
    """A flat array of gradients and its collective; made by all ranks of `comm`, blocking."""

    LABEL = "optimizer bucket"

    def __init__(
        self,
        comm: Comm,
        number: int,
        label: str,
        parameters: Sequence[Tensor],
        options: Options,
        threaded: bool,
    ) -> None:
        self.launched_s = 0.0
        """Start of the collective, by time.monotonic(); 0 if none is under way."""
        self._number, self._told = number, label
        self._failed_rounds = 0
        self._size = comm.size
        self._op, self._predivide = options.op, options.predivide
        self._compression = compression = options.compression
        self._threaded = threaded
        count = sum(parameter.numel() for parameter in parameters)
        dtype = parameters[0].dtype
        label = self._make_label()
        device = parameters[0].device
        self._flat: Tensor = _new_array(comm, count, dtype, device, label)
        self.packing = Packing(parameters, self._flat)
        self._ids = [id(parameter) for parameter in parameters]
        self.waiting = len(self._ids)
        """Number of gradients still to come in this step."""
        self._run = 0  # leading parameters whose gradients came as a run
        wire_dtype = _CASTS.get(compression)
        casts = wire_dtype is not None and dtype.is_floating_point and dtype != wire_dtype
        self._wire: Tensor = (
            _new_array(comm, count, wire_dtype, device, label) if casts else self._flat
        )
        self.collective = Collective(
            *(comm, label, count, self._wire.dtype),
            *(self._op, self._predivide, compression, device),
        )
        self._handle: Handle[Any] | None = None
        self._mismatch: SignatureMismatch | None = None
        self._result = self._flat
        self._context: Any = None
        self._told_of_overflow = False

    @property
    def label(self) -> str:
        return self.collective.label

    def _make_label(self) -> str:
        after = f", after {self._failed_rounds} failed steps" if self._failed_rounds else ""
        return f"{self.LABEL} {self._number}{after} ({self._told})"

    def take_run(self, index: int, ids: Sequence[int]) -> bool:
        """Count gradients that came in the bucket's order, the first at `index`.

        `ids` are the id() of their parameters. Returns False, and counts nothing, if these or
        earlier ones came out of order.
        """
        end = index + len(ids)
        in_order = index == self._run and self.waiting == len(self._ids) - index
        if not in_order or self._ids[index:end] != ids:
            return False
        self._run = end
        self.waiting = len(self._ids) - end
        return True

    def has_taken(self, index: int) -> bool:
        return index < self._run

    def launch(self, rounds: int = 0) -> None:
        """Copy missing gradients into the array and start the collective; not blocking.

        `rounds` counts earlier launches in this step; ranks with different counts do not match.
        """
        more = f"backward pass {rounds + 1} of a step, " if rounds else ""
        self.packing.pack()
        self.launched_s = time.monotonic()
        if self._predivide != 1.0:
            self._flat.mul_(1.0 / self._predivide)
        if self._wire is not self._flat:
            self._wire.copy_(self._flat)
            self._result = self._wire
        elif self._compression is not NoneCompressor:
            compressed, self._context = self._compression.compress(self._flat)
            self._result = compressed.contiguous()
        self._mismatch = None
        if self._threaded:
            self._handle = self.collective.start(self._result, more)
        else:
            self.collective.run(self._result, more)

    def wait(self) -> SignatureMismatch | None:
        """Wait for the collective; blocking.

        Returns the mismatch if other ranks called something else: the data are unchanged then, and
        repeat() may follow. Raises as Handle.wait() otherwise.
        """
        if self._handle is not None:
            try:
                self._handle.wait()
            except SignatureMismatch as error:
                self._mismatch = error
            self._handle = None
        return self._mismatch

    def repeat(self) -> None:
        """Repeat the collective of the last launch(); collective, blocking."""
        self._mismatch = None
        self.collective.run(self._result)

    def finish(self) -> None:
        """Set the gradients to the result, after wait(); local."""
        if self._wire is not self._flat:
            if not self._told_of_overflow:
                self._told_of_overflow = warn_of_overflow(self._flat, self._wire, self.label)
            self._flat.copy_(self._wire)
        elif self._compression is not NoneCompressor:
            result = self._compression.decompress(self._result, self._context)
            if result.data_ptr() != self._flat.data_ptr():
                self._flat.copy_(result)
        if self._op == AVERAGE and self._predivide != 1.0:
            self._flat.mul_(self._predivide / self._size)
        for parameter in self.packing.sparse:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse()
        self._begin_anew()

    def abandon(self, *, begun: bool) -> HsgdError | None:
        """Drop this step's gradients and wait for the collective; return its error, if any.

        `begun`: all collectives of the step were started. If not, later ones get another label:
        they must not match those of this step on ranks that wait for it, but must match those of
        ranks that gave it up as well.
        """
        if not begun:
            self._failed_rounds += 1
            self.collective.label = self._make_label()
        handle, self._handle = self._handle, None
        found = None
        if handle is not None:
            try:
                handle.wait()
            except HsgdError as error:
                found = error
        self._begin_anew()
        return found

    def _begin_anew(self) -> None:
        self.packing.sparse.clear()
        self.launched_s = 0.0
        self.waiting = len(self._ids)
        self._run = 0
