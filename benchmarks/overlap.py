"""Overlap of communication with computation: NotifiedTree against Horovod, DDP and two-level.

Owns layouts, jobs and ratios. Never times anything: overlap_worker.py does, in the ranks.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from layouts import Layout, on_one_node, read_layout
from worker_jobs import WorkerJobs

__all__ = ["main", "ratios"]

NOTES = """\
Each rank trains a model whose batch is chosen so that a step computes about as long as one
two-level allreduce of all its gradients takes ("communication"). A time is that of one step, the
mean over a turn of steps that begins with a barrier and ends when the last rank has the weights of
the last step. Candidates take turns, round after round, in one job; Horovod, whose threads never
rest, has a job of its own right after, with the same batch. Then all weights are compared.

Ratios, above 1 is ahead: vs_horovod/tree/LAYOUT/MODEL is a step of Horovod / one of NotifiedTree;
vs_ddp and vs_two_level likewise, vs_peer is the least of Horovod and DDP; vs_limit is
max(computation, communication) / step, vs_compute computation / step. tree_overlap is the tree with
the next forward pass overlapped, tree_sockets the same over sockets in place of MPI.
vs_peer/put_notify/SIZE is the same put over MPI / in shared memory, half a round trip, on one node.

Virtual nodes need Linux and root; they share the cores of this machine.

examples:
  python benchmarks/overlap.py --quick
  python benchmarks/overlap.py --json overlap.json --png overlap.png
"""

WORKER = Path(__file__).resolve().with_name("overlap_worker.py")
PUT_WORKER = WORKER.with_name("put_worker.py")
TREES = ("tree", "tree_overlap", "tree_sockets")
BESIDE = ("compute", "ddp", "two_level", *TREES)
LAYOUTS = ("2x1@1gbit", "2x2@1gbit", "4x1@1gbit")
ONE_NODE = (2, 4)
WIDTHS = {"mlp": 384, "cnn": 128}
JOB_LIMIT_S = 300.0
CLOSE = 1e-4  # of weights after some steps with other orders of sums


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Comparisons of one run, from its rows."""
    found: dict[str, float] = {}
    steps: dict[tuple[str, str], dict[str, float]] = {}
    puts: dict[int, dict[str, float]] = {}
    for row in rows:
        if "put_notify" in row:
            puts.setdefault(row["bytes"], {})[row["put_notify"]] = row["median_us"]
        else:
            case = steps.setdefault((row["layout"], row["model"]), {})
            case[row["candidate"]] = row["median_us"]
    for (layout, model), times in steps.items():
        where = f"{layout}/{model}"
        for name in TREES:
            if name not in times:
                continue
            if "communication" in times:
                bound = max(times["compute"], times["communication"])
                found[f"vs_limit/{name}/{where}"] = bound / times[name]
            found[f"vs_compute/{name}/{where}"] = times["compute"] / times[name]
            for peer in ("horovod", "ddp", "two_level"):
                if peer in times:
                    found[f"vs_{peer}/{name}/{where}"] = times[peer] / times[name]
            peers = [times[peer] for peer in ("horovod", "ddp") if peer in times]
            if peers:
                found[f"vs_peer/{name}/{where}"] = min(peers) / times[name]
    for size, kinds in puts.items():
        label = report.size_label(size)
        found[f"vs_peer/put_notify/{label}"] = kinds["mpi"] / kinds["shared memory"]
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _measure(jobs: WorkerJobs, layout: Layout, model: str, options: Any) -> list[dict[str, Any]]:
    width = options.width or WIDTHS[model]
    words = ["--model", model, "--width", str(width), "--rounds", str(options.rounds)]
    words += ["--steps", str(options.steps)]
    told = jobs.run(layout, [*words, "--candidates", *BESIDE])
    if told is None:
        return []
    times = {**told["seconds"], "communication": [told["communication_s"]]}
    apart = told["apart"]
    if not options.no_horovod:
        alone = jobs.run(layout, [*words, "--batch", str(told["batch"]), "--candidates", "horovod"])
        times |= alone["seconds"] if alone else {}
    wrong = {name: value for name, value in apart.items() if not value < CLOSE}
    jobs.failures += [f"{layout.name} {model}: {n} is off by {v:g}" for n, v in wrong.items()]
    case = {"layout": layout.name, "ranks": layout.ranks, "model": model, "batch": told["batch"]}
    rows = [
        {**case, "candidate": name, "bytes": told["bytes"], **report.statistics(values)}
        for name, values in times.items()
    ]
    rows[-1]["timeline"] = told["timeline"]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 where a candidate came to other weights, or a job failed."""
    parser = argparse.ArgumentParser(
        description="Measure how much of communication hides behind computation.",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one layout, one small model: under a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--png", type=Path, metavar="FILE", help="plot the timeline of rank 0 there")
    add("--layouts", nargs="*", metavar="2x1@1gbit", help="virtual nodes, or np2 for one node")
    add("--models", nargs="+", choices=WIDTHS, help="default: all, with --quick mlp")
    add("--width", type=int, help="of the model's layers")
    add("--rounds", type=int, help="turns of each candidate (default 7)")
    add("--steps", type=int, default=6, help="steps of a turn (default 6)")
    add("--no-horovod", action="store_true", help="leave out Horovod")
    add("--no-install", action="store_true", help="does nothing: all peers are in the environment")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.rounds = options.rounds or (3 if options.quick else 7)
    if options.quick and options.width is None:
        options.width = 256
    names = options.layouts
    if names is None:
        names = ["2x1@1gbit"] if options.quick else [*LAYOUTS, *(f"np{n}" for n in ONE_NODE)]
    try:
        layouts = [on_one_node(int(n[2:])) if n.startswith("np") else read_layout(n) for n in names]
    except ValueError as error:
        parser.error(str(error))
    models = options.models or (["mlp"] if options.quick else list(WIDTHS))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = WorkerJobs(WORKER, Path(folder), JOB_LIMIT_S)
        for layout in layouts:
            for model in models:
                rows += _measure(jobs, layout, model, options)
        for row in jobs.run(on_one_node(2), [], PUT_WORKER) or []:
            seconds = row.pop("seconds")
            rows.append({"layout": "np2", **row, **report.statistics(seconds)})
    lines = [row.pop("timeline") for row in rows if "timeline" in row]
    document = {
        "meta": {**report.facts("overlap"), "settings": {"steps": options.steps}},
        "ratios": ratios(rows),
        "failures": jobs.failures,
        "timeline": lines[0] if lines else [],
        "results": rows,
    }
    _show(document)
    if options.json:
        report.write_json(options.json, document)
    if options.png and lines:
        plot(document, options.png)
    return 1 if jobs.failures else 0


def _show(document: dict[str, Any]) -> None:
    rows = [row for row in document["results"] if "candidate" in row]
    names = ["compute", "communication", "horovod", "ddp", "two_level", *TREES]
    lines = []
    for case in dict.fromkeys((row["layout"], row["model"]) for row in rows):
        here = {
            r["candidate"]: r["median_us"] / 1e3 for r in rows if case == (r["layout"], r["model"])
        }
        bound = document["ratios"].get(f"vs_limit/tree_sockets/{case[0]}/{case[1]}", float("nan"))
        cells = [f"{here[name]:.1f}" if name in here else "-" for name in names]
        lines.append([*case, *cells, f"{bound:.2f}"])
    if lines:
        print("one step, median milliseconds")
        print(report.table(["layout", "model", *names, "of bound"], lines))
    puts = [row for row in document["results"] if "put_notify" in row]
    if puts:
        print("put_notify on one node, half a round trip, median microseconds")
        cells = [
            [report.size_label(r["bytes"]), r["put_notify"], f"{r['median_us']:.1f}"] for r in puts
        ]
        print(report.table(["bytes", "over", "time"], cells))
    for line in document["failures"]:
        print(line, file=sys.stderr)


def plot(document: dict[str, Any], target: Path) -> None:
    """Draw what rank 0's threads did during three steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = {"forward": 0, "backward": 0, "waits": 1, "sends": 2}
    colours = {"forward": "#4292c6", "backward": "#08519c", "waits": "#cb181d", "sends": "#238b45"}
    figure, axes = pyplot.subplots(figsize=(9, 2.8), layout="constrained")
    for lane, _, begin, end in document["timeline"]:
        width = max(1e3 * (end - begin), 0.05)
        axes.broken_barh([(1e3 * begin, width)], (lanes[lane], 0.8), color=colours[lane])
    axes.set_yticks([0.4, 1.4, 2.4], ["computes", "waits", "root sends"])
    axes.set_xlabel("ms")
    row = next(row for row in document["results"] if "candidate" in row)
    title = f"NotifiedTree, rank 0, {row['model']} on {row['layout']}: forward, backward, and sends"
    axes.set_title(title, fontsize=10, loc="left")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
