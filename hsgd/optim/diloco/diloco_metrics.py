"""What a DiLoCo counts.

Owns the names and units. Never counts: the optimizer does.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DiLoCoMetrics"]


@dataclass
class DiLoCoMetrics:
    """What this rank did since its DiLoCo was made. Seconds are of the calling thread, but for
    exchange_s; bytes are those of hsgd.Comm.metrics().
    """

    steps: int = 0
    outer_steps: int = 0
    """Of all fragments."""
    wait_s: float = 0.0
    """Waiting for exchanges that took longer than `delay` steps, or with eager updates than a
    period: exposed communication. Of a worker of several ranks the first one waits, and the others
    for it: in their group_s."""
    exchange_s: float = 0.0
    """Of exchanges between workers, in the background."""
    apply_s: float = 0.0
    """Reading weights, outer steps and writing weights."""
    group_s: float = 0.0
    """Averaging gradients in the worker, and telling its ranks the outer weights."""
    node_bytes: int = 0
    """Between workers, through shared memory."""
    sent_bytes: int = 0
    """Between workers, to other nodes."""
