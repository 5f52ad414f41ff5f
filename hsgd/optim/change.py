"""How far weights have moved since a moment: one figure, cheap enough to be taken in every step.

Owns the copy of that moment, of what is looked at. Never communicates, and never changes a tensor
that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsgd.optim.flattened import square

__all__ = ["Change"]

_BLOCK = 32768  # elements that are measured at a time: what fits in a core's cache
_SAMPLE_BLOCK = 4096
_Part = tuple[Tensor, float]  # a block, and how many elements each of its own stands for


class Change:
    """|w - w_last| / |w_last| over all weights, where w_last is what remember() saw.

    The norm of the difference, not the difference of norms; one pass over both, a block at a time.
    Of a tensor of more than 32768 elements a sample is looked at, and stands for the rest; smaller
    ones, such as a last layer, are looked at whole. Tensors that follow one another in memory are
    measured as one.
    sample: share of a large tensor that is looked at, above 0 and up to 1.
    """

    def __init__(self, sample: float = 1.0) -> None:
        if not 0 < sample <= 1:
            raise ValueError(f"sample is {sample}; give a share above 0 and up to 1")
        self._stride = max(1, round(1 / sample))
        self._last: list[Tensor] = []
        self._norm = 0.0
        self._parts: list[_Part] = []
        self._moved: list[Tensor] = []
        self._places: list[int] = []

    def remember(self, params: Sequence[Tensor]) -> None:
        """Keep a copy of what is looked at."""
        parts = self._look_at(params)
        if not self._last:
            self._last = [torch.empty_like(block) for block, _ in parts]
        for last, (block, _) in zip(self._last, parts, strict=True):
            last.copy_(block)
        self._norm = self._norm_of_last(parts)

    def measure(self, params: Sequence[Tensor]) -> float:
        """The relative change since remember(); 0 when there was none."""
        parts = self._look_at(params)
        if not self._last:
            self.remember(params)
        total = 0.0
        for (block, weight), last, moved in zip(parts, self._last, self._moved, strict=True):
            torch.sub(block, last, out=moved)
            total += weight * square(moved)
        if self._norm <= 0:
            self._norm = self._norm_of_last(parts)  # of a state that was loaded
        return math.sqrt(total) / self._norm if self._norm > 0 else math.inf if total else 0.0

    def state_dict(self) -> dict[str, Any]:
        """The copies."""
        return {"last": [block.clone() for block in self._last]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._last = [block.clone() for block in state["last"]]
        self._norm = 0.0

    def _norm_of_last(self, parts: Sequence[_Part]) -> float:
        pairs = zip(self._last, parts, strict=True)
        return math.sqrt(sum(weight * square(last) for last, (_, weight) in pairs))

    def _look_at(self, params: Sequence[Tensor]) -> list[_Part]:
        """What is looked at; made once, as long as the tensors stay where they are."""
        places = [tensor.data_ptr() for tensor in params]
        if places != self._places:
            self._parts = _parts([tensor.detach().view(-1) for tensor in params], self._stride)
            scratch: dict[torch.dtype, Tensor] = {}
            self._moved = []
            for block, _ in self._parts:
                room = scratch.get(block.dtype)
                if room is None or room.numel() < block.numel():
                    room = scratch[block.dtype] = torch.empty(block.numel(), dtype=block.dtype)
                self._moved.append(room[: block.numel()].view(block.shape))
            self._places = places
        return self._parts


def _parts(flat: Sequence[Tensor], stride: int) -> list[_Part]:
    """Blocks of vectors: all of the small ones, and samples of the large, as rows of a matrix."""
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
    """Whether a vector begins where another ends, in the same memory."""
    return (
        one.dtype == other.dtype
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
    )
