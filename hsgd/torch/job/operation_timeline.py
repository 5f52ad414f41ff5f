"""The timeline of hsgd.torch: from operations and buckets to events.

Owns the file that is being written, if there is one. Never slows an operation down by more than an
append to a list and a reading of counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hsgd.comm.record import Record
from hsgd.comm.timeline import Timeline
from hsgd.torch.job.runtime import Runtime
from hsgd.torch.negotiation.coordinator import Operation

__all__ = ["add_levels", "start", "stop"]

_KEPT = 4096  # collectives that may end before somebody looks at them

_running: list[tuple[Runtime, Timeline]] = []


def start(job: Runtime, file_path: str) -> None:
    """Write to `file_path`, on ranks from 1 with the rank behind a dot, until stop(); local. One
    that runs is ended. Raises OSError for a path that cannot be written.
    """
    stop()
    rank = job.comm.rank
    timeline = Timeline(file_path if rank == 0 else f"{file_path}.{rank}", rank)

    def observe(operation: Operation, records: Sequence[Record]) -> None:
        begin, end = operation.begun_s, operation.ended_s
        timeline.add("queue", operation.name, operation.submitted_s, begin)
        timeline.add("collective", operation.name, begin, end, bytes=operation.payload_bytes)
        for record in records:
            add_levels(timeline.add, operation.name, record)

    job.observer = observe
    job.tracer = timeline.add
    job.keep_records(_KEPT)
    job.endings.append(stop)
    _running.append((job, timeline))


def stop() -> None:
    """Write what there is; local."""
    while _running:
        job, timeline = _running.pop()
        job.observer = job.tracer = None
        job.keep_records(0)
        timeline.close()


def add_levels(add: Callable[..., None], name: str, record: Record) -> None:
    """Add the levels of one collective as events, by `add`, which is Timeline.add()."""
    levels = {
        "intra reduce": record.intra_reduce,
        "inter": record.inter,
        "intra gather": record.intra_gather,
    }
    for row, span in levels.items():
        if span is not None:
            add(row, name, span.begin_s, span.end_s, busy_us=round(span.busy_s * 1e6, 3))
    if record.wait_s > 0:
        add("wait", name, record.call.begin_s, record.call.begin_s + record.wait_s)
