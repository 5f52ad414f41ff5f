"""What communication and the update cost a step, and what they hold: parameters that exist once per
node against a copy for each rank.

Owns the candidates and the comparison. The steps are in training_worker.py, the turns in
training.py.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import training
from hsgd.errors import LaunchError
from layouts import Layout, Place, on_one_node, open_place, read_layout
from steps import UPDATES, payload_bytes
from training import Samples, Way

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
"""

WAYS = (
    Way("hsgd-node-shared", "hsgd, node_shared", "hsgd", "hsgd-node-shared", {}),
    Way("hsgd", "hsgd.torch", "hsgd", "hsgd", {}),
    Way("horovod", "Horovod", "peer", "horovod", {}),
    Way("ddp", "DDP over gloo", "peer", "ddp", {}),
    Way("ddp-zero", "DDP, ZeRO", "peer", "ddp-zero", {}),
)


def weigh(
    place: Place, ways: Sequence[Way], cases: Sequence[str], failures: list[str]
) -> dict[tuple[str, str], list[int]]:
    """Bytes that each rank gains, by case and way; each in new processes."""
    found = {}
    for way in ways:
        for case in cases:
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                job = training.worker_job(way, place, Path(folder), stack)
                with training.told(way, failures):
                    job.connect()
                    answers = training.ordered(job, way.name, f"weigh {case}", failures)
                    if answers:
                        found[case, way.name] = [answer["bytes"] for answer in answers]
                    training.ordered(job, way.name, "end", failures)
    return found


def rows(
    layout: Layout,
    found: Mapping[tuple[str, str], Samples],
    weights: Mapping[tuple[str, str], Sequence[int]],
) -> list[dict[str, Any]]:
    """Rows of results, times in microseconds."""
    by_name = {way.name: way for way in WAYS}
    made = []
    for (case, name), samples in found.items():
        spent = statistics.median(samples.step) - statistics.median(samples.plain)
        held = weights.get((case, name), [])
        made.append(
            {
                "layout": layout.name,
                "case": case,
                "candidate": name,
                "label": by_name[name].label,
                "kind": by_name[name].kind,
                "ranks": layout.ranks,
                "bytes": payload_bytes(case),
                "samples": len(samples.step),
                **report.statistics(samples.step),
                "spent_us": float(f"{1e6 * spent:.6g}"),
                "rank_bytes": max(held, default=None),
                "job_bytes": sum(held) or None,
            }
        )
    return made


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: a rival's time or memory over that of node_shared."""
    found = {}
    for case, layout in dict.fromkeys((row["case"], row["layout"]) for row in results):
        here = {r["candidate"]: r for r in results if (r["case"], r["layout"]) == (case, layout)}
        ours = here.pop("hsgd-node-shared", None)
        if ours is None:
            continue
        key = f"{case}/{layout}"
        compared = {f"vs_{name}": row["spent_us"] for name, row in here.items()}
        peers = [row["spent_us"] for row in here.values() if row["kind"] == "peer"]
        if peers:
            compared["vs_peer"] = min(peers)
        found.update({f"{vs}/{key}": value / ours["spent_us"] for vs, value in compared.items()})
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
            "step ms": lambda row: f"{row['median_us'] / 1e3:.2f}",
            "p99": lambda row: f"{row['p99_us'] / 1e3:.2f}",
            "comm + update": lambda row: f"{row['spent_us'] / 1e3:.2f}",
            "MB of a rank": lambda row: f"{(row['rank_bytes'] or 0) / 1e6:.0f}",
            "MB of all": lambda row: f"{(row['job_bytes'] or 0) / 1e6:.0f}",
        },
    )


def plot(doc: Mapping[str, Any], target: Path) -> None:
    """Bars of time and of memory, a column for each case and layout."""
    heights = {
        "communication and update, ms": lambda row: row["spent_us"] / 1e3,
        "memory of all ranks, MB": lambda row: (row["job_bytes"] or 0) / 1e6,
    }
    report.plot_bars(doc["results"], target, heights)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured, or something wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        layouts = [*map(on_one_node, options.np or ()), *map(read_layout, options.nodes or ())]
    except ValueError as error:
        parser.error(str(error))
    layouts = layouts or [on_one_node(2)]
    cases = options.cases or (["resnet50+sgd"] if options.quick else list(UPDATES))
    ways = [way for way in WAYS if not options.candidates or way.name in options.candidates]
    turns = options.turns or (2 if options.quick else 8)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are ended
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    try:
        for layout in layouts:
            with open_place(layout) as place:
                found = training.measure(place, ways, cases, turns, failures)
                results += rows(layout, found, weigh(place, ways, cases, failures))
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    settings = {"layouts": {n.name: str(n) for n in layouts}, "cases": UPDATES, "turns": turns}
    meta = {**report.facts("node_shared"), "settings": settings}
    doc = {"meta": meta, "ratios": ratios(results), "failures": failures, "results": results}
    print(tables(doc))
    if options.json:
        report.write_json(options.json, doc)
    if options.png and results:
        plot(doc, options.png)
    wrong = any("wrong result" in failure for failure in failures)
    return int(wrong or not results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure parameters that exist once per node: time of a step, and memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one case and few steps: under a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--png", type=Path, metavar="FILE", help="plot times and memory there")
    add("--np", nargs="+", type=int, metavar="N", help="ranks on one node (default 2)")
    add("--nodes", nargs="+", metavar="LAYOUT", help="virtual nodes, like 2x2@10gbit")
    add("--cases", nargs="+", choices=UPDATES, help="default: all, with --quick the first")
    names = [way.name for way in WAYS]
    add("--candidates", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--turns", type=int, help="turns of each candidate (default 8)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
