"""Figures of simulated collectives: ratios, tables and the plot, all from rows.

Owns the keys of "ratios", COMPARISON/COLLECTIVE/NETWORK-NODES/SIZE. Never simulates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report

__all__ = ["draw", "ratios", "tables"]

Row = Mapping[str, Any]
_Case = tuple[str, int, str]

_STYLES = {"hsgd": "-o", "peer": "--s"}
_COLOURS = ("#08519c", "#238b45", "#d94801", "#9e3d8f")


def ratios(rows: Sequence[Row], subject: str) -> dict[str, float]:
    """The best peer's time, and the bound, over hsgd's. Other candidates of hsgd than `subject`
    are part of the key: allreduce_hsgd-4/..."""
    found: dict[str, float] = {}
    for case, size, here in _points(rows):
        peers = [row["time_us"] for row in here if row["kind"] == "peer"]
        limit = [row["time_us"] for row in here if row["kind"] == "limit"]
        for row in here:
            if row["kind"] != "hsgd":
                continue
            name = row["candidate"]
            key = _key(case, size, "" if name == subject else f"_{name}")
            compared = {"vs_peer": min(peers, default=0.0), "vs_limit": min(limit, default=0.0)}
            for comparison, theirs in compared.items():
                if theirs:
                    found[f"{comparison}/{key}"] = float(f"{theirs / row['time_us']:.4g}")
    return found


def _points(rows: Sequence[Row]) -> Iterator[tuple[_Case, int, list[Row]]]:
    """Rows of one case and size, that can be compared."""
    points: dict[tuple[_Case, int], list[Row]] = {}
    for row in rows:
        case = (row["network"], row["nodes"], row["collective"])
        points.setdefault((case, row["bytes"]), []).append(row)
    for (case, size), here in points.items():
        yield case, size, here


def _key(case: _Case, size: int, suffix: str = "") -> str:
    network, nodes, collective = case
    key = f"{collective}{suffix}/{network}-{nodes}"
    return key if collective == "barrier" else f"{key}/{report.size_label(size)}"


def tables(document: Mapping[str, Any]) -> str:
    """A table for each case: microseconds of each candidate, and ratios."""
    rows, found = document["results"], document["ratios"]
    parts = []
    for case in dict.fromkeys((r["network"], r["nodes"], r["collective"]) for r in rows):
        here = [r for r in rows if (r["network"], r["nodes"], r["collective"]) == case]
        names = list(dict.fromkeys(r["candidate"] for r in here))
        times = {(r["candidate"], r["bytes"]): f"{r['time_us']:.4g}" for r in here}
        lines = []
        for size in sorted({r["bytes"] for r in here}):
            shares = [found.get(f"{vs}/{_key(case, size)}") for vs in ("vs_peer", "vs_limit")]
            words = ["-" if share is None else f"{share:.2f}" for share in shares]
            cells = [times.get((name, size), "-") for name in names]
            lines.append([report.size_label(size), *cells, *words])
        parts.append(f"{case[2]}, {case[0]} of {case[1]} nodes, simulated microseconds")
        parts.append(report.table(["bytes", *names, "ahead", "of limit"], lines))
    return "\n".join(parts)


def draw(document: Mapping[str, Any], target: Path) -> None:
    """Time over the bound, of hsgd and of the best peer: a panel for each collective and network, a
    colour for each number of nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document["results"]
    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure, axes = pyplot.subplots(
        len(collectives),
        len(networks),
        figsize=(4.2 * len(networks) + 1, 2.6 * len(collectives) + 0.8),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for line, collective in zip(axes, collectives, strict=True):
        for panel, network in zip(line, networks, strict=True):
            here = [r for r in rows if (r["collective"], r["network"]) == (collective, network)]
            _draw_panel(panel, here, document["meta"]["settings"]["subject"])
            panel.set_title(f"{collective}, {network}", fontsize=9)
        line[0].set_ylabel("time / bound")
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"simulated, {document['meta']['date'][:10]}; 1 is the bound", fontsize=10)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _draw_panel(panel: Any, rows: Sequence[Row], subject: str) -> None:
    panel.set_yscale("log")
    panel.axhline(1, color="black", linewidth=0.8)
    panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    in_nodes = all(row["collective"] == "barrier" for row in rows)
    panel.set_xscale("log", base=4)
    panel.set_xlabel("nodes" if in_nodes else "bytes", fontsize=8)
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for (_, nodes, _), size, here in _points(rows):
        times: dict[str, list[float]] = {}
        for row in here:
            if row["kind"] != "hsgd" or row["candidate"] == subject:
                times.setdefault(row["kind"], []).append(row["time_us"])
        for kind in _STYLES.keys() & times.keys():
            point = (nodes if in_nodes else size, min(times[kind]) / min(times["limit"]))
            lines.setdefault((kind, 0 if in_nodes else nodes), []).append(point)
    counts = sorted({nodes for _, nodes in lines})
    for (kind, nodes), points in sorted(lines.items()):
        label = f"{'hsgd' if kind == 'hsgd' else 'best peer'}, {nodes} nodes"
        colour = _COLOURS[counts.index(nodes) % len(_COLOURS)]
        panel.plot(
            *zip(*sorted(points), strict=True),
            _STYLES[kind],
            color=colour,
            label=label,
            markersize=3,
        )
