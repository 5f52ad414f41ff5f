"""What communication and the update cost a step, and what they hold: parameters that exist once per
node against a copy for each rank.

The steps are in training_worker.py, the turns in training.py.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import training
from harness import report
from harness.layouts import JobLayout, Testbed
from harness.steps import UPDATES, payload_bytes
from training import Effort, Samples, Way

__all__ = ["WAYS", "main", "ratios"]

EPILOG = """\
A step makes the gradients of a model's shapes, averages them over all ranks and updates with
SGD(momentum=0.9, fused=True). "comm + update" is the median of steps minus that of steps that only
make gradients and alternate with them in the same processes. Weights are compared with the exact
ones before anything is timed.

Memory is the proportional resident size that a rank gains by a model, its gradients, optimizer and
buckets, in processes that do nothing else; that of a node is the sum over its ranks.

Ratios, above 1 is ahead: vs_hsgd/CASE/LAYOUT is the time of hsgd.torch without node_shared / with
it, vs_horovod and vs_ddp likewise, vs_peer the best of Horovod and DistributedDataParallel (with
ZeroRedundancyOptimizer or without); memory_vs_horovod/... a node's bytes of Horovod / ours.

examples:
  python benchmarks/node_shared.py --quick
  python benchmarks/node_shared.py --np 2 4 --json node_shared.json --png node_shared.png
  python benchmarks/node_shared.py --np 4 --cases bert+sgd --measure time --seconds 30
"""

WAYS = (
    Way("hsgd-node-shared", "hsgd, node_shared", "hsgd", "hsgd-node-shared", {}),
    Way("hsgd", "hsgd.torch", "hsgd", "hsgd", {}),
    Way("horovod", "Horovod", "peer", "horovod", {}),
    Way("ddp", "DDP over gloo", "peer", "ddp", {}),
    Way("ddp-zero", "DDP, ZeRO", "peer", "ddp-zero", {}),
)


def weigh(
    testbed: Testbed,
    ways: Sequence[Way],
    cases: Sequence[str],
    failures: list[str],
    found: dict[tuple[str, str], list[int]],
) -> None:
    """Bytes that each rank gains, by case and way, into `found`; each in new processes."""
    for case in cases:
        for way in ways:
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                job = training.worker_job(way, testbed, Path(folder), stack)
                with training.noting_failures(way, failures):
                    job.connect()
                    answers = training.ordered(job, way.name, f"weigh {case}", failures)
                    if answers:
                        found[case, way.name] = [answer["bytes"] for answer in answers]
                    training.ordered(job, way.name, "end", failures)


def rows(
    layout: JobLayout,
    found: Mapping[tuple[str, str], Samples],
    weights: Mapping[tuple[str, str], Sequence[int]],
) -> list[dict[str, Any]]:
    """Rows of results, times in microseconds; None for what was not measured."""
    by_name = {way.name: way for way in WAYS}
    rows = []
    for case, name in dict.fromkeys([*found, *weights]):
        held = weights.get((case, name), [])
        times: dict[str, Any] = {"spent_us": None}
        samples = found.get((case, name), Samples([], []))
        if not samples.step and not held:
            continue
        if samples.step:
            spent = statistics.median(samples.step) - statistics.median(samples.plain)
            times = {"samples": len(samples.step), **report.statistics(samples.step)}
            times["spent_us"] = float(f"{1e6 * spent:.6g}")
        rows.append(
            {
                "layout": layout.name,
                "case": case,
                "candidate": name,
                "label": by_name[name].label,
                "kind": by_name[name].kind,
                "ranks": layout.ranks,
                "bytes": payload_bytes(case),
                **times,
                "rank_bytes": max(held, default=None),
                "job_bytes": sum(held) or None,
            }
        )
    return rows


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: a rival's time or memory over that of node_shared."""
    found = {}
    for (case, layout), rows in report.grouped(results, "case", "layout").items():
        here = {row["candidate"]: row for row in rows}
        ours = here.pop("hsgd-node-shared", None)
        if ours is None:
            continue
        key = f"{case}/{layout}"
        timed = {name: row["spent_us"] for name, row in here.items() if row["spent_us"]}
        if ours["spent_us"]:
            others = {name for name, row in here.items() if row["kind"] != "peer"}
            compared = report.versus(ours["spent_us"], timed, apart=others)
            found.update({f"{vs}/{key}": value for vs, value in compared.items()})
        for name, row in here.items():
            if row["job_bytes"] and ours["job_bytes"]:
                found[f"memory_vs_{name}/{key}"] = row["job_bytes"] / ours["job_bytes"]
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def tables(doc: Mapping[str, Any]) -> str:
    """The document as text for a terminal."""
    return report.case_tables(
        doc,
        UPDATES,
        {
            "step ms": lambda row: _cell(row, "median_us", 1e3, 2),
            "p99": lambda row: _cell(row, "p99_us", 1e3, 2),
            "comm + update": lambda row: _cell(row, "spent_us", 1e3, 2),
            "MB of a rank": lambda row: _cell(row, "rank_bytes", 1e6, 0),
            "MB of all": lambda row: _cell(row, "job_bytes", 1e6, 0),
        },
    )


def _cell(row: Mapping[str, Any], key: str, unit: float, digits: int) -> str:
    value = row.get(key)
    return "-" if value is None else f"{value / unit:.{digits}f}"


def plot(doc: Mapping[str, Any], target: Path) -> None:
    """Bars of time and of memory, a column for each case and layout."""
    heights = {
        "communication and update, ms": lambda row: (row["spent_us"] or 0) / 1e3,
        "memory of all ranks, MB": lambda row: (row["job_bytes"] or 0) / 1e6,
    }
    report.plot_bars(doc["results"], target, heights)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured, or something wrong."""
    options, layouts = training.read_options(_parser(), argv)
    cases = options.cases or (["resnet50+sgd"] if options.quick else list(UPDATES))
    ways = [way for way in WAYS if not options.candidates or way.name in options.candidates]
    turns, seconds = (2, 5.0) if options.quick else (20, 20.0)
    effort = Effort(options.turns or turns, options.seconds or seconds)
    found: dict[str, dict[tuple[str, str], Samples]] = {layout.name: {} for layout in layouts}
    weights: dict[str, dict[tuple[str, str], list[int]]] = {layout.name: {} for layout in layouts}
    failures: list[str] = []

    def work(testbed: Testbed) -> None:
        name = testbed.layout.name
        if options.measure != "memory":
            training.measure(testbed, ways, cases, effort, failures, found[name])
        if options.measure != "time":
            weigh(testbed, ways, cases, failures, weights[name])

    stopped = training.visit(layouts, failures, work)
    results = [row for n in layouts for row in rows(n, found[n.name], weights[n.name])]
    settings = {"layouts": {n.name: str(n) for n in layouts}, "cases": UPDATES}
    settings |= {"turns": effort.turns, "seconds": effort.seconds}
    doc = report.document(
        *("node_shared", settings, ratios(results), results, failures, stopped.code)
    )
    report.publish(options, doc, tables(doc), plot)
    wrong = any("wrong result" in failure for failure in failures)
    return stopped.code or int(wrong or not results)


def _parser() -> argparse.ArgumentParser:
    parser = training.option_parser(
        *("Measure parameters that exist once per node: time of a step, and memory.", EPILOG),
        quick="one case and few steps: under a minute",
        png="plot times and memory there",
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=UPDATES, help="default: all, with --quick the first")
    names = [way.name for way in WAYS]
    add("--candidates", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    what = ("time", "memory")
    add("--measure", choices=what, help="one of the two alone, for parts of a long run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
