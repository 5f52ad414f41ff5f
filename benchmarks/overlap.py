"""Overlap of communication with computation: NotifiedTree against Horovod, DDP and two-level.

Owns layouts, jobs and ratios. Never times anything: overlap_worker.py does, in the ranks.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.layouts import JobLayout, on_one_node, read_layout
from harness.rank_command import BENCHMARKS
from harness.worker_jobs import WorkerJobs

__all__ = ["main", "ratios"]

NOTES = """\
Each rank trains a model whose batch is chosen so that a step computes about as long as one
two-level allreduce of all its gradients takes ("communication"); on one node, as --step-s says. A
time is that of one step, the mean over a turn of steps that begins with a barrier and ends when the
last rank has the weights of the last step. Candidates take turns, round after round, in one job;
Horovod, whose threads never rest, has a job of its own right after, with the same batch. Then all
weights are compared. A last job counts the collectives of five steps, with a library that sees all
calls into MPI.

"offloaded" is the same network as "mlp", with the time of each layer slept: computation that needs
no core of this machine, as on an accelerator, so that cores are not what ranks compete for.

"tree" is NotifiedTree over sockets, "tree_overlap" the same with the next forward pass overlapped,
"tree_mpi" that over MPI, "tree_shared" that over sockets with the roots of layers shared among the
nodes, "tree_parts" that over sockets with layers in parts of 256 KB.

Ratios, above 1 is ahead: vs_horovod/tree/LAYOUT/MODEL is a step of Horovod / one of NotifiedTree;
vs_ddp and vs_two_level likewise, vs_peer is the least of Horovod and DDP; vs_limit is
max(computation, communication) / step, vs_compute computation / step. scaling/... on one node is
samples per second / those of one rank that only computes. vs_peer/put_notify/SIZE is the same put
over MPI / in shared memory, half a round trip, on one node.

Of a step: "processor_us" is the mean processor time of a rank, with all of its threads and what the
kernel does in their name; "switches" is how often one of them gave up its core; "idle_us" is how
long cores of this machine had nothing to do, added up over them. Where that is little, more overlap
cannot help.

With --own-cores the cores are shared out among the virtual nodes, as machines have theirs; without,
ranks and their threads run where the kernel puts them.

What was measured is written after each case, so that an interrupted run keeps it. Virtual nodes
need Linux and root; they share the cores of this machine.

examples:
  python benchmarks/overlap.py --quick
  python benchmarks/overlap.py --json overlap.json --png overlap.png
"""

WORKER, PUT_WORKER = "overlap_worker", "put_worker"
COUNTER = BENCHMARKS.parent / "tests" / "mpi_programs" / "count_collectives.c"
TREES = ("tree", "tree_overlap", "tree_mpi", "tree_shared", "tree_parts")
BETWEEN_NODES = ("compute", "ddp", "two_level", *TREES)
ON_ONE_NODE = ("compute", "ddp", "two_level", "tree", "tree_overlap")
QUICK = ("compute", "ddp", "two_level", *TREES)
LAYOUTS = ("2x1@1gbit", "2x2@1gbit", "4x1@1gbit", "np1", "np2", "np4")
WIDTHS = {"mlp": 384, "cnn": 128, "offloaded": 384}
JOB_LIMIT_S = 300.0
CLOSE = 1e-4  # of weights after some steps with other orders of sums


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Comparisons of one run, from its rows."""
    found: dict[str, float] = {}
    steps: dict[tuple[str, str], dict[str, float]] = {}
    puts: dict[int, dict[str, float]] = {}
    for row in rows:
        if "collectives" in row:
            continue
        if "put_notify" in row:
            puts.setdefault(row["bytes"], {})[row["put_notify"]] = row["median_us"]
        else:
            case = steps.setdefault((row["layout"], row["model"]), {})
            case[row["candidate"]] = row["median_us"]
            case["batch"] = row["batch"] * row["ranks"]
    for (layout, model), times in steps.items():
        alone = steps.get(("np1", model))
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
            if alone and layout.startswith("np"):
                speed = times["batch"] / times[name]
                found[f"scaling/{name}/{where}"] = speed * alone["compute"] / alone["batch"]
            peers = [times[peer] for peer in ("horovod", "ddp") if peer in times]
            if peers:
                found[f"vs_peer/{name}/{where}"] = min(peers) / times[name]
    for size, kinds in puts.items():
        label = report.size_label(size)
        found[f"vs_peer/put_notify/{label}"] = kinds["mpi"] / kinds["shared memory"]
    return {name: float(f"{value:.4g}") for name, value in found.items()}


class Run:
    """The cases of one call of the program; what is measured goes to the file at once."""

    def __init__(self, jobs: WorkerJobs, options: Any) -> None:
        self.jobs, self._options = jobs, options
        self.rows: list[dict[str, Any]] = []
        self.timeline: list[Any] = []
        self._batches: dict[str, int] = {}  # on one node: the same for all numbers of ranks
        self._facts = report.facts("overlap")
        self._facts["settings"] = {
            name: value for name, value in vars(options).items() if name not in ("json", "png")
        }

    def steps(self, layout: JobLayout, model: str, candidates: Sequence[str]) -> None:
        """All candidates on one layout."""
        options, jobs = self._options, self.jobs
        words = self._words(model)
        timed = [*words, "--rounds", str(options.rounds), "--steps", str(options.steps)]
        timed += ["--own-cores"] if options.own_cores else []
        batch = []
        if layout.nodes == 1:
            known = self._batches.get(model)
            batch = ["--batch", str(known)] if known else ["--step-s", str(options.step_s)]
        result = jobs.run(layout, [*timed, *batch, "--candidates", *candidates])
        if result is None:
            return self.write()
        if layout.nodes == 1:
            self._batches[model] = result["batch"]
        times = {**result["seconds"], "communication": [result["communication_s"]]}
        spent = result["spent"]
        if not options.no_horovod:
            words = [*timed, "--batch", str(result["batch"]), "--candidates", "horovod"]
            alone = jobs.run(layout, words)
            times |= alone["seconds"] if alone else {}
            spent |= alone["spent"] if alone else {}
        wrong = {name: value for name, value in result["apart"].items() if not value < CLOSE}
        jobs.failures += [f"{layout.name} {model}: {n} is off by {v:g}" for n, v in wrong.items()]
        case = {"layout": layout.name, "ranks": layout.ranks, "model": model}
        self.rows += [
            {
                **case,
                "candidate": name,
                "batch": result["batch"],
                "bytes": result["bytes"],
                **report.statistics(values),
                **_cost(spent.get(name)),
            }
            for name, values in times.items()
        ]
        self.timeline = self.timeline or result["timeline"]
        self.write()

    def puts(self) -> None:
        """put_notify on one node."""
        for row in self.jobs.run(on_one_node(2), [], PUT_WORKER) or []:
            seconds = row.pop("seconds")
            self.rows.append({"layout": "np2", **row, **report.statistics(seconds)})
        self.write()

    def collectives(self, layout: JobLayout, model: str, library: Path) -> None:
        """How many there are in steps of the trees; more than none is a failure."""
        names = ("tree_overlap", "tree_mpi")
        words = [*self._words(model), "--batch", "2", "--count", str(library)]
        preload = {"LD_PRELOAD": str(library)}
        counts = self.jobs.run(layout, [*words, "--candidates", *names], environment=preload)
        for name, (of_mpi, own) in (counts or {}).items():
            row = {"layout": layout.name, "model": model, "candidate": name}
            self.rows.append({**row, "collectives": {"mpi": of_mpi, "hsgd": own}})
            if of_mpi or own:
                self.jobs.failures.append(
                    f"{layout.name} {model}: {name} made {of_mpi} collectives of MPI, {own} of hsgd"
                )
        self.write()

    def _words(self, model: str) -> list[str]:
        return ["--model", model, "--width", str(self._options.width or WIDTHS[model])]

    def document(self) -> dict[str, Any]:
        return {
            "meta": self._facts,
            "ratios": ratios(self.rows),
            "failures": self.jobs.failures,
            "timeline": self.timeline,
            "results": self.rows,
        }

    def write(self) -> None:
        if self._options.json:
            report.write_json(self._options.json, self.document())


def _build_counter(folder: Path) -> Path:
    """The library that counts MPI's collectives. Raises CalledProcessError, OSError."""
    library = folder / "libcollectives.so"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(COUNTER), "-ldl"]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return library


def _cost(spent: Sequence[float] | None) -> dict[str, float]:
    """Of a step; see NOTES."""
    names = ("processor_us", "switches", "idle_us")
    units = (1e6, 1, 1e6)
    return {n: unit * s for n, unit, s in zip(names, units, spent or (), strict=False)}


def _layout(name: str) -> JobLayout:
    if name == "np1":
        return JobLayout(name, (1,))
    return on_one_node(int(name[2:])) if name.startswith("np") else read_layout(name)


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
    add("--layouts", nargs="*", metavar="2x1@1gbit", help="virtual nodes, or np1 for one node")
    add("--models", nargs="+", choices=WIDTHS, help="default: all, with --quick mlp")
    add("--width", type=int, help="of the model's layers")
    add("--rounds", type=int, help="turns of each candidate (default 7)")
    add("--steps", type=int, default=6, help="steps of a turn (default 6)")
    add("--step-s", type=float, default=0.04, help="computation of a step on one node (0.04)")
    add("--limit-s", type=float, default=1500.0, help="begin no case after that (default 1500)")
    add(
        "--own-cores", action="store_true", help="virtual nodes do not share cores, if they suffice"
    )
    add("--no-horovod", action="store_true", help="leave out Horovod")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.rounds = options.rounds or (3 if options.quick else 7)
    if options.quick and options.width is None:
        options.width = 256
    names = options.layouts
    if names is None:
        names = ["2x1@1gbit"] if options.quick else list(LAYOUTS)
    try:
        layouts = [_layout(name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    options.models = options.models or (["mlp"] if options.quick else list(WIDTHS))
    end = time.monotonic() + options.limit_s
    with tempfile.TemporaryDirectory() as folder:
        run = Run(WorkerJobs(WORKER, Path(folder), JOB_LIMIT_S), options)
        try:
            run.puts()
            _count(run, [layout for layout in layouts if layout.nodes > 1], Path(folder))
            for layout in layouts:
                for model in options.models:
                    if time.monotonic() > end:
                        run.jobs.failures.append(f"{layout.name} {model}: no time left for it")
                        continue
                    between = QUICK if options.quick else BETWEEN_NODES
                    run.steps(layout, model, between if layout.nodes > 1 else ON_ONE_NODE)
        finally:
            document = run.document()
            run.write()
            _show(document)
            if options.png and document["timeline"]:
                plot(document, options.png)
    return 1 if document["failures"] else 0


def _count(run: Run, layouts: Sequence[JobLayout], folder: Path) -> None:
    if not layouts:
        return
    try:
        library = _build_counter(folder)
    except (OSError, subprocess.SubprocessError) as error:
        run.jobs.failures.append(f"collectives are not counted: {error}")
        return
    run.collectives(layouts[0], "mlp", library)


def _show(document: dict[str, Any]) -> None:
    rows = [row for row in document["results"] if "candidate" in row and "median_us" in row]
    names = ["compute", "communication", "horovod", "ddp", "two_level", *TREES]
    lines = []
    for case in dict.fromkeys((row["layout"], row["model"]) for row in rows):
        here = {
            r["candidate"]: r["median_us"] / 1e3 for r in rows if case == (r["layout"], r["model"])
        }
        bound = document["ratios"].get(f"vs_limit/tree_overlap/{case[0]}/{case[1]}", float("nan"))
        cells = [f"{here[name]:.1f}" if name in here else "-" for name in names]
        lines.append([*case, *cells, f"{bound:.2f}"])
        costs = {
            r["candidate"]: (r["processor_us"] / 1e3, r["switches"], r["idle_us"] / 1e3)
            for r in rows
            if case == (r["layout"], r["model"]) and "switches" in r
        }
        for of, kind in enumerate(("ms of a core", "switches", "ms idle")):
            cells = [f"{costs[name][of]:.1f}" if name in costs else "-" for name in names]
            lines.append([case[0], kind, *cells, ""])
    if lines:
        print(
            "one step, median milliseconds; of bound: max(compute, communication) / tree_overlap;"
        )
        print(
            "below: processor time of a rank, how often its threads gave up a core, and idle time"
        )
        print(report.table(["layout", "model", *names, "of bound"], lines))
    puts = [row for row in document["results"] if "put_notify" in row]
    if puts:
        print("put_notify on one node, half a round trip, median microseconds")
        cells = [
            [report.size_label(r["bytes"]), r["put_notify"], f"{r['median_us']:.1f}"] for r in puts
        ]
        print(report.table(["bytes", "over", "time"], cells))
    for row in document["results"]:
        if "collectives" in row:
            counts = ", ".join(f"{count} of {whose}" for whose, count in row["collectives"].items())
            print(f"collectives in five steps of {row['candidate']}, {row['layout']}: {counts}")
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
    row = next(row for row in document["results"] if "median_us" in row and "model" in row)
    title = f"NotifiedTree, rank 0, {row['model']} on {row['layout']}: forward, backward, and sends"
    axes.set_title(title, fontsize=10, loc="left")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
