"""Gradients of node-shared parameters: their memory, and the mean of each rank's part."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hsgd import _native
from hsgd.comm.communicator import DTYPES, Comm
from hsgd.optim.node_shared.shared_parameters import (
    ParameterPosition,
    ParameterSlice,
    SharedParameters,
    aligned,
)

__all__ = ["ClusterGradients", "Gradients", "NodeGradients"]

_STREAMED_BYTES = 1 << 20  # about the size of a second-level cache
_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES)}
Bounds = Mapping[torch.dtype, Sequence[int]]
"""Bounds of the parts of a node's ranks in the array of each dtype."""


class Gradients:
    """Gradients of this rank, each moved to its place as soon as autograd has made it.

    `views` are the places, by parameter; None if a gradient stays where it was made.
    `sparse_as_dense` makes sparse gradients dense, which are refused otherwise.
    """

    def __init__(
        self, shared: SharedParameters, views: list[Tensor | None], sparse_as_dense: bool
    ) -> None:
        self._parameters = shared.parameters
        self._views = views
        self._sparse_as_dense = sparse_as_dense
        self._addresses = [0 if view is None else view.data_ptr() for view in views]

    def take(self, index: int, *, made_by_hand: bool = False) -> None:
        """Move a new gradient to where others read it; raises TypeError for sparse ones; local."""
        parameter, view = self._parameters[index], self._views[index]
        grad = parameter.grad
        if grad is None:
            return
        if grad.layout is not torch.strided:
            if not self._sparse_as_dense:
                raise TypeError(
                    f"node_shared: parameter {index}, shape {tuple(parameter.shape)}, has a sparse "
                    "gradient; make it dense, for example by sparse_as_dense=True or "
                    "Embedding(sparse=False)"
                )
            parameter.grad = grad = grad.detach().to_dense()
        if view is not None:
            if grad.data_ptr() != self._addresses[index]:
                _move(view, grad)
                parameter.grad = view
            return
        if made_by_hand or not (_is_plain(grad, parameter.dtype) and grad.is_contiguous()):
            parameter.grad = grad = torch.empty_like(parameter).copy_(grad.detach())
        self._addresses[index] = grad.data_ptr()

    def clear(self, index: int, set_to_none: bool) -> None:
        """Reset a gradient to None or zero; local."""
        parameter, view = self._parameters[index], self._views[index]
        if set_to_none or parameter.grad is None:
            parameter.grad = None
            if view is None:
                self._addresses[index] = 0  # another gradient may get that memory
        else:
            parameter.grad = (parameter.grad.detach() if view is None else view).zero_()

    def complete(self) -> list[int]:
        """Take assigned gradients, zero missing ones; return 1 per parameter with one, else 0."""
        came = []
        for index, parameter in enumerate(self._parameters):
            grad, view = parameter.grad, self._views[index]
            came.append(int(grad is not None))
            if grad is None:
                if view is not None:
                    view.zero_()
            elif grad.layout is not torch.strided or grad.data_ptr() != self._addresses[index]:
                self.take(index, made_by_hand=True)
        return came

    def part(self, piece: ParameterSlice) -> Tensor:
        """Return a view of a piece of this rank's gradient."""
        whole, parameter = self._views[piece.index], self._parameters[piece.index]
        if whole is None:
            if parameter.grad is None:  # only other ranks have one
                parameter.grad = torch.zeros_like(parameter)
                self._addresses[piece.index] = parameter.grad.data_ptr()
            whole = parameter.grad.detach()
        return piece.of(whole)


class NodeGradients(Gradients):
    """Gradients on one node.

    The gradient of a parameter that this rank owns entirely stays where autograd made it; others
    lie in shared memory, for the ranks that own them. The mean of a piece is computed right before
    its use, while it is in the cache.
    """

    def __init__(
        self, shared: SharedParameters, bounds: Bounds, sparse_as_dense: bool = False
    ) -> None:
        self._local = local = shared.local
        count = dict.fromkeys(bounds, 0)
        starts: list[dict[int, int]] = [{} for _ in range(local.size)]
        for dtype, ends in bounds.items():
            for rank, start_of in enumerate(starts):
                for index, place in shared.of(dtype):
                    if not (ends[rank] <= place.start and place.stop <= ends[rank + 1]):
                        start_of[index] = count[dtype]
                        count[dtype] = aligned(count[dtype] + place.count)
        self._flats = {
            dtype: local.shared(elements, dtype, name="gradients")
            for dtype, elements in count.items()
            if elements
        }

        def view(rank: int, index: int) -> Tensor | None:
            start, place = starts[rank].get(index), shared.places[index]
            if start is None:
                return None
            flat = self._flats[shared.parameters[index].dtype]
            return ParameterPosition(start, place.count, place.shape).view(flat)

        indices = range(len(shared.parameters))
        own = [view(local.rank, index) for index in indices]
        super().__init__(shared, own, sparse_as_dense)
        # Addresses on all ranks; 0 if a gradient is private, since only its owner reads it.
        self._everywhere = [
            [0 if (there := view(rank, index)) is None else there.data_ptr() for index in indices]
            for rank in range(local.size)
        ]

    def mean(self, piece: ParameterSlice, out: Tensor | None = None) -> Tensor:
        """Average a piece, into `out` or in place; all ranks must have called complete(); local."""
        own = self.part(piece)
        if self._local.size == 1:
            return own
        skip = piece.begin * own.element_size()
        inputs = [of_rank[piece.index] + skip for of_rank in self._everywhere]
        inputs[self._local.rank] = own.data_ptr()
        result = own if out is None else out
        _native.average(inputs, result.data_ptr(), own.numel(), _CODES[own.dtype])
        return result

    def reduce(self, pieces: Iterable[ParameterSlice]) -> None:
        """Average pieces in place; collective over the node, blocking."""
        for piece in pieces:
            self.mean(piece)
        self._local.barrier()


class ClusterGradients(Gradients):
    """Gradients on several nodes, all in shared memory; a rank's part is averaged as a whole."""

    def __init__(
        self, shared: SharedParameters, bounds: Bounds, sparse_as_dense: bool = False
    ) -> None:
        self._comm, self._local = shared.comm, shared.local
        self._cross: Comm | None = None
        if len(set(Counter(self._comm.nodes).values())) == 1:
            # Ranks that own the same part on all nodes.
            self._cross = self._comm.split(self._comm.local_rank, self._comm.rank)
        self._bounds = bounds
        self._flats = {
            dtype: self._comm.empty(count, dtype, name="gradients")
            for dtype, count in shared.counts.items()
        }
        views = [
            place.view(self._flats[parameter.dtype])
            for parameter, place in zip(shared.parameters, shared.places, strict=True)
        ]
        super().__init__(shared, list(views), sparse_as_dense)

    def reduce(self, pieces: Iterable[ParameterSlice]) -> None:
        """Average this rank's part in place; collective over all ranks, blocking."""
        for dtype, flat in self._flats.items():
            if self._cross is None:
                self._comm.allreduce(flat, "mean", out=flat, name="gradients")
                continue
            ends, rank = self._bounds[dtype], self._local.rank
            own = flat[ends[rank] : ends[rank + 1]]
            counts = [end - begin for begin, end in itertools.pairwise(ends)]
            self._local.reduce_scatter(flat, "sum", out=own, counts=counts, name="gradients")
            self._cross.allreduce(own, "sum", out=own, name="gradients")
            own.div_(self._comm.size)


def _is_plain(grad: Tensor, dtype: torch.dtype) -> bool:
    return grad.dtype == dtype and grad.is_cpu and type(grad) is Tensor


def _move(view: Tensor, grad: Tensor) -> None:
    """Copy a gradient to its place; a large one past the caches, which it would not stay in."""
    size = view.numel() * view.element_size()
    if size >= _STREAMED_BYTES and _is_plain(grad, view.dtype) and grad.is_contiguous():
        _native.stream_copy(view.data_ptr(), grad.data_ptr(), size)
    else:
        view.copy_(grad)
