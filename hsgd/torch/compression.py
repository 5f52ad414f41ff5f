"""Compressors for tensors on the way; bf16 is hsgd's own, Horovod has none and fp16."""

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
    """Interface of compressors; both methods are static and local."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context for decompress()."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _Cast(Compressor):
    """Sends floating tensors as another dtype, others unchanged."""

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
    """Sends floating tensors as float16, up to 65504; warns of overflow on the CPU."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Sends floating tensors as bfloat16, which has the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def warn_of_overflow(given: Tensor, got: Tensor, what: str) -> bool:
    """Warn and return True if `got` has infinities or NaN and `given` has none; local.

    Checks tensors on the CPU only, so as not to wait for devices. `what` names the tensor.
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
    """Return whether all values are finite, in a fraction of torch.isfinite()'s time."""
    return all(math.isfinite(float(bound)) for bound in tensor.detach().aminmax())
