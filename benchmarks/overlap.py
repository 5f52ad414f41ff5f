"""Overlap of communication with computation: NotifiedTree against Horovod, DDP and two-level.

The ranks are overlap_worker.py and put_worker.py.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.layouts import JobLayout, on_one_node, read_layout
from harness.stopping import keeping
from harness.worker_jobs import WorkerJobs

__all__ = ["main", "ratios"]

NOTES = """\
Each rank trains a model whose batch is chosen so that a step computes about as long as one
two-level allreduce of all its gradients takes ("communication"). A time is that of one step, the
mean over a turn of steps that begins with a barrier and ends when the last rank has the weights of
the last step. Candidates take turns, round after round, in one job; Horovod, whose threads never
rest, has a job of its own right after, with the same batch. Then all weights are compared.

"offloaded" is the same network as "mlp", with the time of each layer slept: computation that needs
no core of this machine, as on an accelerator, so that cores are not what ranks compete for.

"tree" is NotifiedTree over sockets, "tree_overlap" the same with the next forward pass overlapped,
"tree_mpi" that over MPI, "tree_shared" that over sockets with the roots of layers shared among the
nodes.

Ratios, above 1 is ahead: vs_horovod/tree/LAYOUT/MODEL is a step of Horovod / one of NotifiedTree;
vs_ddp and vs_two_level likewise, vs_peer is the least of Horovod and DDP; vs_limit is
max(computation, communication) / step, vs_compute computation / step. vs_peer/put_notify/SIZE is
the same put over MPI / in shared memory, half a round trip, on one node.

What was measured is written after each case, so that an interrupted run keeps it. Virtual nodes
need Linux and root; they share the cores of this machine.

examples:
  python benchmarks/overlap.py --quick
  python benchmarks/overlap.py --json overlap.json --png overlap.png
"""

WORKER, PUT_WORKER = "overlap_worker", "put_worker"
TREES = ("tree", "tree_overlap", "tree_mpi", "tree_shared")
CANDIDATES = ("compute", "ddp", "two_level", *TREES)
LAYOUTS = ("2x1@1gbit", "2x2@1gbit", "4x1@1gbit")
WIDTHS = {"mlp": 384, "cnn": 128, "offloaded": 384}
JOB_LIMIT_S = 300.0
CLOSE = 1e-4  # of weights after some steps with other orders of sums


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Comparisons of one run, from its rows."""
    found: dict[str, float] = {}
    steps = [row for row in rows if "put_notify" not in row]
    for (layout, model), here in report.grouped(steps, "layout", "model").items():
        times = {row["candidate"]: row["median_us"] for row in here}
        for name in (name for name in TREES if name in times):
            apart = {"compute", "two_level"}
            others = {o: times[o] for o in ("horovod", "ddp", "two_level", "compute") if o in times}
            limit = None
            if "communication" in times:
                limit = max(times["compute"], times["communication"])
            compared = report.versus(times[name], others, limit, apart)
            found |= {f"{vs}/{name}/{layout}/{model}": share for vs, share in compared.items()}
    puts = [row for row in rows if "put_notify" in row]
    for (size,), kinds in report.grouped(puts, "bytes").items():
        times = {row["put_notify"]: row["median_us"] for row in kinds}
        share = float(f"{times['mpi'] / times['shared memory']:.4g}")
        found[f"vs_peer/put_notify/{report.size_label(size)}"] = share
    return found


def steps(
    jobs: WorkerJobs, options: Any, layout: JobLayout, model: str
) -> Iterator[dict[str, Any]]:
    """Rows of all candidates on one layout."""
    plan = {"model": model, "width": options.width or WIDTHS[model]}
    plan |= {"rounds": options.rounds, "steps": options.steps}
    result = jobs.run(layout, {**plan, "batch": 0, "candidates": CANDIDATES})
    if result is None:
        return
    times = {**result["seconds"], "communication": [result["communication_s"]]}
    if not options.no_horovod:
        plan |= {"batch": result["batch"], "candidates": ["horovod"]}
        alone = jobs.run(layout, plan)
        times |= alone["seconds"] if alone else {}
    wrong = {name: value for name, value in result["apart"].items() if not value < CLOSE}
    jobs.failures += [f"{layout.name} {model}: {n} is off by {v:g}" for n, v in wrong.items()]
    case = {"layout": layout.name, "ranks": layout.ranks, "model": model}
    case |= {"batch": result["batch"], "bytes": result["bytes"]}
    kinds = {"compute": "limit", "communication": "limit", "horovod": "peer", "ddp": "peer"}
    for name, values in times.items():
        row = {**case, "candidate": name, "kind": kinds.get(name, "hsgd")}
        yield {**row, **report.statistics(values)}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 where a candidate came to other weights, or a job failed."""
    parser = report.argument_parser(
        *("Measure how much of communication hides behind computation.", NOTES),
        quick="one layout, one small model: under a minute",
        png="plot the steps there",
    )
    add = parser.add_argument
    add("--layouts", nargs="*", default=LAYOUTS, metavar="2x1@1gbit", help="virtual nodes")
    add("--models", nargs="+", choices=WIDTHS, help="default: all, with --quick mlp")
    add("--width", type=int, help="of the model's layers")
    add("--rounds", type=int, help="turns of each candidate (default 7)")
    add("--steps", type=int, default=6, help="steps of a turn (default 6)")
    add("--limit-s", type=float, default=1500.0, help="begin no case after that (default 1500)")
    add("--no-horovod", action="store_true", help="leave out Horovod")
    options = report.parse(parser, argv, layouts=read_layout)
    options.rounds = options.rounds or (3 if options.quick else 7)
    if options.quick and options.width is None:
        options.width = 256
    if options.quick:
        options.layouts = options.layouts[:1]
    options.models = options.models or (["mlp"] if options.quick else list(WIDTHS))
    end = time.monotonic() + options.limit_s
    rows: list[dict[str, Any]] = []
    settings = {**vars(options), "layouts": [layout.name for layout in options.layouts]}
    with tempfile.TemporaryDirectory() as folder:
        jobs = WorkerJobs(WORKER, Path(folder), JOB_LIMIT_S)

        def written(stopped: int) -> dict[str, Any]:
            return report.document("overlap", settings, ratios(rows), rows, jobs.failures, stopped)

        with keeping() as stopped:
            for row in jobs.run(on_one_node(2), {}, PUT_WORKER) or []:
                seconds = report.statistics(row.pop("seconds"))
                rows.append({"layout": "np2", **row, **seconds})
            for layout, model in itertools.product(options.layouts, options.models):
                if time.monotonic() > end:
                    jobs.failures.append(f"{layout.name} {model}: no time left for it")
                    continue
                rows += steps(jobs, options, layout, model)
                if options.json:
                    report.write_json(options.json, written(0))
    document = written(stopped.code)
    report.publish(options, document, tables(document), plot)
    return stopped.code or int(bool(document["failures"]))


def tables(document: Mapping[str, Any]) -> str:
    """Steps, and puts, as text."""
    rows = [row for row in document["results"] if "put_notify" not in row]
    puts = [row for row in document["results"] if "put_notify" in row]
    case = {"layout": "layout", "model": "model"}
    columns: dict[str, Any] = {
        "bytes": lambda row: report.size_label(row["bytes"]),
        "over": "put_notify",
        "time": lambda row: f"{row['median_us']:.1f}",
    }

    def bound(row: Mapping[str, Any]) -> float | None:
        return document["ratios"].get(f"vs_limit/tree_overlap/{row['layout']}/{row['model']}")

    parts = []
    if rows:
        cell = lambda row: f"{row['median_us'] / 1e3:.1f}"  # noqa: E731
        parts += [
            "one step, median milliseconds; of bound: max(compute, communication) / tree_overlap",
            report.pivot(rows, case, "candidate", cell, {"of bound": bound}),
        ]
    if puts:
        parts.append("put_notify on one node, half a round trip, median microseconds")
        parts.append(report.rows_table(puts, columns))
    return "\n".join(parts)


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Bars of steps, a column for each layout and model."""
    rows = [row for row in document["results"] if "put_notify" not in row]
    if rows:
        heights = {"ms per step": lambda row: row["median_us"] / 1e3}
        report.plot_bars(rows, target, heights, by=("layout", "model"))


if __name__ == "__main__":
    sys.exit(main())
