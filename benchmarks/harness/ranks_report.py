"""Times over the number of ranks of one node, as tables and as a grid of plots, from the rows and
ratios of command.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.setup_cost import setup_table

__all__ = ["plot", "tables"]

Rows = Sequence[Mapping[str, Any]]


def tables(document: Mapping[str, Any]) -> str:
    """A table for each collective and size, with a line for each number of ranks; the set-up."""
    parts = []
    for (collective, nbytes), rows in report.grouped(
        document["results"], "collective", "bytes"
    ).items():
        what = f"{collective} {_size(collective, nbytes)}".strip()
        parts += [f"{what}, median microseconds per call", _table(rows, document["ratios"])]
    if document["setup"]:
        parts += [
            "set-up: seconds until the last rank is done, processor milliseconds of a rank",
            setup_table(document["setup"]),
        ]
    return "\n".join(parts)


def _size(collective: str, nbytes: int) -> str:
    return "" if collective == "barrier" else report.size_label(nbytes)


def _table(rows: Rows, ratios: Mapping[str, float]) -> str:
    def ahead(row: Mapping[str, Any]) -> float | None:
        size = report.size_label(row["bytes"])
        return ratios.get(f"vs_peer/{row['collective']}/{row['layout']}/{size}")

    return report.pivot(
        sorted(rows, key=lambda row: row["ranks"]),
        {"ranks": "ranks"},
        "label",
        lambda row: f"{row['median_us']:.4g}",
        {"ahead": ahead},
    )


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Draw a panel for each collective and size: times over ranks, both logarithmic. The legend
    stands beside the barrier, which has one size.
    """
    cases = report.grouped(document["results"], "collective", "bytes")
    collectives = list(dict.fromkeys(collective for collective, _ in cases))
    sizes = sorted({nbytes for collective, nbytes in cases if collective != "barrier"})
    lines, columns = len(collectives) + ("barrier" not in collectives), max(4, len(sizes))
    size = (3.3 * columns, 2.5 * lines + 0.7)
    with report.figure(target, lines, columns, size=size) as axes:
        for panels, collective in zip(axes, collectives, strict=False):
            shown = [0] if collective == "barrier" else sizes
            for panel, nbytes in zip(panels, shown, strict=False):
                _draw(panel, cases.get((collective, nbytes), []))
                panel.set_title(f"{collective} {_size(collective, nbytes)}".strip(), fontsize=10)
            panels[0].set_ylabel("median time, µs")
        _legend(axes, document)


def _draw(panel: Any, rows: Rows) -> None:
    for place, ((name,), line) in enumerate(report.grouped(rows, "candidate").items()):
        here = sorted(line, key=lambda row: row["ranks"])
        panel.plot(
            [row["ranks"] for row in here],
            [row["median_us"] for row in here],
            marker="os^Dv"[place % 5],
            label=here[0]["label"],
            markersize=4,
            linewidth=2.2 if name.startswith("hsgd") else 1.4,
        )
    ranks = sorted({row["ranks"] for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(ranks, [str(number) for number in ranks])
    panel.minorticks_off()
    panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
    panel.tick_params(labelsize=8)


def _legend(axes: Any, document: Mapping[str, Any]) -> None:
    for panel in axes.flat:
        if not panel.lines:
            panel.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    last = axes[-1][-1]
    last.legend(handles, labels, loc="upper left", frameon=False, fontsize=10)
    host = document["meta"]["host"]
    where = f"{host['cpu']}, {host['cores_usable']} cores, {document['meta']['date'][:10]}"
    last.figure.suptitle(f"Collectives of float32 on one node: {where}", fontsize=11)
