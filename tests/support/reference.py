"""What collectives must give, in NumPy: sums in a fixed order, written as plainly as can be.

Owns reproducible inputs (every process can make those of every rank) and the expected results.
Arrays are raw bits where NumPy has no dtype: bfloat16 travels as uint16.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

__all__ = ["DTYPES", "allreduced", "as_torch", "digest", "made", "zeros"]

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8")
_FLOATS = frozenset(DTYPES[:4])
_INTEGERS = {"int8": (-128, 127), "int32": (-(2**31), 2**31 - 1), "uint8": (0, 255)}


def zeros(count: int, dtype: str) -> np.ndarray:
    """`count` zeros as they are stored."""
    return np.zeros(count, "uint16" if dtype == "bfloat16" else dtype)


def made(seed: int, rank: int, count: int, dtype: str, special: bool = False) -> np.ndarray:
    """A rank's input: many magnitudes; with `special` also NaN, infinities, denormals and -0."""
    random = np.random.default_rng([seed, rank])
    if dtype not in _FLOATS:
        least, most = _INTEGERS.get(dtype, (-(2**62), 2**62))
        return random.integers(least, most, count, dtype, endpoint=True)
    numbers = random.standard_normal(count) * 10.0 ** random.integers(-3, 3, count)
    if special and count:
        odd = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-310, 6e-8, 65504.0, 3e38]
        chosen = random.random(count) < 0.3
        numbers[chosen] = random.choice(odd, int(chosen.sum()))
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return (numbers.astype("float32").view("uint32") >> 16).astype("uint16")
        return numbers.astype(dtype)


def as_torch(stored: np.ndarray, dtype: str) -> Any:
    """A tensor over the same memory."""
    import torch

    if dtype == "bfloat16":
        return torch.from_numpy(stored.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(stored)


def allreduced(
    nodes: list[list[np.ndarray]], dtype: str, op: str, wire_dtype: str = "none"
) -> np.ndarray:
    """The allreduce of the inputs nodes[node][local_rank]: ranks left to right, then nodes.

    With a wire_dtype float32 sums of nodes are rounded to it, and so is what becomes of them.
    """
    size = sum(map(len, nodes))
    if size == 1:
        return nodes[0][0].copy()
    divisor = size if op == "mean" else 1
    if len(nodes) == 1:
        return _level(nodes[0], dtype, op, divisor)
    sums = [_level(ranks, dtype, op, 1) for ranks in nodes]
    if dtype != "float32" or wire_dtype == "none":
        return _level(sums, dtype, op, divisor)
    sent = [_narrowed(total, wire_dtype) for total in sums]
    return _widened(_level(sent, wire_dtype, op, divisor), wire_dtype)


def _level(inputs: list[np.ndarray], dtype: str, op: str, divisor: int) -> np.ndarray:
    if len(inputs) == 1 and divisor == 1:
        return inputs[0]
    with np.errstate(all="ignore"):
        total = _widened(inputs[0], dtype)
        for stored in inputs[1:]:
            total = _combined(total, _widened(stored, dtype), op)
        if divisor != 1:
            total = total / total.dtype.type(divisor)
        return _narrowed(total, dtype)


def _combined(a: np.ndarray, b: np.ndarray, op: str) -> np.ndarray:
    if op in ("sum", "mean"):
        return a + b
    if op == "prod":
        return a * b
    better = b < a if op == "min" else b > a
    return np.where(better | (b != b), b, a)


def _widened(stored: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (stored.astype("uint32") << 16).view("float32")
    return stored.astype("float32") if dtype == "float16" else stored


def _narrowed(total: np.ndarray, dtype: str) -> np.ndarray:
    if dtype not in _FLOATS:
        return total
    total = np.where(np.isnan(total), total.dtype.type(np.nan), total)  # one NaN for all
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return total.astype(dtype)
    bits = total.view("uint32").astype("uint64")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("uint16")


def digest(stored: np.ndarray) -> str:
    """A short stand-in for all the bits of an array."""
    return hashlib.blake2b(np.ascontiguousarray(stored).tobytes(), digest_size=16).hexdigest()
