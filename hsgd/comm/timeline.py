"""Timeline: one rank's events as a Chrome trace ("Trace Event Format"), which Perfetto opens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hsgd.errors import DataError

__all__ = ["ROWS", "Timeline", "document", "summarize"]

ROWS = ("queue", "pack", "collective", "intra reduce", "inter", "intra gather", "wait")
"""Rows of a rank's time.

"queue": an operation waits for its turn and for ranks that have not submitted it. "pack": gradients
are copied into a bucket. "collective": it runs. The others are parts of it: "intra reduce" copies
inputs into the node's shared memory and sums them; "inter": leaders exchange sums between nodes;
"intra gather" copies results out of shared memory; "wait": the rank waits for others. Steps of the
levels alternate: "busy" is the time of work in an event.
"""


class Timeline:
    """Events of one rank; any thread may add some. close() writes the file."""

    def __init__(self, path: str | Path, rank: int) -> None:
        self._path = Path(path)
        self._path.write_text("")  # raises now if the path cannot be written
        self._rank = rank
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._offset_s = time.time() - time.monotonic()  # makes files of several ranks agree

    def add(self, row: str, name: str, begin_s: float, end_s: float, **details: Any) -> None:
        """Add an event from `begin_s` to `end_s`, in seconds of time.monotonic(); local."""
        event = {
            "ph": "X",
            "pid": self._rank,
            "tid": ROWS.index(row),
            "cat": row,
            "name": name,
            "ts": round((begin_s + self._offset_s) * 1e6, 3),
            "dur": round(max(0.0, end_s - begin_s) * 1e6, 3),
            "args": details,
        }
        with self._lock:
            self._events.append(event)

    def close(self) -> None:
        """Write the file; local. Raises OSError."""
        named = [_meta(self._rank, 0, "process_name", name=f"rank {self._rank}")]
        for number, row in enumerate(ROWS):
            named.append(_meta(self._rank, number, "thread_name", name=row))
            named.append(_meta(self._rank, number, "thread_sort_index", sort_index=number))
        with self._lock:
            document = {"traceEvents": [*named, *self._events], "displayTimeUnit": "ms"}
        self._path.write_text(json.dumps(document))


def _meta(rank: int, row: int, what: str, **details: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": details}


def summarize(paths: Iterable[str | Path]) -> str:
    """Return tables of the events by rank and row, and of those that took longest in all.

    Raises DataError for a file that is no timeline.
    """
    return "\n\n".join(_aligned(part) for part in _tables(paths) if len(part) > 1)


def document(paths: Iterable[str | Path]) -> dict[str, list[dict[str, str | float | None]]]:
    """Return "rows" and "collectives", the tables of summarize(), for JSON; same errors."""
    return {
        what: [
            {
                name.replace(" ", "_"): _value(name, cell)
                for name, cell in zip(head, line, strict=True)
            }
            for line in lines
        ]
        for what, (head, *lines) in zip(("rows", "collectives"), _tables(paths), strict=True)
    }


def _value(column: str, cell: str) -> str | float | None:
    if column in ("row", "collective"):
        return cell
    return (int(cell) if cell.isdecimal() else float(cell)) if cell else None


def _tables(paths: Iterable[str | Path]) -> tuple[list[list[str]], list[list[str]]]:
    """Return events by rank and row, and the longest operations; the first lines name columns."""
    events = [event for path in paths for event in _read(Path(path))]
    sums: dict[tuple[int, str], list[float]] = {}
    busy_us: dict[tuple[int, str], float] = {}
    by_name: dict[str, list[float]] = {}
    for event in events:
        place = event["pid"], event["cat"]
        sums.setdefault(place, []).append(event["dur"])
        if "busy_us" in event.get("args", {}):
            busy_us[place] = busy_us.get(place, 0.0) + event["args"]["busy_us"]
        if event["cat"] == "collective":
            by_name.setdefault(event["name"], []).append(event["dur"])
    order = {row: number for number, row in enumerate(ROWS)}
    lines = [["rank", "row", "events", "total ms", "mean us", "longest us", "busy ms"]]
    for rank, row in sorted(sums, key=lambda key: (key[0], order.get(key[1], len(order)))):
        busy = f"{busy_us[rank, row] / 1e3:.3f}" if (rank, row) in busy_us else ""
        lines.append([str(rank), row, *_figures(sums[rank, row]), busy])
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:10]
    named = [["collective", "events", "total ms", "mean us", "longest us"]]
    named += [[name, *_figures(durations)] for name, durations in longest]
    return lines, named


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        document = json.loads(path.read_text())
        events = document["traceEvents"] if isinstance(document, dict) else document
        found = [event for event in events if event.get("ph") == "X"]
        if all(isinstance(e["dur"], int | float) and e["cat"] and "pid" in e for e in found):
            return found
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise DataError(f"{path}: not a timeline; hvd.start_timeline() or HOROVOD_TIMELINE writes one")


def _figures(durations_us: Sequence[float]) -> list[str]:
    total = sum(durations_us)
    return [
        str(len(durations_us)),
        f"{total / 1e3:.3f}",
        f"{total / len(durations_us):.1f}",
        f"{max(durations_us):.1f}",
    ]


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
