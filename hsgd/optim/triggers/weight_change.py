"""Change: a cheap measure of how far weights have moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd import _native
from hsgd.optim.flat_vectors import square

__all__ = ["Change"]

_BLOCK = 32768  # elements that are measured at a time; they fit in a core's cache
_SAMPLE_BLOCK = 4096
_Part = tuple[Tensor, float]  # a block, and how many elements each of its elements represents


class Change:
    """|w - w_last| / |w_last| over all weights, where remember() saw w_last.

    It is the norm of the difference, in one pass for float32, block by block for other dtypes.
    Tensors of more than 32768 elements are sampled; smaller ones are measured completely. Tensors
    adjacent in memory are measured as one. `sample` is the measured share of a large tensor, above
    0 and up to 1.
    """

    def __init__(self, sample: float = 1.0) -> None:
        if not 0 < sample <= 1:
            raise ValueError(f"sample is {sample}; give a share above 0 and up to 1")
        self._stride = max(1, round(1 / sample))
        self._last: list[Tensor] = []
        self._norm = 0.0
        self._parts: list[_Part] = []
        self._places: list[int] = []
        self._table: _native.ChangeTable | None = None  # the blocks of float32
        self._others: list[tuple[Tensor, Tensor, Tensor, float]] = []

    def remember(self, params: Sequence[Tensor]) -> None:
        """Copy the measured elements as w_last."""
        parts = self._look_at(params)
        if not self._last:
            self._last = [
                torch.empty(block.shape, dtype=block.dtype, device=block.device)
                for block, _ in parts
            ]
            self._table = None
        for last, (block, _) in zip(self._last, parts, strict=True):
            last.copy_(block)
        self._norm = self._norm_of_last(parts)

    def measure(self, params: Sequence[Tensor]) -> float:
        """Return the relative change since remember(); 0 before the first one."""
        parts = self._look_at(params)
        if not self._last:
            self.remember(params)
        if self._table is None:
            self._table = self._prepare(parts)
        total = self._table.square()
        for block, last, moved, weight in self._others:
            torch.sub(block, last, out=moved)
            total += weight * square(moved)
        if self._norm <= 0:
            self._norm = self._norm_of_last(parts)  # after load_state_dict()
        return math.sqrt(total) / self._norm if self._norm > 0 else math.inf if total else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"last": [block.clone() for block in self._last]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = [block.contiguous().clone() for block in state["last"]]
        self._norm, self._table = 0.0, None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without views, as copies measure their own tensors."""
        return {**self.__dict__, "_parts": [], "_places": [], "_table": None, "_others": []}

    def _norm_of_last(self, parts: Sequence[_Part]) -> float:
        pairs = zip(self._last, parts, strict=True)
        return math.sqrt(sum(weight * square(last) for last, (_, weight) in pairs))

    def _look_at(self, params: Sequence[Tensor]) -> list[_Part]:
        """Return the measured blocks, cached while the tensors stay in place."""
        places = [tensor.data_ptr() for tensor in params]
        if places != self._places:
            self._parts = _parts([tensor.detach().view(-1) for tensor in params], self._stride)
            self._places, self._table = places, None
        return self._parts

    def _prepare(self, parts: Sequence[_Part]) -> _native.ChangeTable:
        """Return the kernel's table of blocks; others go into `_others`."""
        rows: list[tuple[int, int, int, int, int, float]] = []
        scratch: dict[torch.dtype, Tensor] = {}
        self._others = []
        if [last.shape for last in self._last] != [block.shape for block, _ in parts]:
            raise ValueError(
                "Change: the state is of other weights, or of another sample; load one that was "
                "saved with the same model and options"
            )
        for (block, weight), last in zip(parts, self._last, strict=True):
            if _suits_the_kernel(block) and _suits_the_kernel(last):
                length, stride = block.shape[-1], block.stride(0) if block.dim() > 1 else 0
                count = block.numel() // max(1, length)
                rows.append((block.data_ptr(), last.data_ptr(), count, length, stride, weight))
                continue
            room = scratch.get(block.dtype)
            if room is None or room.numel() < block.numel():
                room = scratch[block.dtype] = torch.empty(block.numel(), dtype=block.dtype)
            moved = room[: block.numel()].view(block.shape)
            self._others.append((block, last, moved, weight))
        return _native.ChangeTable(rows)


def _suits_the_kernel(block: Tensor) -> bool:
    return block.dtype is torch.float32 and block.is_cpu and block.stride(-1) == 1


def _parts(flat: Sequence[Tensor], stride: int) -> list[_Part]:
    """Return blocks of vectors: all of small ones, samples of large ones as rows of a matrix."""
    parts: list[_Part] = []
    run: list[Tensor] = []

    def end_run() -> None:
        if run:
            whole = run[0].as_strided((sum(t.numel() for t in run),), (1,))
            parts.extend((block, 1.0) for block in whole.split(_BLOCK))  # type: ignore[no-untyped-call]
            run.clear()

    for vector in flat:
        if stride > 1 and vector.numel() > _BLOCK:
            end_run()
            rows = vector.numel() // _SAMPLE_BLOCK
            sample = vector[: rows * _SAMPLE_BLOCK].view(rows, _SAMPLE_BLOCK)[::stride]
            parts.append((sample, vector.numel() / sample.numel()))
            continue
        if run and not _follows(run[-1], vector):
            end_run()
        run.append(vector)
    end_run()
    return parts


def _follows(one: Tensor, other: Tensor) -> bool:
    """Return whether a vector begins where another ends, in the same memory."""
    return (
        one.dtype == other.dtype
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
    )
