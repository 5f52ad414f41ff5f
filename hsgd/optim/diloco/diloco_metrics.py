"""DiLoCoMetrics: counters and times of a DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DiLoCoMetrics"]


@dataclass
class DiLoCoMetrics:
    """Counters of this rank since its DiLoCo was made.

    Seconds are those of the calling thread, except exchange_s; bytes are those of Comm.metrics().
    """

    steps: int = 0
    outer_steps: int = 0
    """Of all fragments."""
    wait_s: float = 0.0
    """Exposed communication: waits for exchanges longer than `delay` steps, or eagerly a period.

    In a worker only the first rank waits here; the others count the wait in group_s.
    """
    exchange_s: float = 0.0
    """Exchanges between workers, in the background."""
    apply_s: float = 0.0
    """Reading weights, outer steps and writing weights."""
    group_s: float = 0.0
    """Averaging gradients in the worker, and passing outer weights to its ranks."""
    node_bytes: int = 0
    """Between workers, through shared memory."""
    sent_bytes: int = 0
    """Between workers, to other nodes."""
