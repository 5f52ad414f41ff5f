"""The timeline of hsgd.torch: events of operations and buckets in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hsgd.comm.record import Record
from hsgd.comm.timeline import Timeline
from hsgd.torch.job.runtime import Runtime
from hsgd.torch.negotiation.coordinator import Operation

__all__ = ["add_levels", "start", "stop"]

_KEPT = 4096  # records of collectives that are kept until they are read

_running: list[tuple[Runtime, Timeline]] = []


def start(job: Runtime, file_path: str) -> None:
    """Write a timeline until stop(), which ends a running one first; local.

    `file_path` gets ".rank" appended from rank 1 on. Raises OSError if it cannot be written.
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
    """Write the rest and close the file; local."""
    while _running:
        job, timeline = _running.pop()
        job.observer = job.tracer = None
        job.keep_records(0)
        timeline.close()


def add_levels(add: Callable[..., None], name: str, record: Record) -> None:
    """Add the levels of one collective as events, by `add`, which is Timeline.add(); local."""
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
