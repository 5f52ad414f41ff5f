"""Seconds to an accuracy over slow links: the other half of gossip.py.

Owns the jobs on virtual nodes and their rows. The ranks are gossip_worker.py; each turn is a job in
which all candidates run, on the same nodes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.rank_command import rank_command
from hsgd.errors import LaunchError

__all__ = ["CANDIDATES", "measure", "ratios"]

CANDIDATES = (
    *("synchronous", "every-step", "every-step-bf16", "every-step-no-wait"),
    *("fixed-6", "fixed-6-bf16", "fixed-13", "change"),
    *("budget-6.5", "budget-6.5-bf16", "budget-13", "budget-13-bf16"),
)
_TURN_LIMIT_S = 150.0


def measure(
    rate: str,
    nodes: int,
    target: float,
    steps: int,
    turns: int,
    say: Callable[[str], None],
    candidates: Sequence[str] = CANDIDATES,
) -> Iterator[list[dict[str, Any]]]:
    """Rows of results on `nodes` nodes of one rank, whose links have `rate`: those of all turns so
    far, after each. Raises LaunchError.
    """
    from toolkit.cluster import Cluster

    reason = Cluster.reason_unavailable()
    if reason:
        raise LaunchError(reason)
    program = rank_command("gossip_worker", str(target), str(steps))
    reports: list[dict[str, Any]] = []
    with Cluster(nodes, rate) as cluster:
        for _ in range(turns):
            done = cluster.mpirun(nodes, [*program, *candidates], timeout_s=_TURN_LIMIT_S)
            if done.returncode != 0:
                last_words = done.stderr[-500:]
                raise LaunchError(f"the ranks at {rate} ended with {done.returncode}: {last_words}")
            reports += [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
            rows = [_row(f"{nodes}x1@{rate}", target, name, reports) for name in candidates]
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
    for case in dict.fromkeys(row["case"] for row in results):
        rows = {row["candidate"]: row for row in results if row["case"] == case and row["reached"]}
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
