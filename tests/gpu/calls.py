"""Collectives of Comm with what each rank gives and what it must get, on any device.

Owns the values: small whole numbers, so that sums are exact in every dtype, made by the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsgd import Comm

__all__ = ["DTYPES", "KINDS", "Call", "Started"]

KINDS = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall")
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int32, torch.int64, torch.uint8),
)


@dataclass
class Started:
    """A call whose result may be read after wait(), on the stream that is current then."""

    given: Tensor
    result: Any = None
    handle: Any = None
    rows: list[int] | None = None  # of an alltoall, from each rank

    def wait(self) -> Tensor:
        """The result."""
        if self.handle is not None:
            self.result = self.handle.wait()
        if isinstance(self.result, tuple):
            self.result, self.rows = self.result
        result: Tensor = self.result
        return result


@dataclass(frozen=True)
class Call:
    """The same on all ranks. count: elements, roughly where ranks give different ones.

    in_place: the result lies in the input, or the input in the result, where a collective has that.
    """

    kind: str
    dtype: torch.dtype
    count: int
    step: int = 0
    in_place: bool = False
    asynchronous: bool = False

    def value(self, rank: int, count: int, device: torch.device) -> Tensor:
        """`count` elements of what a rank gives."""
        return (torch.arange(count, device=device) % 5 + rank + self.step % 3).to(self.dtype)

    def start(self, comm: Comm, device: torch.device) -> Started:
        """Make the input and call the collective."""
        rank, size = comm.rank, comm.size
        name = f"{self.kind}_async" if self.asynchronous else self.kind
        method = getattr(comm, name)
        options: dict[str, Any] = {}
        given = self.value(rank, self._rows(rank, size), device)
        if self.kind == "allreduce" and self.in_place:
            options["out"] = given
        elif self.kind == "broadcast":
            options["root"] = self.step % size
        elif self.kind == "reduce_scatter" and self.in_place:
            options["out"] = given[self._own(rank, size)]
        elif self.kind == "allgather" and self.in_place:
            rows = [self._rows(k, size) for k in range(size)]
            whole = torch.full((sum(rows),), 99, device=device).to(self.dtype)
            part = whole[sum(rows[:rank]) :][: rows[rank]]
            part.copy_(given)
            given, options["out"] = part, whole
        elif self.kind == "alltoall":
            options["send_counts"] = self._sent(rank, size)
            if self.in_place:  # which it cannot be: into a given array
                received = sum(self._sent(k, size)[rank] for k in range(size))
                options["out"] = torch.full((received,), 99, device=device).to(self.dtype)
        got = method(given, **options)
        return Started(given, handle=got) if self.asynchronous else Started(given, got)

    def expected(self, rank: int, size: int, device: torch.device) -> Tensor:
        """The result of a rank."""
        if self.kind == "broadcast":
            root = self.step % size
            return self.value(root, self.count, device)
        if self.kind == "allgather":
            parts = [self.value(k, self._rows(k, size), device) for k in range(size)]
            return torch.cat(parts)
        if self.kind == "alltoall":
            blocks = []
            for k in range(size):
                sent = self._sent(k, size)
                whole = self.value(k, sum(sent), device)
                blocks.append(whole[sum(sent[:rank]) :][: sent[rank]])
            return torch.cat(blocks)
        total = torch.zeros(self.count, device=device, dtype=torch.float64)
        for k in range(size):
            total += self.value(k, self.count, device).double()
        if self.kind == "reduce_scatter":
            total = total[self._own(rank, size)]
        return total.to(self.dtype)

    def check(self, comm: Comm, started: Started, result: Tensor) -> None:
        """Raise AssertionError for another result than the expected one; waits for the device."""
        rank, size = comm.rank, comm.size
        expected = self.expected(rank, size, result.device)
        assert torch.equal(result, expected), (self, rank, result[:5], expected[:5])
        if started.rows is not None:
            assert started.rows == [self._sent(k, size)[rank] for k in range(size)], self

    def _rows(self, rank: int, size: int) -> int:
        if self.kind == "allgather" and self.count:
            return self.count + 3 * rank
        if self.kind == "alltoall":
            return sum(self._sent(rank, size))
        return self.count

    def _sent(self, rank: int, size: int) -> list[int]:
        each = -(-self.count // size)
        return [each + (rank + to) % 2 if each else 0 for to in range(size)]

    def _own(self, rank: int, size: int) -> slice:
        """This rank's rows of an even split."""
        each, more = divmod(self.count, size)
        first = rank * each + min(rank, more)
        return slice(first, first + each + (rank < more))
