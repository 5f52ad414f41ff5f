"""RankGroup: the methods of a hsgd.Comm that a loader needs."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["RankGroup"]


class RankGroup(Protocol):
    """A communicator; all methods are collective and blocking."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def cross_rank(self) -> int:
        """Number of this node."""

    def allreduce(self, array: Any, op: Any = "sum") -> Any:
        """Combine `array` over all ranks."""

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Overwrite `array` on all ranks by that of the root, in place."""

    def allgather(self, array: Any) -> Any:
        """Return the arrays of all ranks, one after the other."""

    def alltoall(self, array: Any, send_counts: Any) -> Any:
        """Send rows to each rank; return the rows received, in rank order."""

    def shared(self, shape: Any, dtype: Any = "float32") -> Any:
        """Make an array of zeros that the ranks of a node share."""

    def barrier(self) -> None:
        """Wait for all ranks."""
