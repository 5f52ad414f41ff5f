"""Names and layouts of the tensors that an optimizer is given, as ranks compare them.

Owns the words. Never communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["layout_terms", "named_tensors", "strides_of"]


def named_tensors(params: nn.Module | Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Return tensors with what errors call them: of a model by name, others by number; local."""
    if isinstance(params, nn.Module):
        return [(f'parameter "{name}"', tensor) for name, tensor in params.named_parameters()]
    return [(f"parameter {number}", tensor) for number, tensor in enumerate(params)]


def layout_terms(params: nn.Module | Sequence[Tensor]) -> dict[str, str]:
    """Return what must be equal on all ranks of tensors, or of a model's parameters and buffers, by
    their names: order, dtype, shape, strides, and whether one is frozen; local.
    """
    found = named_tensors(params)
    terms = {}
    if isinstance(params, nn.Module):
        found += [(f'buffer "{name}"', tensor) for name, tensor in params.named_buffers()]
    for number, (name, tensor) in enumerate(found):
        dtype = str(tensor.dtype).removeprefix("torch.")
        words = [f"number {number}", f"{dtype} of shape {tuple(tensor.shape)}"]
        if strides_of(tensor) and not tensor.is_contiguous():
            words.append(f"strides {strides_of(tensor)}")
        if name.startswith("parameter") and not tensor.requires_grad:
            words.append("frozen")
        terms[name] = ", ".join(words)
    return terms


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides, 0 for dimensions of one element, which have no meaning; none for layouts
    without; local.
    """
    if tensor.layout != torch.strided:
        return ()
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride if size > 1 else 0 for stride, size in sizes)
