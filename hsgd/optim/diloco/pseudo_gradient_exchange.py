"""Exchanges that average pseudo-gradients over the workers, in four message formats.

Sources: int8 in both directions with error feedback on both sides, DoubleSqueeze
(arXiv:1905.05957); top-k of each chunk with a decaying error, SparseLoCo (arXiv:2508.15706).
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hsgd import _native
from hsgd.comm.communicator import Comm

__all__ = ["Compression", "Exchange", "Int8", "TopK", "checked_compression", "exchange_of"]


@dataclass(frozen=True)
class Int8:
    """8 bits per value, with a float32 scale for each `block` values: a quarter of float32."""

    block: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 1 << 20:
            raise ValueError(f"Int8: block is {self.block}; give values, from 1 to 1048576")


@dataclass(frozen=True)
class TopK:
    """The share of the largest values in each chunk, in bfloat16, with their positions.

    Each sent value costs 4 bytes, to every other worker.

    Args:
        fraction: above 0, up to 1.
        chunk: up to 65536 values.
        error_decay: the unsent rest is multiplied by it before the next pseudo-gradient is added. 1
            loses nothing; SparseLoCo uses 0.95, with an outer optimizer without momentum.
    """

    fraction: float = 0.03
    chunk: int = 4096
    error_decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"TopK: fraction is {self.fraction}; give a share above 0, up to 1")
        if not 1 <= self.chunk <= 65536:
            raise ValueError(f"TopK: chunk is {self.chunk}; give values, from 1 to 65536")
        if not 0 <= self.error_decay <= 1:
            raise ValueError(f"TopK: error_decay is {self.error_decay}; give a number from 0 to 1")

    @property
    def kept(self) -> int:
        """Number of values of a chunk that are sent."""
        return max(1, math.ceil(self.fraction * self.chunk))


Compression = Literal["bfloat16", "int8", "topk"] | Int8 | TopK | None


class Exchange(abc.ABC):
    """Averages one vector over the workers, repeatedly; keeps compression errors by name."""

    def __init__(self, comm: Comm, what: str, **errors: Tensor) -> None:
        self._comm, self._what, self._errors = comm, what, errors

    @abc.abstractmethod
    def average(self, values: Tensor, due: int) -> Tensor:
        """Return the workers' mean of 1-d float32 `values`, in place or in another tensor.

        Collective over the workers, blocking, releases the GIL; the same bits on all of them. `due`
        is the step after which the mean is applied; calls with different steps do not match.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return this worker's compression errors."""
        return {name: error.clone() for name, error in self._errors.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load compression errors; drop those of another size."""
        for name, error in self._errors.items():
            kept = state.get(name)
            if kept is not None and kept.shape == error.shape:
                error.copy_(kept)
            else:
                error.zero_()

    def _named(self, due: int) -> str:
        return f"{self._what}, due at step {due}"


def exchange_of(compression: Compression, comm: Comm, count: int, what: str) -> Exchange:
    """Return an exchange for vectors of `count` values, called `what` in errors; local."""
    given = checked_compression(compression)
    if isinstance(given, Int8):
        return _Int8Exchange(comm, count, given, what)
    if isinstance(given, TopK):
        return _TopExchange(comm, count, given, what)
    return _PlainExchange(comm, torch.float32 if given is None else torch.bfloat16, what)


def checked_compression(compression: Compression) -> Int8 | TopK | str | None:
    """Return the compression settings; local. Raises ValueError for unknown ones."""
    if compression == "int8":
        return Int8()
    if compression == "topk":
        return TopK()
    if compression in (None, "bfloat16") or isinstance(compression, Int8 | TopK):
        return compression
    raise ValueError(
        f'DiLoCo: compression is {compression!r}; use None, "bfloat16", "int8", "topk", or an '
        "Int8 or a TopK"
    )


class _PlainExchange(Exchange):
    def __init__(self, comm: Comm, dtype: torch.dtype, what: str) -> None:
        super().__init__(comm, what)
        self._dtype = dtype

    def average(self, values: Tensor, due: int) -> Tensor:
        sent, name = values.to(self._dtype), self._named(due)
        mean: Tensor = self._comm.allreduce(sent, "mean", out=sent, name=name)
        return mean.float()


class _Int8Exchange(Exchange):
    """Each worker sums one part of the vector; parts are sent and returned in int8."""

    def __init__(self, comm: Comm, count: int, how: Int8, what: str) -> None:
        self._count, self._block = count, how.block
        blocks = max(1, -(-count // (how.block * comm.size)))  # of a part
        self._part = blocks * how.block
        self._codes = 4 * blocks  # their offset in a row, after the scales
        self._row = -(-(self._codes + self._part) // 4) * 4
        errors = {"sent": torch.zeros(self._part * comm.size), "mean": torch.zeros(self._part)}
        super().__init__(comm, what, **errors)

    def average(self, values: Tensor, due: int) -> Tensor:
        comm, part = self._comm, self._part
        padded = torch.zeros(part * comm.size)
        padded[: self._count] = values
        rows = torch.zeros(comm.size, self._row, dtype=torch.uint8)
        for rank, row in enumerate(rows):
            at = slice(rank * part, (rank + 1) * part)
            self._encode(padded[at], self._errors["sent"][at], row)
        rows = comm.alltoall(rows, name=f"{self._named(due)} in int8")
        mean = torch.zeros(part)
        for row in rows:
            self._decode(row, 1.0 / comm.size, mean)
        own = torch.zeros(1, self._row, dtype=torch.uint8)
        self._encode(mean, self._errors["mean"], own[0])
        rows = comm.allgather(own, name=f"mean {self._named(due)} in int8")
        padded.zero_()
        for rank, row in enumerate(rows):
            self._decode(row, 1.0, padded[rank * part : (rank + 1) * part])
        return padded[: self._count]

    def _encode(self, values: Tensor, error: Tensor, row: Tensor) -> None:
        _native.int8_encode(
            values.data_ptr(),
            error.data_ptr(),
            row.data_ptr() + self._codes,
            row.data_ptr(),
            self._part,
            self._block,
        )

    def _decode(self, row: Tensor, factor: float, total: Tensor) -> None:
        _native.int8_decode(
            row.data_ptr() + self._codes,
            row.data_ptr(),
            self._part,
            self._block,
            factor,
            total.data_ptr(),
        )


class _TopExchange(Exchange):
    """Each worker sends its kept values to all workers."""

    def __init__(self, comm: Comm, count: int, how: TopK, what: str) -> None:
        super().__init__(comm, what, sent=torch.zeros(count))
        self._count, self._how = count, how
        self._chunk = min(how.chunk, max(1, count))
        self._kept = min(how.kept, self._chunk)
        self._entries = self._kept * -(-count // self._chunk)

    def average(self, values: Tensor, due: int) -> Tensor:
        comm, count = self._comm, self._count
        own = torch.empty(1, 4 * self._entries, dtype=torch.uint8)  # places, then values
        given = values.contiguous()
        _native.top_encode(
            given.data_ptr(),
            self._errors["sent"].data_ptr(),
            self._how.error_decay,
            own.data_ptr(),
            own.data_ptr() + 2 * self._entries,
            count,
            self._chunk,
            self._kept,
        )
        rows = comm.allgather(own, name=f"greatest of {self._named(due)}")
        mean = torch.zeros(count)
        for row in rows:
            _native.top_decode(
                row.data_ptr(),
                row.data_ptr() + 2 * self._entries,
                count,
                self._chunk,
                self._kept,
                1.0 / comm.size,
                mean.data_ptr(),
            )
        return mean
