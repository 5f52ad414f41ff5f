"""How well the simulator predicts: allreduces on virtual nodes, as `benchmarks/plan_calibration.py`
measured them, each layout simulated with constants that were fitted to the others.

Owns the comparison, its table and plot. Nothing is measured: the times are those that
`python benchmarks/plan_calibration.py --constants FILE` measured. What the ranks of a node add
(local_s and local_s_per_byte of simulate.py --local) is taken from that file's one node. The fit is
network_fit.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.stopping import keeping
from hsgd.config import Config
from simulation.local_level import LocalLevel, read_local_level
from simulation.network_fit import Layout, Surface, fit, surfaces

__all__ = ["calibrate"]

_QUICK = {"2x1@1gbit", "3x1@1gbit", "4x1@1gbit"}
_QUICK_BYTES = 1 << 20
_LARGE_BYTES = 64 << 10


def calibrate(
    measured: Path, json_file: Path | None = None, png: Path | None = None, quick: bool = False
) -> int:
    """Simulate the layouts of a file of measurements, and show how near the times are.

    Args:
        measured: What plan_calibration.py --constants wrote.
        json_file: Everything is written there.
        png: Simulated over measured is plotted there.
        quick: Three layouts up to 1 MB.

    Returns 0, or the exit code of an interrupted run. Raises OSError and ValueError where the file
    has no measurements, RuntimeError where the simulator fails.
    """
    local = read_local_level(measured)
    layouts = list(_layouts(measured, quick))
    facts = report.facts("simulate --calibrate")
    radix = Config().wire_radix
    results: list[dict[str, Any]] = []
    known: list[Surface] = []
    with keeping() as stopped:
        known.extend(surfaces(layouts, radix, local, _say))
        for layout in layouts:
            others = [surface for surface in known if surface.layout.name != layout.name]
            results += _checked(layout, others, radix, local)
    document = _document({**facts, "interrupted": bool(stopped.code)}, local, known, results)
    if json_file:
        report.write_json(json_file, document)
    _show(document)
    if png and results:
        _draw(document, png)
    return stopped.code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _layouts(path: Path, quick: bool) -> Iterator[Layout]:
    """Several nodes, as the file has them."""
    rows = json.loads(path.read_text(encoding="utf-8"))["measured"]
    for name in dict.fromkeys(row["layout"] for row in rows if row["nodes"] > 1):
        here = [row for row in rows if row["layout"] == name]
        if quick and name not in _QUICK:
            continue
        first = here[0]
        yield Layout(
            name=name,
            nodes=first["nodes"],
            ranks_per_node=first["ranks_per_node"],
            link_gbit=first["link_gbit"],
            crowding=first["ranks_per_node"] / first["cores"],
            seconds={
                row["bytes"]: row["seconds"]
                for row in here
                if not quick or row["bytes"] <= _QUICK_BYTES
            },
        )


def _checked(
    layout: Layout, others: Sequence[Surface], radix: int, local: LocalLevel
) -> Iterator[dict[str, Any]]:
    """The layout, simulated with constants that were fitted to the others."""
    constants = fit(others)
    for nbytes, seconds in layout.simulated(constants, radix, local).items():
        yield {
            "layout": layout.name,
            "bytes": nbytes,
            "measured_us": float(f"{1e6 * layout.seconds[nbytes]:.6g}"),
            "simulated_us": float(f"{1e6 * seconds:.6g}"),
            "constants": dataclasses.asdict(constants),
        }


def _document(
    meta: Mapping[str, Any],
    local: LocalLevel,
    known: Sequence[Surface],
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    ratios = {
        f"vs_limit/allreduce/{row['layout']}/{report.size_label(row['bytes'])}": float(
            f"{row['simulated_us'] / row['measured_us']:.4g}"
        )
        for row in results
    }
    return {
        "meta": meta,
        "ratios": ratios,
        "constants": dataclasses.asdict(fit(known)) if known else None,
        "local": dataclasses.asdict(local),
        "results": results,
    }


def _show(document: Mapping[str, Any]) -> None:
    results = document["results"]
    layouts = list(dict.fromkeys(row["layout"] for row in results))
    shares = {
        (row["layout"], row["bytes"]): row["simulated_us"] / row["measured_us"] for row in results
    }
    lines = []
    for nbytes in sorted({row["bytes"] for row in results}):
        cells = [shares.get((layout, nbytes)) for layout in layouts]
        words = ["-" if share is None else f"{share:.2f}" for share in cells]
        lines.append([report.size_label(nbytes), *words])
    print("simulated / measured, each layout with constants fitted to the others")
    print(report.table(["bytes", *layouts], lines))
    large = [share for (_, nbytes), share in shares.items() if nbytes >= _LARGE_BYTES]
    if large:
        near = sum(1 / 1.15 <= share <= 1.15 for share in large)
        print(f"from 64KB on: {min(large):.2f} to {max(large):.2f}; {near} of {len(large)} in 15 %")
    print(f"constants fitted to all: {document['constants']}")
    print(f"ranks of a node: {document['local']}")


def _draw(document: Mapping[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    results = document["results"]
    for layout in dict.fromkeys(row["layout"] for row in results):
        line = sorted(
            (row["bytes"], row["simulated_us"] / row["measured_us"])
            for row in results
            if row["layout"] == layout
        )
        axes.plot(*zip(*line, strict=True), marker="o", label=layout)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhspan(1 / 1.15, 1.15, color="#eeeeee")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("bytes per rank")
    axes.set_ylabel("simulated / measured")
    axes.legend()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
