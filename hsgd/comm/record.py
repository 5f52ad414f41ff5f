"""Record: what one collective spent its time on, on this rank, level by level.

Owns the form in which `Comm.take_records` gives what the core noted. Never measures.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Record", "Span"]


class Span(NamedTuple):
    """When this rank worked on something, in seconds on time.monotonic(). Steps of several levels
    alternate: in between it did other work, or waited.
    """

    begin_s: float
    end_s: float
    busy_s: float
    """Of that time."""

    @classmethod
    def of(cls, begin_ns: int, end_ns: int, busy_ns: int) -> Span:
        """From what the core counts in."""
        return cls(begin_ns * 1e-9, end_ns * 1e-9, busy_ns * 1e-9)


class Record(NamedTuple):
    """One collective. A level at which this rank did nothing is None."""

    name: str
    """Of the call, perhaps cut; empty without one."""
    payload_bytes: int
    call: Span
    """All of it; what is not busy was waiting for other ranks."""
    intra_reduce: Span | None
    """Inside the node: inputs into shared memory, and sums."""
    inter: Span | None
    """Between nodes, on ranks that carry data: from the first message to the last."""
    intra_gather: Span | None
    """Inside the node: results out of shared memory."""

    @property
    def wait_s(self) -> float:
        """Seconds that this rank waited for others."""
        return max(0.0, self.call.end_s - self.call.begin_s - self.call.busy_s)
