"""Exact conversions of tensors for the core, which knows flat arrays of eight dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BITWISE", "Lens", "as_bytes", "bitwise", "flat", "put_back", "reducing"]

_NATIVE = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
}
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "prod",
}
BITWISE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
# Arithmetic modulo 2**16 and 2**32 is that of a wider type, truncated.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_LOGICAL = {"sum": "max", "max": "max", "prod": "min", "min": "min"}  # of 0 and 1
_SIGN = -(2**63)


@dataclass(frozen=True)
class Lens:
    """Conversion for a reduction by `op`: `into` makes the core's array, `back` undoes it."""

    op: str
    into: Callable[[torch.Tensor], torch.Tensor]
    back: Callable[[torch.Tensor], torch.Tensor]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in a row: a view of a contiguous tensor, a copy of others."""
    if tensor.layout != torch.strided:
        raise TypeError(
            f"a {tensor.layout} tensor cannot be sent; only all_reduce with SUM takes sparse_coo"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


def put_back(array: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write flat `array` to the tensor unless it is a view of it."""
    if array.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.detach().copy_(array.view(tensor.shape))


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """Return a view of a flat tensor that the core can move; itself if it knows the dtype."""
    return array if array.dtype in _NATIVE else array.view(torch.uint8)


def bitwise(op: Any, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Return the torch function of a bitwise op, else None; TypeError if the dtype does not fit."""
    found = BITWISE.get(_kind(op))
    if found is not None and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{_name(op)} of {dtype} has no meaning; use integers or bool")
    return found


def reducing(op: Any, dtype: torch.dtype) -> Lens:
    """Return the conversion to reduce `dtype` by `op`; TypeError if it cannot be exact."""
    return _reducing(_kind(op), dtype)


@functools.cache
def _reducing(op: Any, dtype: torch.dtype) -> Lens:
    name = _OPS.get(op)
    if name is None:
        raise TypeError(f"{_name(op)} is not an op of hsgd; use SUM, AVG, MIN, MAX or PRODUCT")
    real = dtype.is_floating_point or dtype.is_complex
    if name == "mean" and not real:
        raise TypeError(f"AVG of {dtype} would round; use SUM and divide, or a floating dtype")
    if dtype in _NATIVE:
        return Lens(name, _same, _same)
    if dtype == torch.bool:
        return Lens(_LOGICAL[name], _viewed(torch.uint8), _viewed(torch.bool))
    if dtype.is_complex and name in ("sum", "mean"):
        part = torch.empty(0, dtype=dtype).real.dtype
        return Lens(name, _viewed(part), _viewed(dtype))
    if dtype in _WIDER:
        wider = _WIDER[dtype]
        return Lens(name, lambda array: array.to(wider), lambda array: array.to(dtype))
    if dtype == torch.uint64 and name in ("sum", "prod"):
        return Lens(name, _viewed(torch.int64), _viewed(torch.uint64))
    if dtype == torch.uint64:  # unsigned order is signed order with the sign bit flipped
        return Lens(
            name,
            lambda array: array.view(torch.int64) ^ _SIGN,
            lambda array: (array ^ _SIGN).view(torch.uint64),
        )
    raise TypeError(f"{_name(op)} of {dtype} is not supported; convert the tensor first")


def _same(array: torch.Tensor) -> torch.Tensor:
    return array


def _viewed(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda array: array.view(dtype)


def _kind(op: Any) -> Any:
    """Return the enumerator of a ReduceOp, which itself cannot be a key."""
    return getattr(op, "op", op)


def _name(op: Any) -> str:
    return str(_kind(op)).rpartition(".")[2]
