"""Where the batches of an iteration come from: what reading threads, views and decoders share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from hsgd.errors import DataError

from ..format.ragged import Block
from ..order.epoch_order import IntArray
from ..reading.row_reader import ReadStats
from .segment_finder import Starts

__all__ = ["BatchSource", "Filled"]


@dataclass
class Filled:
    """A batch whose rows have arrived. bad: rows that have not, by the error that kept them.
    segments: of windows, where they begin in the batch; samples: their numbers in the dataset,
    where the plan is `numbered`; both in parts that follow one another.
    """

    memory: Any  # of which its source makes arrays; None for an empty batch
    count: int
    bad: list[tuple[IntArray, DataError]] = field(default_factory=list)
    segments: list[Starts] = field(default_factory=list)
    samples: list[IntArray] = field(default_factory=list)


class BatchSource(ABC):
    """The batches of one iteration, in order. stats: of all that read for it."""

    stats: list[ReadStats]

    @property
    def decoded_bytes(self) -> int:
        """Memory of decoded batches, those that the loop has included."""
        return 0

    @abstractmethod
    def get(self, timeout_s: float) -> Filled | BaseException | None:
        """Wait for the next batch, or the exception that came in its place; None at the end.

        Raises queue.Empty after timeout_s, MemoryError if the loop keeps all the memory.
        """

    @abstractmethod
    def arrays(self, filled: Filled) -> dict[str, Block]:
        """Return the fields of a batch."""

    @abstractmethod
    def close(self) -> None:
        """Let everything end as soon as it can, without waiting for it."""

    @abstractmethod
    def release(self, timeout_s: float) -> bool:
        """Wait for the end, and give back files and memory; whether all has ended in time."""
