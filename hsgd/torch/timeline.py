"""The timeline of hsgd.torch: from operations and buckets to events.

Owns the file that is being written, if there is one. Never slows an operation down by more than an
append to a list and a reading of counters.
"""

from __future__ import annotations

from hsgd.timeline import Timeline
from hsgd.torch.coordinator import Operation
from hsgd.torch.runtime import Runtime

__all__ = ["start", "stop"]

_running: list[tuple[Runtime, Timeline]] = []


def start(job: Runtime, file_path: str) -> None:
    """Write to `file_path`, on ranks from 1 with the rank behind a dot, until stop(); local. One
    that runs is ended. Raises OSError for a path that cannot be written.
    """
    stop()
    rank = job.comm.rank
    timeline = Timeline(file_path if rank == 0 else f"{file_path}.{rank}", rank)

    def observe(operation: Operation, waited_s: float) -> None:
        begin, end = operation.begun_s, operation.ended_s
        timeline.add("queue", operation.name, operation.submitted_s, begin)
        timeline.add("collective", operation.name, begin, end, bytes=operation.payload_bytes)
        if waited_s > 0:
            timeline.add("wait", operation.name, begin, min(end, begin + waited_s))

    job.observer = observe
    job.tracer = timeline.add
    job.endings.append(stop)
    _running.append((job, timeline))


def stop() -> None:
    """Write what there is; local."""
    while _running:
        job, timeline = _running.pop()
        job.observer = job.tracer = None
        timeline.close()
