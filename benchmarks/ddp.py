"""Exposed communication of DistributedDataParallel: backend hsgd against gloo.

The gradients are there from the start, so that a step is DDP and nothing else, and there is nothing
for communication to hide behind.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.layouts import JobLayout, on_one_node, read_layout
from harness.stopping import Stopped, keeping
from harness.worker_jobs import WorkerJobs
from lars import MODELS

__all__ = ["main"]

JOB_LIMIT_S = 600.0
CANDIDATES = {"hsgd": "hsgd", "gloo": "peer", "nothing": "limit"}
NOTES = """\
A step is a backward pass that takes gradients from memory, through DistributedDataParallel with
gradient_as_bucket_view. "nothing" is the same step over a backend that sends nothing: what DDP
itself costs. Exposed communication is the median of a step less that of "nothing". Candidates take
turns, one step each; the time of a step is that of its slowest rank. The gradients of each
candidate are compared with the average over the ranks, and must be equal on all ranks.

Ranks meet as torchrun's workers do, without MPI. With virtual nodes (--nodes) --np is that of the
layout.

examples:
  python benchmarks/ddp.py --quick
  python benchmarks/ddp.py --nodes 2x2@10gbit 2x2@1gbit --json nodes.json
  python benchmarks/ddp.py --json ddp.json --png ddp.png
"""


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """vs_peer/MODEL: exposed communication over gloo to that over hsgd, where neither hides in the
    noise; vs_peer_step/MODEL: of whole steps; vs_limit_step/MODEL: steps over "nothing" to those
    over hsgd. On virtual nodes MODEL is MODEL/LAYOUT.
    """
    found = {}
    for keys, same in report.grouped(rows, "model", "layout").items():
        case, here = _case(*keys), {row["candidate"]: row for row in same}
        limit = here["nothing"]["median_us"] / here["hsgd"]["median_us"]
        found[f"vs_limit_step/{case}"] = float(f"{limit:.4g}")
        ours, theirs = (here[name].get("exposed_us", 0.0) for name in ("hsgd", "gloo"))
        if ours > 0 and theirs > 0:
            found[f"vs_peer/{case}"] = float(f"{theirs / ours:.4g}")
        step = here["gloo"]["median_us"] / here["hsgd"]["median_us"]
        found[f"vs_peer_step/{case}"] = float(f"{step:.4g}")
    return found


def _case(model: str, layout: str | None) -> str:
    return f"{model}/{layout}" if layout else model


def measure(
    models: Sequence[str], layouts: Sequence[JobLayout], rounds: int
) -> tuple[list[dict[str, Any]], list[str], Stopped]:
    """Rows and failures of layouts, until they end or somebody ends the run."""
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder, keeping() as stopped:
        jobs = WorkerJobs("ddp_worker", Path(folder), JOB_LIMIT_S)
        for layout in layouts:
            # As torchrun starts workers, which use no MPI even where mpirun is around them.
            environment = {"TORCHELASTIC_RUN_ID": "ddp"}
            place: dict[str, Any] = {"np": layout.ranks}
            if layout.nodes > 1:
                environment["HSGD_INTERFACES"] = "eth0"
                place["layout"] = layout.name
            store = str(Path(folder, f"store-{layout.name}"))
            plan = {"store": store, "rounds": rounds, "models": models}
            try:
                jobs.run(layout, plan, environment=environment)
            finally:
                found = jobs.written() or {"seconds": {}, "failures": []}
                rows += _rows(found, place)
                failures += found["failures"]
        failures += jobs.failures
    return rows, failures, stopped


def _rows(found: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for model, by_candidate in found["seconds"].items():
        figures = {name: report.statistics(values) for name, values in by_candidate.items()}
        for name, values in figures.items():
            row = {"model": model, **place, "candidate": name, "kind": CANDIDATES[name], **values}
            if name != "nothing":
                row["exposed_us"] = values["median_us"] - figures["nothing"]["median_us"]
            rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 where gradients were wrong."""
    parser = report.argument_parser(
        *("Measure the exposed communication of DistributedDataParallel.", NOTES),
        quick="fewer rounds: under a minute",
        png="plot the medians there",
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["resnet50", "1000x256"])
    add("--np", type=int, default=2, help="ranks (default 2)")
    add("--nodes", nargs="+", metavar="LAYOUT", help="virtual nodes, like 2x2@10gbit")
    add("--rounds", type=int, help="steps of each candidate (default 60)")
    options = report.parse(parser, argv, nodes=read_layout)
    rounds = options.rounds or (15 if options.quick else 60)
    if rounds < 1:
        parser.error("--rounds: 1 or more")
    layouts = options.nodes or [on_one_node(options.np)]
    rows, failures, stopped = measure(options.models, layouts, rounds)
    nodes = [layout.name for layout in options.nodes]
    settings = {"rounds": rounds, "np": options.np, "nodes": nodes}
    document = report.document("ddp", settings, ratios(rows), rows, failures, stopped.code)
    report.publish(options, document, table(document), plot)
    return stopped.code or int(bool(failures))


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Draw the medians."""
    heights = {"ms per step": lambda row: row["median_us"] / 1e3}
    by = ("model", "layout" if document["meta"]["settings"]["nodes"] else "np")
    report.plot_bars(document["results"], target, heights, by)


def table(document: Mapping[str, Any]) -> str:
    """Steps, and what they expose, in milliseconds: a line for each model and layout."""
    lines = []
    for keys, rows in report.grouped(document["results"], "model", "layout").items():
        case, here = _case(*keys), {row["candidate"]: row for row in rows}
        steps = [f"{here[name]['median_us'] / 1e3:.2f}" for name in CANDIDATES]
        exposed = [f"{here[name]['exposed_us'] / 1e3:.2f}" for name in ("hsgd", "gloo")]
        ahead = document["ratios"].get(f"vs_peer/{case}")
        lines.append([case, *steps, *exposed, "-" if ahead is None else f"{ahead:.2f}"])
    header = ["model", *CANDIDATES, "exposed hsgd", "exposed gloo", "ahead"]
    return "one step, median milliseconds\n" + report.table(header, lines)


if __name__ == "__main__":
    sys.exit(main())
