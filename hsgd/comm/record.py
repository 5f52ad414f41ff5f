"""Record: how one collective spent its time on this rank, level by level."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Record", "Span"]


class Span(NamedTuple):
    """Seconds of time.monotonic() for one step; steps of several levels alternate."""

    begin_s: float
    end_s: float
    busy_s: float
    """Time of work between begin and end."""

    @classmethod
    def of(cls, begin_ns: int, end_ns: int, busy_ns: int) -> Span:
        """Convert nanoseconds to seconds."""
        return cls(begin_ns * 1e-9, end_ns * 1e-9, busy_ns * 1e-9)


class Record(NamedTuple):
    """One collective. A level on which this rank did nothing is None."""

    name: str
    """Name of the call, perhaps cut; empty if it has none."""
    payload_bytes: int
    call: Span
    """The whole call; time that is not busy was spent waiting for other ranks."""
    intra_reduce: Span | None
    """Inside the node: inputs are copied into shared memory and summed."""
    inter: Span | None
    """Between nodes, on ranks that carry data: from the first message to the last."""
    intra_gather: Span | None
    """Inside the node: results are copied out of shared memory."""

    @property
    def wait_s(self) -> float:
        """Seconds that this rank waited for others."""
        return max(0.0, self.call.end_s - self.call.begin_s - self.call.busy_s)
