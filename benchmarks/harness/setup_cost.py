"""What it takes until collectives can be called: hsgd's communicator, and MPI_Init of each MPI.

native/worker.c measures it, with a clock and getrusage(), after a barrier for the communicator,
from the start of the program for MPI_Init, which waits for all ranks to be started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness import report
from harness.candidates import Candidate

if TYPE_CHECKING:
    from harness.layouts import JobLayout

__all__ = ["setup_ratios", "setup_rows", "setup_table"]

_WHAT = {"hsgd-c": ("communicator", "setup"), "mpi-c": ("MPI_Init", "init")}  # by binding


def goal_s(ranks: int) -> float:
    """Processor seconds of all ranks together that a communicator may take."""
    return 1.0 + 0.005 * ranks


def setup_rows(
    candidate: Candidate, layout: JobLayout, answers: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The row of a candidate that was set up; none for those whose set-up is no MPI and not ours,
    and for jobs in Python.
    """
    what, key = _WHAT.get(candidate.does, ("", ""))
    spent = [answer[key] for answer in answers if key in answer]
    if not spent:
        return []
    row = {
        "candidate": candidate.name,
        "label": candidate.label,
        "what": what,
        "layout": layout.name,
        "ranks": layout.ranks,
        "wall_s": max(wall for wall, _ in spent),
        "cpu_s": round(sum(cpu for _, cpu in spent), 6),
        "cpu_s_of_a_rank": round(sum(cpu for _, cpu in spent) / len(spent), 6),
    }
    return [row]


def setup_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """vs_goal/setup/LAYOUT: the goal over the processor time of hsgd's communicator."""
    return {
        f"vs_goal/setup/{row['layout']}": float(f"{goal_s(row['ranks']) / row['cpu_s']:.4g}")
        for row in rows
        if row["candidate"] == "hsgd-c" and row["cpu_s"] > 0
    }


def setup_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Wall seconds, and processor milliseconds of a rank, for each number of ranks."""
    columns: dict[str, Any] = {
        "ranks": "ranks",
        "": lambda row: f"{row['label']}: {row['what']}",
        "s": lambda row: f"{row['wall_s']:.3f}",
        "ms of a rank": lambda row: f"{1e3 * row['cpu_s_of_a_rank']:.1f}",
    }
    return report.rows_table(sorted(rows, key=lambda row: row["ranks"]), columns)
