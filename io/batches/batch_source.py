"""BatchSource: the interface of reading threads, mapped views and decoders."""

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
    """A batch whose rows have arrived; `segments` and `samples` are in consecutive parts."""

    memory: Any  # from which its source makes arrays; None for an empty batch
    count: int
    bad: list[tuple[IntArray, DataError]] = field(default_factory=list)  # unreadable rows
    segments: list[Starts] = field(default_factory=list)  # their starts, for windows
    samples: list[IntArray] = field(default_factory=list)  # numbers, if `numbered`


class BatchSource(ABC):
    """The batches of one iteration, in order; `stats` are those of all its reading threads."""

    stats: list[ReadStats]

    @property
    def decoded_bytes(self) -> int:
        """Memory of decoded batches, those in the loop included."""
        return 0

    @abstractmethod
    def get(self, timeout_s: float) -> Filled | BaseException | None:
        """Wait for the next batch, or the exception in its place; None at the end.

        Raises queue.Empty after timeout_s, MemoryError if the loop holds all the memory.
        """

    @abstractmethod
    def arrays(self, filled: Filled) -> dict[str, Block]:
        """Return the fields of a batch."""

    @abstractmethod
    def close(self) -> None:
        """Make everything end as soon as it can, without waiting."""

    @abstractmethod
    def release(self, timeout_s: float) -> bool:
        """Wait for the end, and free files and memory; return whether all ended in time."""
