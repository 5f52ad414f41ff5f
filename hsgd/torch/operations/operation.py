"""What all operations on tensors have, and those that move none: barrier and join.

Owns the checks that one rank alone could fail, which are made before others wait for it. Never
decides when an operation runs.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from hsgd.comm.communicator import Comm
from hsgd.torch.negotiation.coordinator import Operation
from hsgd.torch.negotiation.signature import Signature
from hsgd.torch.operations.device_turn import DeviceTurn, device_of
from torch import Tensor

__all__ = ["Barrier", "Join", "TensorOperation", "count_write", "meet"]


class TensorOperation(Operation, abc.ABC):
    """An operation on one tensor or on a group of them, which are results or not together."""

    def __init__(self, name: str, tensors: Sequence[Tensor], grouped: bool) -> None:
        super().__init__(name)
        for tensor in tensors:
            self.check(tensor)
        # detach() lets other threads have the GIL, which costs more than all the rest.
        self.inputs = [t.detach() if t.requires_grad else t for t in tensors]
        self.grouped = grouped
        self.device = device_of(tensors)
        self.turn = DeviceTurn(tensors[0].device) if self.device else None

    def check(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")

    def run(self, comm: Comm) -> None:
        """Move the tensors, those of a device in the order of its streams."""
        if self.turn is None:
            self.move(comm)
            return
        meet(comm, self.device_label())  # before anything is queued that cannot be taken back
        with self.turn.taken(self.inputs):
            self.move(comm)

    @abc.abstractmethod
    def move(self, comm: Comm) -> None:
        """Call the core; blocking, collective."""

    def device_label(self) -> str:
        """Return all that must be equal on all ranks, as a name that the core compares."""
        signature = self.signature
        compared = repr(signature._replace(shapes=signature.compared_shapes()))
        return f"{self.name} of {self.device} {zlib.crc32(compared.encode()):08x}"

    def parts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "device": self.device,
            "dtypes": tuple(str(tensor.dtype).removeprefix("torch.") for tensor in self.inputs),
            "shapes": tuple(tuple(tensor.shape) for tensor in self.inputs),
            "detail": "grouped" if self.grouped else "",
        }

    @property
    def signature(self) -> Signature:
        return Signature(**self.parts())

    @property
    def payload_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.inputs)

    def label(self) -> str:
        """Return the name for the core, which compares one tensor's dtype and shape itself."""
        return self.compared_name() if self.grouped else self.name

    def compared_name(self) -> str:
        """Return the name with what stands for dtypes and shapes, which the core then compares,
        too.
        """
        signature = self.signature
        compared = repr((signature.dtypes, signature.compared_shapes()))
        return f"{self.name}#{zlib.crc32(compared.encode()):08x}"

    def give(self, outputs: Sequence[Tensor]) -> None:
        self.result = tuple(outputs) if self.grouped else outputs[0]


class Barrier(Operation):
    """Nothing moves."""

    kind = "barrier"

    def run(self, comm: Comm) -> None:
        meet(comm, self.name)


class Join(Operation):
    """This rank has no more data. The result is the rank that said so last.

    unnamed: how many operations without a name this rank has counted; when it has run, the most of
    all ranks. Ranks that joined early have counted less.
    """

    kind = "join"

    def __init__(self, name: str, now_s: float, unnamed: int) -> None:
        super().__init__(name)
        self.now_s = now_s
        self.unnamed = unnamed

    def run(self, comm: Comm) -> None:
        arrivals = torch.zeros(2, comm.size, dtype=torch.float64, device="cpu")
        arrivals[0, comm.rank], arrivals[1, comm.rank] = self.now_s, self.unnamed
        comm.allreduce(arrivals, out=arrivals, name=self.name)
        self.result = int(arrivals[0].argmax())
        self.unnamed = int(arrivals[1].max())


def count_write(tensors: Sequence[Tensor]) -> None:
    """Have torch count a write that the core made, as it does its own: autograd and LARS, which
    keeps the norms of weights, look at that.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def meet(comm: Comm, name: str) -> None:
    """Return when all ranks called this with the same name; collective, blocking."""
    token = bytearray(1)
    comm.allreduce(token, "max", token, name)
