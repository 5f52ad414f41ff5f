"""Tensors of a model as one contiguous vector per dtype, of which they become views.

Owns the vectors. Never communicates. What reads or writes the weights as a whole does so in one
pass, and without copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Flattened", "as_memory", "square"]


class Flattened:
    """Moves tensors into `vectors`, 1-d, one per dtype in the order of first sight; local.

    what: the tensors, for the error. Shapes and values stay; strides become those of contiguous
    tensors. Raises ValueError for tensors that are not dense floating ones on the CPU.
    """

    def __init__(self, tensors: Iterable[Tensor], what: str = "parameter") -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for index, tensor in enumerate(dict.fromkeys(tensors)):
            if (
                tensor.device.type != "cpu"
                or not tensor.is_floating_point()
                or tensor.layout is not torch.strided
            ):
                raise ValueError(
                    f"{what} {index} is {tensor.dtype}, {tensor.layout} on {tensor.device}; give "
                    "dense floating tensors on the CPU"
                )
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        self.vectors: list[Tensor] = []
        self.views: dict[Tensor, Tensor] = {}
        """The place of each tensor, of its shape."""
        with torch.no_grad():
            for dtype, group in by_dtype.items():
                vector = torch.empty(sum(t.numel() for t in group), dtype=dtype)
                self.vectors.append(vector)
                parts = vector.split([t.numel() for t in group])  # type: ignore[no-untyped-call]
                for tensor, part in zip(group, parts, strict=True):
                    view = part.view(tensor.shape)
                    view.copy_(tensor)
                    tensor.data = view
                    self.views[tensor] = view

    def copies(self) -> list[Tensor]:
        """The vectors as they are now."""
        return [vector.clone() for vector in self.vectors]

    def restore(self, copies: Iterable[Tensor]) -> None:
        """Write vectors back."""
        for vector, copy in zip(self.vectors, copies, strict=True):
            vector.copy_(copy)


def square(tensor: Tensor) -> float:
    """|tensor|^2, in float32 at least: 16 bits end at 65504, or at three digits."""
    whole = tensor.reshape(-1)
    if whole.dtype not in (torch.float32, torch.float64):
        whole = whole.float() if whole.is_floating_point() else whole.double()
    return float(whole.dot(whole))


def as_memory(array: object) -> Tensor:
    """A segment as a uint8 tensor that keeps it alive."""
    return torch.from_numpy(array)
