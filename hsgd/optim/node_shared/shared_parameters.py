"""SharedParameters: parameters in memory that all ranks of a node share, one copy per node.

Source: Wang, Lu, Chen, Li, IEICE Trans. Inf. & Syst. E103-D(12), 2020 (first-layer models exchanged
through shared memory); one copy per node is our own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hsgd.comm.agree import agree
from hsgd.comm.communicator import Comm
from hsgd.optim.layouts import layout_terms

__all__ = [
    "ALIGNMENT",
    "ParameterPosition",
    "ParameterSlice",
    "SharedParameters",
    "aligned",
    "share_parameters",
]

# Elements. Parameters, and parts of them, begin at multiples of four of the widest registers, since
# torch's loops process so many at once and treat the rest differently.
ALIGNMENT = 64


def aligned(count: int) -> int:
    """Return `count` rounded up to the alignment, in elements."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ParameterPosition:
    """Position of a parameter in the array of its dtype."""

    start: int
    count: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + self.count

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class ParameterSlice:
    """Elements [begin, end) of a parameter."""

    index: int  # of the parameter
    begin: int
    end: int

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of these elements of a contiguous tensor; 1-d unless all are."""
        if self.end - self.begin == whole.numel():
            return whole
        return whole.view(-1)[self.begin : self.end]


class SharedParameters:
    """Parameters in memory that all ranks of a node share; share_parameters() makes it.

    The whole node sees a write to a parameter at once. So writes outside of
    NodeSharedOptimizer.step() (load_state_dict, initialization, a swap with averaged weights) must
    be made by one rank of each node, or by all with the same values, and between two calls of
    synchronize(), which separate them from readers and other writers.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: Comm, root: int = 0) -> None:
        self.comm = comm
        self.parameters = list(dict.fromkeys(parameters))
        agree(comm, "share_parameters", lambda: self._terms(root))
        self._local = comm if comm.cross_size == 1 else comm.split(comm.cross_rank, comm.rank)
        self.places: list[ParameterPosition] = []
        self.counts: dict[torch.dtype, int] = {}
        for parameter in self.parameters:
            start = self.counts.get(parameter.dtype, 0)
            self.places.append(ParameterPosition(start, parameter.numel(), parameter.shape))
            self.counts[parameter.dtype] = aligned(start + parameter.numel())
        self.flats = {
            dtype: comm.shared(count, dtype, name="parameters")
            for dtype, count in self.counts.items()
        }
        self._move(root)

    def _terms(self, root: int) -> dict[str, object]:
        for index, parameter in enumerate(self.parameters):
            if parameter.device.type != "cpu" or not parameter.is_floating_point():
                raise ValueError(
                    f"share_parameters: parameter {index}, shape {tuple(parameter.shape)}, is "
                    f"{parameter.dtype} on {parameter.device}; only floating point numbers in host "
                    "memory can be shared"
                )
        return {"root": root, **layout_terms(self.parameters)}

    def _move(self, root: int) -> None:
        """Copy the root's values into the shared arrays, and make the parameters views of these."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            value = parameter.detach().clone(memory_format=torch.contiguous_format)
            self.comm.broadcast(value.view(-1), root, name="parameters")
            view = place.view(self.flats[parameter.dtype])
            if self.comm.local_rank == 0:
                view.copy_(value)
            parameter.data = view
        self.synchronize()

    @property
    def local(self) -> Comm:
        """The communicator of this node."""
        assert self._local is not None
        return self._local

    def of(self, dtype: torch.dtype) -> list[tuple[int, ParameterPosition]]:
        """Return number and position of each parameter of a dtype."""
        pairs = zip(self.parameters, self.places, strict=True)
        return [(i, place) for i, (p, place) in enumerate(pairs) if p.dtype == dtype]

    def synchronize(self) -> None:
        """Wait for all ranks of the node; collective over them, blocking."""
        self.local.barrier()


def share_parameters(model: nn.Module, comm: Comm, root: int = 0) -> SharedParameters:
    """Make a model's parameters views of memory that a node shares; collective, blocking.

    All ranks of `comm` get the values of rank `root`. Buffers (running statistics of normalization)
    stay each rank's own. Parameters keep their identity, so optimizers may be made before or after;
    non-contiguous ones become contiguous.

    Raises:
        ValueError: a parameter is not floating point in host memory.
        SharedMemoryError: shared memory is missing.
    """
    return SharedParameters(model.parameters(), comm, root)
