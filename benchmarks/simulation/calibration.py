"""How well the simulator predicts: allreduces on virtual nodes, as `benchmarks/plan_calibration.py`
measured them, each layout simulated with constants that were fitted to the others.

Nothing is measured: the times are those that `python benchmarks/plan_calibration.py --constants
FILE` measured. What the ranks of a node add is taken from that file's one node. The fit is
network_fit.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.stopping import keeping
from hsgd.config import Config
from simulation.network_fit import Layout, LocalLevel, Surface, fit, read_local_level, surfaces
from studies.predictions import plot_predictions, prediction_ratios, predictions_table

__all__ = ["calibrate"]

_QUICK = {"2x1@1gbit", "3x1@1gbit", "4x1@1gbit"}
_QUICK_BYTES = 1 << 20
_LARGE_BYTES = 64 << 10


def calibrate(options: argparse.Namespace) -> int:
    """Simulate the layouts of a file of measurements, options.calibrate, and show how near the
    times are; with options.quick three layouts up to 1 MB.

    Returns 0, or the exit code of an interrupted run. Raises OSError and ValueError where the file
    has no measurements, RuntimeError where the simulator fails.
    """
    measured = options.calibrate
    local = read_local_level(measured)
    layouts = list(_layouts(measured, options.quick))
    radix = Config().wire_radix
    results: list[dict[str, Any]] = []
    known: list[Surface] = []
    with keeping() as stopped:
        known.extend(surfaces(layouts, radix, local, _say))
        for layout in layouts:
            others = [surface for surface in known if surface.layout.name != layout.name]
            results += _checked(layout, others, radix, local)
    document = report.document(
        *("simulate --calibrate", {}, prediction_ratios(results, "simulated"), results),
        stopped=stopped.code,
        constants=dataclasses.asdict(fit(known)) if known else None,
        local=dataclasses.asdict(local),
    )
    report.publish(
        *(options, document, _text(document)),
        lambda doc, target: plot_predictions(doc["results"], "simulated", target),
    )
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


def _text(document: Mapping[str, Any]) -> str:
    results = document["results"]
    lines = ["simulated / measured, each layout with constants fitted to the others"]
    lines.append(predictions_table(results, "simulated"))
    large = [r["simulated_us"] / r["measured_us"] for r in results if r["bytes"] >= _LARGE_BYTES]
    if large:
        near = sum(1 / 1.15 <= share <= 1.15 for share in large)
        range_ = f"{min(large):.2f} to {max(large):.2f}"
        lines.append(f"from 64KB on: {range_}; {near} of {len(large)} in 15 %")
    lines.append(f"constants fitted to all: {document['constants']}")
    return "\n".join([*lines, f"ranks of a node: {document['local']}"])
