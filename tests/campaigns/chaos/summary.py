"""What campaigns found, by layer: counts, and how long the others took to hear of a fault.

Owns the words of the table.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from campaigns.chaos.layers import LAYERS
from campaigns.chaos.oracle import KINDS

__all__ = ["summary", "table"]


def summary(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each layer: cases, faults that took place, problems by kind, how long errors took."""
    of_layer: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        of_layer[result["case"]["layer"]].append(result)
    return {name: _summary_of(of_layer[name]) for name in LAYERS if name in of_layer}


def _summary_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = Counter(kind for result in results for kind in {k for k, _ in result["problems"]})
    one_node = [result for result in results if len(set(result["case"]["nodes"])) == 1]
    nodes = [result for result in results if len(set(result["case"]["nodes"])) > 1]
    return {
        "cases": len(results),
        "faults": sum(result["took_place"] for result in results),
        **{kind: kinds[kind] for kind in KINDS},
        "node": _times(one_node),
        "nodes": _times(nodes),
    }


def _times(results: list[dict[str, Any]]) -> dict[str, float]:
    latencies = sorted(each for result in results for each in result["latency_s"])
    if not latencies:
        return {}
    return {
        "errors": len(latencies),
        "p50_s": statistics.median(latencies),
        "p99_s": latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
        "most_s": latencies[-1],
    }


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each layer, under a line of headings."""
    head = ["layer", "cases", "faults", *KINDS, "node p50", "p99", "nodes p50", "p99"]
    rows = [head]
    for name, each in summary(results).items():
        counts = [str(each[key]) for key in ("cases", "faults", *KINDS)]
        times = [
            f"{1e3 * each[where][key]:.0f} ms" if each[where] else "-"
            for where in ("node", "nodes")
            for key in ("p50_s", "p99_s")
        ]
        rows.append([name, *counts, *times])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
