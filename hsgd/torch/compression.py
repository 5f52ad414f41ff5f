"""Compression: what tensors travel as.

Owns the pairs of compress and decompress. bf16 is hsgd's own; Horovod has none and fp16.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "warn_of_overflow",
]


class Compressor:
    """Interface: a class of two static methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and what decompress() needs to know; local."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor as it was, with what compress() gave; local."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _Cast(Compressor):
    """Floating tensors travel as another dtype, others as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        if not tensor.is_floating_point() or tensor.dtype == cls.dtype:
            return tensor, tensor.dtype
        sent = tensor.to(cls.dtype)
        warn_of_overflow(tensor, sent, f"Compression to {cls.dtype}")
        return sent, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """Floating tensors travel as float16, which ends at 65504. On the CPU a warning says if finite
    values become infinite.
    """

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Floating tensors travel as bfloat16, which has the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def warn_of_overflow(given: Tensor, got: Tensor, what: str) -> bool:
    """Warn, and return True, if `got` has infinities or NaN and `given` has none; local. Looks at
    tensors on the CPU only: others are not waited for.

    what: is compressed, for the warning.
    """
    if got.device.type != "cpu" or not got.numel() or _is_finite(got) or not _is_finite(given):
        return False
    warnings.warn(
        f"{what}: finite values are infinite on the way, since {got.dtype} ends at "
        f"{torch.finfo(got.dtype).max:g}; use Compression.bf16, a gradient_predivide_factor, or a "
        "smaller loss scale (GradScaler does that by itself)",
        stacklevel=3,
    )
    return True


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are; a fraction of the time of torch.isfinite()."""
    return all(math.isfinite(float(bound)) for bound in tensor.detach().aminmax())
