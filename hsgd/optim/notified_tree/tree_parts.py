"""Layers of a model, and parts of large layers, which a NotifiedTree sends as units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Layer", "Part", "Stretch", "in_order_of", "layers_of", "padded", "parts_of"]

_LINE = 64  # bytes
# Parts form a pipeline: way up, update and way down of one overlap with those of others. But each
# part costs an update and notifications: halving layers of 256 KB cost 1/8 more processor time.
_PART_BYTES = 1 << 20
_MOST_CUTS = 512  # per model: a thread checks all parts whenever it wakes


def padded(size: int) -> int:
    """Return a size in bytes, rounded up to cache lines."""
    return (size + _LINE - 1) // _LINE * _LINE


@dataclass
class Layer:
    """Parameters that are waited for together: those of one module that no earlier one has."""

    index: int
    name: str
    module: nn.Module
    parameters: list[nn.Parameter] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters)


@dataclass(frozen=True)
class Stretch:
    """Elements [begin, end) of a parameter, in their order in memory."""

    parameter: nn.Parameter
    index: int  # of the parameter in its layer
    begin: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.end - self.begin == self.parameter.numel()

    @property
    def bytes(self) -> int:
        """Bytes of these elements."""
        return (self.end - self.begin) * self.parameter.element_size()

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of these elements of a tensor; 1-d unless it is whole.

        The tensor must be in_order_of() the parameter, or if the stretch is whole, have its shape.
        """
        if self.is_whole:
            return tensor
        return tensor.as_strided((tensor.numel(),), (1,))[self.begin : self.end]


@dataclass(frozen=True)
class Part:
    """A unit of sending and updating: a layer, or neighbouring elements of one."""

    index: int
    layer: int
    stretches: tuple[Stretch, ...]


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the layers with parameters to train, in the order of the model's definition."""
    layers: list[Layer] = []
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and p not in seen]
        if own:
            seen.update(own)
            layers.append(Layer(len(layers), name or type(module).__name__, module, own))
    return layers


def in_order_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the tensor, copied if its elements are not in the parameter's memory order."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, requires_grad=False).copy_(tensor)


def parts_of(layers: Sequence[Layer], part_bytes: int | None) -> list[Part]:
    """Return the layers in parts of at most `part_bytes`; 0 does not cut.

    None chooses a size, which grows with the model. Only float32 parameters are cut.
    """
    if part_bytes is None:
        part_bytes = max(_PART_BYTES, sum(layer.bytes for layer in layers) // _MOST_CUTS)
    parts: list[Part] = []
    for layer in layers:
        for stretches in _cut(layer, part_bytes):
            parts.append(Part(len(parts), layer.index, tuple(stretches)))
    return parts


def _cut(layer: Layer, most: int) -> Iterator[list[Stretch]]:
    """Yield parts of a layer, of similar sizes, which begin at cache lines."""
    whole = sum(padded(p.numel() * p.element_size()) for p in layer.parameters)
    plain = all(type(p) is nn.Parameter and p.dtype is torch.float32 for p in layer.parameters)
    count = max(-(-whole // most), 1) if most > 0 and plain else 1
    size = padded(-(-whole // count))
    stretches: list[Stretch] = []
    room = size
    for index, parameter in enumerate(layer.parameters):
        begin, end = 0, -1
        while end < parameter.numel():
            if room == 0 and parameter.numel() > 0:
                yield stretches
                stretches, room = [], size
            end = min(parameter.numel(), begin + room // parameter.element_size())
            stretches.append(Stretch(parameter, index, begin, end))
            room -= padded(stretches[-1].bytes)
            begin = end
    yield stretches
