"""What a loader needs of a hsgd.Comm."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["RankGroup"]


class RankGroup(Protocol):
    """A communicator; all methods are collective and block."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def cross_rank(self) -> int:
        """The number of this node."""

    def allreduce(self, array: Any, op: Any = "sum") -> Any:
        """Combine `array` over all ranks."""

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Overwrite `array` on all ranks by the root's; in place."""

    def allgather(self, array: Any) -> Any:
        """Return the arrays of all ranks, one after the other."""

    def alltoall(self, array: Any, send_counts: Any) -> Any:
        """Send rows to each rank; returns what all sent here, in rank order."""

    def shared(self, shape: Any, dtype: Any = "float32") -> Any:
        """Make an array of which each node has one, zero."""

    def barrier(self) -> None:
        """Wait for all ranks."""
