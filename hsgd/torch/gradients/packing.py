"""Packing: gradients of many parameters in one flat array."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HOT_COUNT", "Packing"]

HOT_COUNT = 1 << 14
"""Elements from which a gradient is copied at once, while it is in the cache."""

_gradient = operator.attrgetter("grad")


class Packing:
    """Views of `flat`, as the gradients of parameters of one dtype; local."""

    def __init__(self, parameters: Sequence[Tensor], flat: Tensor) -> None:
        self.parameters = list(parameters)
        self.sparse: list[Tensor] = []
        """Parameters whose gradients came sparse; the user of this class clears it."""
        # Small vectors (biases, normalization) first: one call copies them all.
        small = [p.dim() == 1 and p.numel() < HOT_COUNT for p in self.parameters]
        order = sorted(range(len(small)), key=lambda index: not small[index])
        begin, ends = 0, []
        views: dict[int, Tensor] = {}
        for index in order:
            views[index] = _view(flat, begin, self.parameters[index])
            begin += self.parameters[index].numel()
            ends.append(begin)
        self.views = [views[index] for index in range(len(views))]
        vectors, others = order[: sum(small)], order[sum(small) :]
        self._vectors = [self.parameters[n] for n in vectors], [views[n] for n in vectors]
        self._others = [self.parameters[n] for n in others], [views[n] for n in others]
        self._joined = flat[: ends[len(vectors) - 1] if vectors else 0]

    def adopt(self, index: int) -> None:
        """Copy one parameter's gradient into the array, and replace it by the view."""
        with torch.no_grad():
            self._pack_each([self.parameters[index]], [self.views[index]])

    def pack(self) -> None:
        """Adopt all gradients that are not views yet; frozen parameters without one add zeros."""
        with torch.no_grad():
            if not self._pack_vectors(*self._vectors):
                self._pack_each(*self._vectors)
            self._pack_each(*self._others)

    def release(self, *, keep: bool) -> None:
        """Take the gradients out of the array: with `keep` as copies, else set to None; local.

        Do not keep them if a collective may still write to the array.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone() if keep else None

    def _pack_vectors(self, parameters: Sequence[Tensor], views: Sequence[Tensor]) -> bool:
        """Pack the vectors at once, which is several times faster, if all have new gradients."""
        gradients = list(map(_gradient, parameters))
        if not gradients or gradients[0] is views[0]:
            return False
        try:
            torch.cat(gradients, out=self._joined)
        except (TypeError, RuntimeError):  # one is None, sparse, or its view already
            return False
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
        return True

    def _pack_each(self, parameters: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        targets, sources = [], []
        for parameter, view in zip(parameters, views, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
                if not parameter.requires_grad:
                    continue
            elif gradient.is_sparse:
                view.copy_(gradient.to_dense())
                self.sparse.append(parameter)
            else:
                targets.append(view)
                sources.append(gradient)
            parameter.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)


def _view(flat: Tensor, begin: int, parameter: Tensor) -> Tensor:
    """Return a part of `flat`, with the parameter's strides if it has no gaps."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    if dense:
        return flat.as_strided(parameter.shape, parameter.stride(), begin)
    return flat[begin : begin + parameter.numel()].view(parameter.shape)
