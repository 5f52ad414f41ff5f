"""Seconds to an accuracy over slow links: the other half of gossip.py.

The ranks are gossip_worker.py; each turn is a job in which all candidates run, on the same nodes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.layouts import read_layout
from harness.worker_jobs import WorkerJobs
from hsgd.errors import LaunchError
from workers.gossip_worker import WAYS

__all__ = ["measure", "ratios"]

_TURN_LIMIT_S = 150.0


def measure(
    rate: str,
    nodes: int,
    target: float,
    steps: int,
    turns: int,
    say: Callable[[str], None],
) -> Iterator[list[dict[str, Any]]]:
    """Rows of results on `nodes` nodes of one rank, whose links have `rate`: those of all turns so
    far, after each. Raises LaunchError.
    """
    layout = read_layout(f"{nodes}x1@{rate}")
    reports: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = WorkerJobs("gossip_worker", Path(folder), _TURN_LIMIT_S)
        for _ in range(turns):
            found = jobs.run(layout, {"target": target, "steps": steps, "ways": list(WAYS)})
            if found is None:
                raise LaunchError(jobs.failures[-1])
            reports += found
            rows = [_row(layout.name, target, name, reports) for name in WAYS]
            say(", ".join(f"{r['candidate']} {r['turns'][-1]:.2f} s" for r in rows))
            yield rows


def _row(
    case: str, target: float, name: str, reports: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    mine = [one for one in reports if one["way"] == name]
    return {
        "case": case,
        "candidate": name,
        "target": target,
        "reached": all(one["reached"] for one in mine),
        "seconds": round(statistics.median(one["seconds"] for one in mine), 4),
        "turns": [round(one["seconds"], 4) for one in mine],
        "steps": statistics.median(one["steps"] for one in mine),
        "accuracy": round(statistics.median(one["accuracy"] for one in mine), 2),
        "mbytes": round(statistics.median(one["mbytes"] for one in mine), 3),
        "model_bytes": mine[0]["model_bytes"],
        "curve": mine[0]["curve"],
    }


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: seconds, and bytes, of gossip in every step over those of a candidate, where
    both reached the target; of those in 16 bits also over gossip in every step in 16 bits.
    """
    found = {}
    for (case,), here in report.grouped(results, "case").items():
        rows = {row["candidate"]: row for row in here if row["reached"]}
        for every, suffix in (("every-step", ""), ("every-step-bf16", "_bf16")):
            for name, row in rows.items() if every in rows else ():
                if name == every or not name.endswith(suffix.replace("_", "-")):
                    continue
                seconds = rows[every]["seconds"] / row["seconds"]
                found[f"vs_peer/time{suffix}/{name}/{case}"] = seconds
                if row["mbytes"]:
                    traffic = rows[every]["mbytes"] / row["mbytes"]
                    found[f"vs_peer/traffic_to_target{suffix}/{name}/{case}"] = traffic
    return {key: float(f"{value:.4g}") for key, value in found.items()}
