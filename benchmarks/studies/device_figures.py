"""Pictures of device_allreduce.py: times over sizes, and one step as lanes over time.

Owns what is drawn, and how much of the copies hides behind computing. Never measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report import size_label

__all__ = ["hidden", "plot_sizes", "plot_trace"]

Row = Mapping[str, Any]
Interval = tuple[float, float]
LANES = {"compute": "#bbbbbb", "down": "#08519c", "up": "#41ae76"}
LANE_NAMES = {"compute": "computing", "down": "copies down", "up": "copies up"}
COLOURS = {
    "hsgd-staged": "#08519c",
    "hsgd-nccl": "#1d91c0",
    "gloo": "#d94801",
    "nccl": "#8c2d04",
    "pageable-hsgd": "#fdae6b",
    "pageable-gloo": "#bf9000",
    "bus": "#000000",
}


def hidden(trace: Sequence[Row]) -> dict[str, float]:
    """Milliseconds of a step, of its computing, of its copies, and the share of the copies' time in
    which something is computed.
    """
    computing = _union(_interval(event) for event in trace if event["lane"] == "compute")
    copying = _union(_interval(event) for event in trace if event["lane"] != "compute")
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other))
        for begin, end in computing
        for other, other_end in copying
    )
    copies = _length(copying)
    found = {
        "step_ms": _length(_hull([*computing, *copying])),
        "compute_ms": _length(computing),
        "copy_ms": copies,
        "hidden_share": both / copies if copies else 0.0,
    }
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _interval(event: Row) -> Interval:
    return event["begin_ms"], event["begin_ms"] + event["ms"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _hull(intervals: Sequence[Interval]) -> list[Interval]:
    if not intervals:
        return []
    return [(min(begin for begin, _ in intervals), max(end for _, end in intervals))]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def plot_trace(trace: Sequence[Row], title: str, target: Path) -> None:
    """Draw the lanes of a step into a PNG."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(11, 2.6), layout="constrained")
    for height, (lane, colour) in enumerate(reversed(LANES.items())):
        bars = [(e["begin_ms"], e["ms"]) for e in trace if e["lane"] == lane]
        axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in reversed(LANES)])
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    share = hidden(trace)
    axes.set_title(
        f"{title}\nstep {share['step_ms']:g} ms, computing {share['compute_ms']:g} ms, copies "
        f"{share['copy_ms']:g} ms, of which {share['hidden_share']:.0%} behind computing",
        fontsize=10,
        loc="left",
    )
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def plot_sizes(rows: Sequence[Row], title: str, target: Path) -> None:
    """Draw payload per second over sizes into a PNG, a panel for each layout."""
    pyplot = _pyplot()
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(layouts), figsize=(5 * len(layouts) + 2, 5), squeeze=False, layout="constrained"
    )
    for panel, layout in zip(panels[0], layouts, strict=True):
        here = [row for row in rows if row["layout"] == layout]
        for name in dict.fromkeys(row["candidate"] for row in here):
            line = [row for row in here if row["candidate"] == name]
            style = {"hsgd": "-o", "peer": "-s", "limit": ":"}.get(line[0]["kind"], "--x")
            x = [row["bytes"] for row in line]
            y = [row["bytes"] / row["median_us"] * 1e6 / (1 << 30) for row in line]
            colour = COLOURS.get(name)
            panel.plot(x, y, style, color=colour, label=line[0]["label"], markersize=4)
        panel.set_xscale("log", base=2)
        sizes = sorted({row["bytes"] for row in here})
        panel.set_xticks(sizes, [size_label(size) for size in sizes])
        panel.minorticks_off()
        panel.set_yscale("log")
        panel.set_xlabel("bytes per rank")
        panel.set_title(layout, fontsize=10)
        panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("GiB of payload per second")
    panels[0][-1].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
