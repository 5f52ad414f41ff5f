"""Allreduce and reducescatter of tensors and groups; a group's tensors are packed by dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.comm.communicator import DTYPES, Comm, Op
from hsgd.comm.handle import Handle
from hsgd.torch.negotiation.coordinator import Operation
from hsgd.torch.negotiation.signature import Signature
from hsgd.torch.operations.device_turn import DeviceTurn
from hsgd.torch.operations.operation import Barrier, TensorOperation, count_write

__all__ = [
    "ADASUM",
    "AVERAGE",
    "CORE_DTYPES",
    "CORE_OPS",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "Allreduce",
    "Reducescatter",
    "run_fused",
    "stand_in",
]

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)  # Horovod's ReduceOp
CORE_OPS: dict[int, Op] = {AVERAGE: "sum", SUM: "sum", MIN: "min", MAX: "max", PRODUCT: "prod"}
CORE_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)


class _Reduction(TensorOperation):
    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        op: int,
        scales: tuple[float, float],
        grouped: bool,
    ) -> None:
        super().__init__(name, tensors, grouped)
        self.op = op
        self.scales = scales

    def check(self, tensor: Tensor) -> None:
        if tensor.dtype not in CORE_DTYPES:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        super().check(tensor)

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "op": self.op, "scales": self.scales}

    def label(self) -> str:
        label = super().label()
        label = f"{label} average" if self.op == AVERAGE else label
        return label if self.scales == (1.0, 1.0) else f"{label} scaled by {self.scales}"

    def _prescaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scales[0] == 1.0 else _scaled(tensor, self.scales[0])

    def _finish(self, output: Tensor, size: int) -> None:
        """Scale after the sum; Horovod averages by a factor, so for integers too."""
        factor = self.scales[1] / size if self.op == AVERAGE else self.scales[1]
        if factor != 1.0:
            output.copy_(_scaled(output, factor))


class Allreduce(_Reduction):
    """An allreduce into new tensors, or in place."""

    kind = "allreduce"

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        op: int,
        scales: tuple[float, float] = (1.0, 1.0),
        *,
        in_place: bool = False,
        grouped: bool = False,
    ) -> None:
        super().__init__(name, tensors, op, scales, grouped)
        self.given = list(tensors) if in_place else None

    def move(self, comm: Comm) -> None:
        outputs = self._outputs()
        label = self.label()
        for dtype in dict.fromkeys(tensor.dtype for tensor in self.inputs):
            places = [n for n, tensor in enumerate(self.inputs) if tensor.dtype == dtype]
            if len(places) == 1:
                self._reduce(comm, self.inputs[places[0]], outputs[places[0]], label)
                continue
            flat = torch.cat([self.inputs[n].reshape(-1) for n in places])
            self._reduce(comm, flat, flat, label)
            _spread(flat, [outputs[n] for n in places])
        self.publish(outputs)

    def start(self, comm: Comm) -> Handle[Any] | None:
        if len(self.inputs) != 1 or self.turn is not None:
            return None
        source, self._made = self.inputs[0], self._outputs()
        return comm.allreduce_async(
            self._prescaled(source), self._core_op(source), self._made[0], self.label()
        )

    def finish(self, comm: Comm) -> None:
        self._complete(self._made[0], comm.size)
        self.publish(self._made)

    def _outputs(self) -> list[Tensor]:
        if self.given is not None:
            return self.inputs
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in self.inputs]

    def publish(self, outputs: Sequence[Tensor]) -> None:
        """Set the result to `outputs`, or in place to the given tensors."""
        self.give(outputs if self.given is None else self.given)
        if self.given is not None:
            count_write(self.given)

    def _reduce(self, comm: Comm, source: Tensor, target: Tensor, label: str) -> None:
        comm.allreduce(self._prescaled(source), self._core_op(source), target, label)
        self._complete(target, comm.size)

    def _complete(self, output: Tensor, size: int) -> None:
        if self._core_op(output) != "mean":
            self._finish(output, size)

    def _core_op(self, tensor: Tensor) -> Op:
        """Return the core's op; only unscaled averages of floats are a "mean" there."""
        mean = self.op == AVERAGE and self.scales == (1.0, 1.0) and tensor.is_floating_point()
        return "mean" if mean else CORE_OPS[self.op]


class Reducescatter(_Reduction):
    """Results are this rank's rows; if they do not divide evenly, the first ranks have one more."""

    kind = "reducescatter"

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        op: int,
        scales: tuple[float, float] = (1.0, 1.0),
        *,
        grouped: bool = False,
    ) -> None:
        super().__init__(name, tensors, op, scales, grouped)
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ValueError("Reducescatter does not support scalar inputs")

    def move(self, comm: Comm) -> None:
        label, outputs = self.label(), []
        for tensor in self.inputs:
            own = comm.reduce_scatter(self._prescaled(tensor), "sum", name=label)
            self._finish(own, comm.size)
            outputs.append(own)
        self.give(outputs)


def run_fused(operations: Sequence[Any], comm: Comm) -> None:
    """Run allreduces of equal dtype, op, scales and device as one; collective, blocking."""
    first: DeviceTurn | None = operations[0].turn
    if first is None:
        _move_fused(operations, comm)
        return
    inputs = [operation.inputs[0] for operation in operations]
    with first.taken(inputs, [operation.turn for operation in operations[1:]]):
        _move_fused(operations, comm)


def _move_fused(operations: Sequence[Any], comm: Comm) -> None:
    outputs = [operation._outputs()[0] for operation in operations]
    flat = torch.cat([operation.inputs[0].reshape(-1) for operation in operations])
    operations[0]._reduce(comm, flat, flat, "fused " + operations[0].name)
    _spread(flat, outputs)
    for operation, output in zip(operations, outputs, strict=True):
        operation.publish([output])


def stand_in(name: str, signature: Signature) -> Operation:
    """Return the operation with zeros that a joined rank runs for a signature."""
    if signature.kind == "barrier":
        return Barrier(name)
    zeros = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu")
        for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
    ]
    grouped = signature.detail == "grouped"
    return Allreduce(name, zeros, signature.op, signature.scales, grouped=grouped)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return `tensor` times a double, with Horovod's rounding: integers are truncated."""
    if tensor.is_floating_point():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def _spread(flat: Tensor, targets: Sequence[Tensor]) -> None:
    pieces = torch.split(flat, [target.numel() for target in targets])
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece.view_as(target))
