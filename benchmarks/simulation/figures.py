"""Figures of simulated collectives: ratios, tables and the plot, all from rows.

The keys of "ratios" are COMPARISON/COLLECTIVE/NETWORK-NODES/SIZE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report

__all__ = ["draw", "ratios", "tables"]

Row = Mapping[str, Any]
_CASE = ("network", "nodes", "collective")

_STYLES = {"hsgd": "-o", "peer": "--s"}
_COLOURS = ("#08519c", "#238b45", "#d94801", "#9e3d8f")


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """The best peer's time, and the bound, over hsgd's."""
    found: dict[str, float] = {}
    for (*case, size), here in report.grouped(rows, *_CASE, "bytes").items():
        times = {
            kind: min(row["time_us"] for row in same)
            for (kind,), same in report.grouped(here, "kind").items()
        }
        if "hsgd" not in times:
            continue
        for comparison, theirs in (("vs_peer", "peer"), ("vs_limit", "limit")):
            if times.get(theirs):
                share = float(f"{times[theirs] / times['hsgd']:.4g}")
                found[f"{comparison}/{_key(case, size)}"] = share
    return found


def _key(case: Sequence[Any], size: int) -> str:
    network, nodes, collective = case
    key = f"{collective}/{network}-{nodes}"
    return key if collective == "barrier" else f"{key}/{report.size_label(size)}"


def tables(document: Mapping[str, Any]) -> str:
    """A table for each case: microseconds of each candidate, and ratios."""
    found = document["ratios"]
    parts = []
    for case, rows in report.grouped(document["results"], *_CASE).items():
        shares: dict[str, Any] = {}
        for title, vs in (("ahead", "vs_peer"), ("of limit", "vs_limit")):
            shares[title] = lambda row, vs=vs, case=case: found.get(
                f"{vs}/{_key(case, row['bytes'])}"
            )
        parts.append(f"{case[2]}, {case[0]} of {case[1]} nodes, simulated microseconds")
        size: dict[str, Any] = {"bytes": lambda row: report.size_label(row["bytes"])}
        in_order = sorted(rows, key=lambda row: row["bytes"])
        parts.append(
            report.pivot(in_order, size, "candidate", lambda row: f"{row['time_us']:.4g}", shares)
        )
    return "\n".join([*parts, *(f"left out: {line}" for line in document["left_out"])])


def draw(document: Mapping[str, Any], target: Path) -> None:
    """Time over the bound, of hsgd and of the best peer: a panel for each collective, a colour for
    each number of nodes."""
    rows = document["results"]
    panels = report.grouped(rows, "collective")
    size = (5.2, 2.6 * len(panels) + 0.8)
    with report.figure(target, len(panels), size=size) as axes:
        for (panel,), ((collective,), here) in zip(axes, panels.items(), strict=True):
            _draw_panel(panel, here)
            panel.set_title(collective, fontsize=9)
            panel.set_ylabel("time / bound")
        axes[0][0].legend(fontsize=7, frameon=False)
        date = document["meta"]["date"][:10]
        axes[0][0].figure.suptitle(f"simulated, {date}; 1 is the bound", fontsize=10)


def _draw_panel(panel: Any, rows: Sequence[Row]) -> None:
    panel.set_yscale("log")
    panel.axhline(1, color="black", linewidth=0.8)
    panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
    in_nodes = all(row["collective"] == "barrier" for row in rows)
    panel.set_xscale("log", base=4)
    panel.set_xlabel("nodes" if in_nodes else "bytes", fontsize=8)
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for (nodes, size), here in report.grouped(rows, "nodes", "bytes").items():
        times: dict[str, list[float]] = {}
        for row in here:
            times.setdefault(row["kind"], []).append(row["time_us"])
        for kind in _STYLES.keys() & times.keys():
            point = (nodes if in_nodes else size, min(times[kind]) / min(times["limit"]))
            lines.setdefault((kind, 0 if in_nodes else nodes), []).append(point)
    counts = sorted({nodes for _, nodes in lines})
    for (kind, nodes), points in sorted(lines.items()):
        label = f"{'hsgd' if kind == 'hsgd' else 'best peer'}, {nodes} nodes"
        colour = _COLOURS[counts.index(nodes) % len(_COLOURS)]
        x, y = zip(*sorted(points), strict=True)
        panel.plot(x, y, _STYLES[kind], color=colour, label=label, markersize=3)
