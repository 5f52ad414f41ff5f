"""Names and layouts of an optimizer's tensors, in the form that ranks compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["layout_terms", "named_tensors", "strides_of"]


def named_tensors(params: nn.Module | Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Return tensors with their names for errors: a model's by name, others by number; local."""
    if isinstance(params, nn.Module):
        return [(f'parameter "{name}"', tensor) for name, tensor in params.named_parameters()]
    return [(f"parameter {number}", tensor) for number, tensor in enumerate(params)]


def layout_terms(params: nn.Module | Sequence[Tensor]) -> dict[str, str]:
    """Return order, dtype, shape, strides and freezing of each tensor, by name; local.

    They must be equal on all ranks. Tensors are `params`, or a model's parameters and buffers.
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
    """Return strides, 0 for dimensions of size 1; empty for layouts without strides; local."""
    if tensor.layout != torch.strided:
        return ()
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride if size > 1 else 0 for stride, size in sizes)
