"""Seconds to an accuracy over slow links: the other half of gossip.py.

Owns the jobs on virtual nodes and their rows. The ranks are gossip_worker.py; candidates take turns
within one job, so that all have the same nodes.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsgd.errors import LaunchError

__all__ = ["CANDIDATES", "measure", "ratios"]

CANDIDATES = ("synchronous", "every-step", "every-step-no-wait", "fixed-13", "budget-13")
_HERE = Path(__file__).resolve().parent
_TESTS = _HERE.parent / "tests"  # tests/cluster.py makes the nodes
_JOB_LIMIT_S = 600.0


def measure(
    rate: str,
    nodes: int,
    target: float,
    steps: int,
    turns: int,
    say: Callable[[str], None],
    candidates: Sequence[str] = CANDIDATES,
) -> list[dict[str, Any]]:
    """Rows of results on `nodes` nodes of one rank, whose links have `rate`. Raises LaunchError."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    from cluster import Cluster

    reason = Cluster.reason_unavailable()
    if reason:
        raise LaunchError(reason)
    names = [name for _ in range(turns) for name in candidates]
    program = [sys.executable, str(_HERE / "gossip_worker.py"), str(target), str(steps), *names]
    with Cluster(nodes, rate) as cluster:
        done = cluster.mpirun(nodes, program, timeout_s=_JOB_LIMIT_S)
    if done.returncode != 0:
        raise LaunchError(f"the ranks at {rate} ended with {done.returncode}: {done.stderr[-500:]}")
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = []
    for name in candidates:
        mine = [one for one in told if one["way"] == name]
        rows.append(
            {
                "case": f"{nodes}x1@{rate}",
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
        )
        say(f"{rows[-1]['case']} {name}: {rows[-1]['seconds']:.2f} s, {rows[-1]['mbytes']:.1f} MB")
    return rows


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: seconds, and bytes, of gossip in every step over those of a candidate, where
    both reached the target.
    """
    found = {}
    for case in dict.fromkeys(row["case"] for row in results):
        rows = {row["candidate"]: row for row in results if row["case"] == case}
        every = rows.get("every-step")
        for name, row in rows.items():
            if every and row is not every and every["reached"] and row["reached"]:
                found[f"time_vs_every_step/{name}/{case}"] = every["seconds"] / row["seconds"]
                if row["mbytes"]:
                    traffic = every["mbytes"] / row["mbytes"]
                    found[f"traffic_to_target_vs_every_step/{name}/{case}"] = traffic
    return {key: float(f"{value:.4g}") for key, value in found.items()}
