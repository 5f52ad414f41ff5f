"""TensorOperation, the base of operations on tensors, and barrier and join."""

from __future__ import annotations

import abc
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.torch.negotiation.coordinator import Operation
from hsgd.torch.negotiation.signature import Signature
from hsgd.torch.operations.device_turn import DeviceTurn, device_of

__all__ = ["Barrier", "Join", "TensorOperation", "count_write", "meet"]


class TensorOperation(Operation):
    """An operation on one tensor, or on a group of them that succeeds or fails together."""

    def __init__(self, name: str, tensors: Sequence[Tensor], grouped: bool) -> None:
        super().__init__(name)
        for tensor in tensors:
            self.check(tensor)
        # detach() releases the GIL, which costs more than everything else here.
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
        """Move the tensors; those on a device in the order of its streams."""
        if self.turn is None:
            self.move(comm)
            return
        meet(comm, self.device_label())  # before work is queued, which cannot be undone
        with self.turn.taken(self.inputs):
            self.move(comm)

    @abc.abstractmethod
    def move(self, comm: Comm) -> None:
        """Call the core; blocking, collective."""

    def device_label(self) -> str:
        """Return a name, for comparison by the core, of all that must be equal on all ranks."""
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
        """Return the name for the core, which itself compares a single tensor's dtype and shape."""
        return self.compared_name() if self.grouped else self.name

    def compared_name(self) -> str:
        """Return the name with a checksum of dtypes and shapes, for comparison by the core."""
        signature = self.signature
        compared = repr((signature.dtypes, signature.compared_shapes()))
        return f"{self.name}#{zlib.crc32(compared.encode()):08x}"

    def give(self, outputs: Sequence[Tensor]) -> None:
        self.result = tuple(outputs) if self.grouped else outputs[0]


class Barrier(Operation):
    """An operation without data."""

    kind = "barrier"

    def run(self, comm: Comm) -> None:
        meet(comm, self.name)


class Join(Operation):
    """Announces that this rank has no more data; the result is the last rank to do so.

    `unnamed` is this rank's number of unnamed operations, and afterwards the maximum of all ranks,
    since ranks that joined early have counted fewer.
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
    """Make torch count a write by the core, for autograd and LARS, which keeps norms of weights."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def meet(comm: Comm, name: str) -> None:
    """Wait until all ranks have called this with the same name; collective, blocking."""
    token = bytearray(1)
    comm.allreduce(token, "max", token, name)
