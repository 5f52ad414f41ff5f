"""Contiguous vectors, one per dtype, that hold the tensors of a model as views."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "Flattened",
    "Places",
    "at_least_float32",
    "in_memory",
    "joined",
    "square",
    "values_kept",
    "views_of",
]

_LINE = 64  # bytes


class Flattened:
    """Moves tensors into 1-d `vectors`, one per dtype in order of first use; local.

    Shapes and values stay; strides become contiguous. Raises ValueError, which calls the tensors
    `what`, for tensors that are not dense floating ones on the CPU.
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
        """The view of each tensor in `vectors`, in the tensor's shape."""
        with torch.no_grad():
            for dtype, group in by_dtype.items():
                vector = torch.empty(sum(t.numel() for t in group), dtype=dtype)
                self.vectors.append(vector)
                for tensor, view in zip(group, views_of(vector, group), strict=True):
                    view.copy_(tensor)
                    tensor.data = view
                    self.views[tensor] = view


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive parts of a 1-d tensor, in the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])  # type: ignore[no-untyped-call]
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@contextlib.contextmanager
def values_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of the tensors at the end of the block; local."""
    kept = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new 1-d tensor of all elements; views_of() is the inverse."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def in_memory(memory: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return a 1-d view of `count` elements at byte `offset` of uint8 memory."""
    return memory[offset : offset + count * dtype.itemsize].view(dtype)


class Places:
    """Offsets of vectors that lie one after another in raw memory, each at a cache line; local.

    `like` are 1-d tensors; floating ones are stored as `wire_dtype`, if it is not None.
    """

    def __init__(self, like: Iterable[Tensor], wire_dtype: torch.dtype | None = None) -> None:
        self.offsets: list[int] = []
        self._parts: list[tuple[int, int, torch.dtype]] = []
        end = 0
        for tensor in like:
            dtype = (wire_dtype if tensor.is_floating_point() else None) or tensor.dtype
            self.offsets.append(end)
            self._parts.append((end, tensor.numel(), dtype))
            end += -(-tensor.numel() * dtype.itemsize // _LINE) * _LINE
        self.nbytes = max(end, _LINE)

    def views(self, memory: Tensor, begin: int) -> list[Tensor]:
        """Return the vectors in uint8 memory that start at byte `begin`; local."""
        return [
            in_memory(memory, begin + offset, count, dtype) for offset, count, dtype in self._parts
        ]


def square(tensor: Tensor) -> float:
    """Return |tensor|^2, computed in float32 at least, since 16 bits overflow or lose digits."""
    whole = tensor.reshape(-1)
    if whole.dtype not in (torch.float32, torch.float64):
        whole = whole.float() if whole.is_floating_point() else whole.double()
    return float(whole.dot(whole))


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a 16-bit tensor as float32, other tensors unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
