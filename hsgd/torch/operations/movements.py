"""Allgather, broadcast and alltoall; dtypes unknown to the core are sent as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.comm.handle import Handle
from hsgd.torch.exceptions import HorovodInternalError
from hsgd.torch.operations.operation import TensorOperation, count_write, meet
from hsgd.torch.operations.reductions import CORE_DTYPES

__all__ = ["Allgather", "Alltoall", "Broadcast"]


class Allgather(TensorOperation):
    """Results have the rows of all ranks, in rank order."""

    kind = "allgather"

    def move(self, comm: Comm) -> None:
        if (words := self.signature.refusal()) is not None:
            meet(comm, self.name)  # if other ranks have rows, this mismatch starts a round
            self.error = HorovodInternalError(f"{words} ({self.name})")
            return
        label = self.label()
        gathered = [comm.allgather(_as_rows(tensor), name=label) for tensor in self.inputs]
        self.give([_from_rows(*pair) for pair in zip(gathered, self.inputs, strict=True)])


class Broadcast(TensorOperation):
    """A broadcast; `root` is a rank in the process set, `global_root` is for comparison."""

    kind = "broadcast"

    def __init__(
        self, name: str, tensor: Tensor, root: int, global_root: int, *, in_place: bool
    ) -> None:
        super().__init__(name, [tensor], grouped=False)
        self.root = root
        self.global_root = global_root
        self.given = tensor if in_place else None

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "root": self.global_root}

    def move(self, comm: Comm) -> None:
        comm.broadcast(self._target(), self.root, self.label())
        self.finish(comm)

    def start(self, comm: Comm) -> Handle[Any] | None:
        if self.turn is not None:
            return None
        return comm.broadcast_async(self._target(), self.root, self.label())

    def finish(self, comm: Comm) -> None:
        self.result = self._made if self.given is None else self.given
        if self.given is not None:
            count_write([self.given])

    def _target(self) -> Tensor:
        source = self.inputs[0]
        self._made = source if self.given is not None else source.clone()
        return self._made if self._made.dtype in CORE_DTYPES else _bytes(self._made)


class Alltoall(TensorOperation):
    """An alltoall; the result is a pair of rows and their number from each rank."""

    kind = "alltoall"

    def __init__(self, name: str, tensor: Tensor, splits: Sequence[int], like: Tensor) -> None:
        super().__init__(name, [tensor], grouped=False)
        self.splits = list(splits)
        self.like = like

    def move(self, comm: Comm) -> None:
        tensor = self.inputs[0]
        sent = _as_rows(tensor)[: sum(self.splits)]
        rows, received = comm.alltoall(sent, self.splits, name=self.label())
        self.result = (_from_rows(rows, tensor), self.like.new_tensor(received))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _as_rows(tensor: Tensor) -> Tensor:
    if tensor.dtype in CORE_DTYPES:
        return tensor
    width = math.prod(tensor.shape[1:])
    return _bytes(tensor).reshape(tensor.shape[0], width * tensor.element_size())


def _from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Undo _as_rows() for any number of rows, with the dtype and extents of `like`."""
    if like.dtype in CORE_DTYPES:
        return rows
    return rows.reshape(-1).view(like.dtype).reshape(rows.shape[0], *like.shape[1:])
