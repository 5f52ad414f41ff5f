"""How well `hsgd plan` predicts: allreduces measured on layouts, each predicted by constants that
were fitted to the others; and the constants.

The model is hsgd.tools.plan.model, the fit studies/plan_fit.py, the measuring harness/turns.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.candidates import select
from harness.layouts import JobLayout, on_one_node, read_layout
from harness.stopping import keeping
from harness.turns import MeasurementPlan, Run, measure
from hsgd.jobs.launch import launch
from hsgd.tools.plan.cli import read_rate
from hsgd.tools.plan.model import Cluster
from studies.plan_fit import Measured, Residual, fit, residuals
from studies.predictions import plot_predictions, prediction_ratios, predictions_table

__all__ = ["main"]

EPILOG = """\
Virtual nodes (--nodes) need Linux and root; they share the cores of this machine, and the model is
told so: a node of n has 1 / n of them. Each layout is predicted with constants that were fitted to
the other ones; nine of ten measurements lie within the bounds that `hsgd plan` then prints.

Ratios in the JSON: vs_limit/allreduce/LAYOUT/SIZE is predicted / measured: 1 is perfect, below 1 is
slower than predicted.

examples:
  python benchmarks/plan_calibration.py --quick
  python benchmarks/plan_calibration.py --constants hsgd/tools/plan/calibration.json
"""
SHAPES = ("2x1", "2x2", "3x1", "3x2", "4x1")
LAYOUTS = (
    *(f"{shape}@{rate}" for rate in ("1gbit", "10gbit") for shape in SHAPES),
    *("2x1@100mbit", "2x2@100mbit"),
)
QUICK_LAYOUTS = ("2x1@1gbit", "2x2@100mbit")
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_CANDIDATE = "hsgd-c"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 where a result was wrong or nothing was measured."""
    parser = report.argument_parser(
        *("Measure allreduces and fit the constants of hsgd plan to them.", EPILOG),
        quick="two layouts, fewer sizes: under a minute",
        png="plot predicted over measured there",
    )
    add = parser.add_argument
    add("--nodes", nargs="+", metavar="LAYOUT", default=LAYOUTS, help="virtual nodes with a rate")
    add("--rounds", type=int, help="turns of each case (default 4)")
    add("--constants", type=Path, metavar="FILE", help="write the constants there, for hsgd plan")
    options = report.parse(parser, argv, "constants", nodes=read_layout)
    nodes = map(read_layout, QUICK_LAYOUTS) if options.quick else options.nodes
    layouts = (on_one_node(2), *nodes)
    if len(layouts) < 3 or any(layout.rate is None for layout in layouts[1:]):
        parser.error("--nodes: give two layouts or more, each with a rate, such as 2x2@1gbit")
    plan = MeasurementPlan(
        sizes=(8, 64 << 10, 1 << 20) if options.quick else SIZES,
        layouts=layouts,
        candidates=select([_CANDIDATE], ["allreduce"]),
        rounds=options.rounds or (2 if options.quick else 4),
        budget_s=0.1 if options.quick else 0.4,
        install=False,
    )
    found = Run()
    with keeping() as stopped:
        measure(plan, found)
    cases = _cases(found.rows(plan), layouts)
    if len({case.layout for case in cases}) < 2:
        print("error: too little was measured for a fit", file=sys.stderr)
        return stopped.code or 1
    checked = residuals(cases)
    document = _document(cases, checked, found, stopped.code)
    text = predictions_table(document["results"], "predicted")
    text += "".join(f"\n{name}: {value}" for name, value in document["calibration"].items())
    report.publish(
        options,
        document,
        f"predicted / measured, each layout with constants fitted to the others\n{text}",
        lambda doc, target: plot_predictions(doc["results"], "predicted", target),
    )
    if options.constants:
        constants = {key: document[key] for key in ("calibration", "measured")}
        options.constants.write_text(json.dumps(constants, indent=1) + "\n", encoding="utf-8")
    return stopped.code or int(found.any_wrong)


def _cases(rows: Sequence[Mapping[str, Any]], layouts: Sequence[JobLayout]) -> list[Measured]:
    """What was measured, with the cluster that each layout stands for."""
    by_name = {layout.name: layout for layout in layouts}
    return [
        Measured(
            layout=row["layout"],
            cluster=_cluster(by_name[row["layout"]]),
            nbytes=row["bytes"],
            seconds=row["median_us"] * 1e-6,
        )
        for row in rows
    ]


def _cluster(layout: JobLayout) -> Cluster:
    if len(set(layout.ranks_of_nodes)) > 1:
        raise ValueError(f"{layout.name}: nodes have different numbers of ranks")
    return Cluster(
        nodes=layout.nodes,
        ranks_per_node=layout.ranks_of_nodes[0],
        link_gbit=read_rate(layout.rate) if layout.rate else 1.0,  # one node uses none
        cores=launch.cores() / layout.nodes,
    )


def _document(
    cases: Sequence[Measured], checked: Sequence[Residual], found: Run, stopped: int
) -> dict[str, Any]:
    facts = report.facts("plan_calibration")
    layouts = ", ".join(dict.fromkeys(case.layout for case in cases))
    source = (
        f"{layouts} on {os.cpu_count()} cores ({facts['host']['cpu']}), {facts['date'][:10]}, "
        "benchmarks/plan_calibration.py"
    )
    cluster = ("nodes", "ranks_per_node", "link_gbit", "cores")
    measured = [
        {
            "layout": case.layout,
            **{name: getattr(case.cluster, name) for name in cluster},
            "bytes": case.nbytes,
            "seconds": float(f"{case.seconds:.4g}"),
        }
        for case in cases
    ]
    results = [
        {
            "layout": one.case.layout,
            "bytes": one.case.nbytes,
            "measured_us": 1e6 * one.case.seconds,
            "predicted_us": 1e6 * one.predicted_s,
            "small": one.is_small,
        }
        for one in checked
    ]
    return report.document(
        *("plan_calibration", {}, prediction_ratios(results, "predicted"), results),
        *(found.failures, stopped),
        calibration=vars(fit(cases, checked, source)),
        measured=measured,
    )


if __name__ == "__main__":
    sys.exit(main())
