"""Elastic averaging: the box against copies and sums, pushes against the link, steps against
synchronous training and against what they are made of, a slow worker, and accuracy.

The ranks are elastic_worker.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from harness import report
from harness.layouts import JobLayout, on_one_node, read_layout
from harness.shapes import MODELS
from harness.stopping import keeping
from harness.worker_jobs import WorkerJobs

__all__ = ["main", "ratios"]

NOTES = """\
box: every worker reads and pushes at once; the limit is a copy, or a sum in place, of the same
bytes, by as many workers at once, in turns in one job.
push: the last rank's push into a box that another node owns, until the new values are back, as
float32; the limit is the link's rate for their bytes. "tcp" moves as many bytes each way at once,
without a box: what the link and the cores of this machine allow.
steps: a step computes for a time that is given, on a processor of its own, makes gradients of a
model's shapes, and communicates and updates as the candidate does. "exposed" is its median over
that of a step without communication. Candidates take turns in one job; Horovod, whose threads never
rest, has its own.
models: an iteration of two workers on two nodes that exchange in each step, and its parts, each
alone: computation (with the update), read, mix, push, accumulate. The limit is
T_iter = max(computation, push + accumulate) + read + mix.
slow: steps per second of the slowest other worker when one computes three times as long, on cores.
study: digits, a network of 64-64-10, SGD, batches of 16 per worker, learning rates that fall along
a cosine to a tenth, equal epochs, paired seeds, each method with the rate that did best on other
seeds and on images held out of the training; percent of test images right at the mean of all
models, and of the worst single one. Of workers that wait for nobody accuracy depends on how fast
they are beside one another: each step of async and hybrid lasts 0.7 ms for each worker there is,
as if all had processors of their own. "slowest" is the time of the slowest worker over that of the
fastest, "staleness" how many changes of others came between a read and the end of a push, in the
mean. "-pull" is with pull_rate 0.9.

Ratios, above 1 is ahead: vs_limit/CASE is limit / time, vs_tcp/CASE is that of plain TCP / time,
vs_peer/exposed/CASE what a step of Horovod exposes / what ours does, vs_two_level likewise;
vs_undisturbed/CASE is a rate / the undisturbed one; gain/CASE are points of accuracy over
synchronous training, paired over seeds, and error_of_gain/CASE half of their 95 % interval. The
JSON file is written anew after each job; one that takes longer than ten minutes is ended, and the
run goes on.

Virtual nodes need Linux and root; they share the cores of this machine.

examples:
  python benchmarks/elastic.py --quick
  python benchmarks/elastic.py --json elastic.json --png elastic.png
  python benchmarks/elastic.py --parts study --seeds 20 --workers 2 4 8
"""

WORKER = "elastic_worker"
PARTS = ("box", "push", "steps", "models", "slow", "study")
SLOW_PARTS = ("steps", "study")  # for --quick
BESIDE = ("compute", "two_level", "async", "hybrid")
PAPER = ("inception_v1", "resnet50", "inception_resnet_v2", "vgg16")
ITERATION = ("computation", "read", "mix", "push", "accumulate", "iteration")
LIMITS = {"read": "copy", "accumulate": "add"}
SPEEDS = {"slowest_to_fastest": "slowest", "staleness": "staleness"}  # and what they are called
RATES = {"1gbit": 1e9, "10gbit": 1e10}
STEPS_ON, INTERVAL = "2x2@1gbit", 4  # steps between exchanges
PACE_MS = 0.7  # of a step of the study, for each worker there is
JOB_LIMIT_S, QUICK_LIMIT_S = 600.0, 60.0  # a run goes on without a job that takes longer


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Comparisons of one run, from its rows."""
    found: dict[str, float] = {}
    streams = {
        row["layout"]: statistics.median(row["s"])
        for row in rows
        if (row["part"], row.get("candidate")) == ("push", "tcp")
    }
    for row in rows:
        if row["part"] == "push":
            ideal_s = 8 * row["bytes"] / RATES[row["layout"].partition("@")[2]]
            case = f"{row['candidate'].replace(' ', '_')}/{row['layout']}"
            found[f"vs_limit/{case}"] = ideal_s / statistics.median(row["s"])
            if row["candidate"] != "tcp" and row["layout"] in streams:
                found[f"vs_tcp/{case}"] = streams[row["layout"]] / statistics.median(row["s"])
        if row["part"] == "models":
            parts = row["of_an_iteration_s"]
            limit_s = max(parts["computation"], parts["push"] + parts["accumulate"])
            limit_s += parts["read"] + parts["mix"]
            case = f"t_iter/{row['model']}/{row['layout']}"
            found[f"vs_limit/{case}"] = limit_s / parts["iteration"]
        if row["part"] == "slow":
            case = f"slow_{row['candidate']}/{row['layout']}"
            disturbed, alone = (statistics.median(row[k]) for k in ("disturbed", "undisturbed"))
            found[f"vs_undisturbed/{case}"] = disturbed / alone
    boxes = {
        (r["workers"], r["candidate"]): statistics.median(r["s"])
        for r in rows
        if r["part"] == "box"
    }
    for workers, name in boxes:
        if name in LIMITS:
            limit = boxes[workers, LIMITS[name]]
            found[f"vs_limit/{name}/{workers}_workers"] = limit / boxes[workers, name]
    steps = [row for row in rows if row["part"] == "steps"]
    for (layout,), same in report.grouped(steps, "layout").items():
        here = {row["candidate"]: statistics.median(row["s"]) for row in same}
        if "compute" not in here:
            continue  # that job failed
        exposed = {name: max(1e-6, s - here["compute"]) for name, s in here.items()}
        for ours in ("async", "hybrid"):
            for key, theirs in (("vs_peer", "horovod"), ("vs_two_level", "two_level")):
                if ours in here and theirs in here:
                    found[f"{key}/exposed_{ours}/{layout}"] = exposed[theirs] / exposed[ours]
    found.update(_gains(rows))
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _gains(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Points over synchronous training, seed by seed: their mean, and half its 95 % interval."""
    found = {}
    studies = [row for row in rows if row["part"] == "study"]
    for (shards, workers), here in report.grouped(studies, "shards", "workers").items():
        sync = next(row for row in here if row["candidate"] == "sync")
        for row in (row for row in here if row is not sync):
            pairs = zip(row["mean_model"], sync["mean_model"], strict=True)
            gains = [ours - theirs for ours, theirs in pairs]
            case = f"{row['candidate']}/{shards.replace(' ', '_')}/{workers}_workers"
            found[f"gain/{case}"] = statistics.fmean(gains)
            found[f"error_of_gain/{case}"] = report.half_width(gains)
    return found


def _jobs(part: str, options: argparse.Namespace) -> Iterator[tuple[JobLayout, dict[str, Any]]]:
    """Where and with which plan the worker runs for a part."""
    names = ("rounds", "compute_s", "steps", "interval", "model")
    plan = {"part": part, **{name: getattr(options, name) for name in names}}
    plan["bytes"] = options.mbytes << 20
    if part == "box":
        yield on_one_node(options.most_workers), plan
    if part == "push":
        for rate in options.rates:
            yield read_layout(f"2x1@{rate}"), plan
    if part == "steps":
        layout = read_layout(STEPS_ON)
        yield layout, {**plan, "candidates": BESIDE}
        if not options.no_horovod:
            yield layout, {**plan, "candidates": ["horovod"]}
    if part == "models":
        plan |= {"rounds": 3, "steps": 2}  # VGG16's iterations take seconds
        for name in options.models:
            yield read_layout(f"2x1@{options.rates[0]}"), {**plan, "model": name}
    if part == "slow":
        yield on_one_node(2), plan
    if part == "study":
        plan = {
            "part": part,
            **{name: getattr(options, name) for name in ("seeds", "epochs", "lr")},
        }
        for workers in options.workers:
            for skew in (False, True):
                pace_ms = PACE_MS * workers
                yield on_one_node(workers), {**plan, "pace_ms": pace_ms, "skew": skew}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 when a job failed."""
    options = report.parse(_parser(), argv)
    quick = options.quick
    parts = options.parts or [part for part in PARTS if not (quick and part in SLOW_PARTS)]
    options.rounds = options.rounds or (3 if quick else 7)
    options.mbytes = options.mbytes or (16 if quick else 97)
    options.most_workers = 2 if quick else 4
    options.rates = options.rates or (["1gbit"] if quick else list(RATES))
    options.model = options.model or ("small" if quick else "resnet50")
    options.models = options.models or (["small"] if quick else PAPER)
    options.compute_s, options.interval = 0.01 if quick else 0.5, INTERVAL
    options.steps = options.steps or (12 if quick else options.interval)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = WorkerJobs(WORKER, Path(folder), QUICK_LIMIT_S if quick else JOB_LIMIT_S)

        def written(stopped: int) -> dict[str, Any]:
            found = (ratios(rows), rows, jobs.failures, stopped)
            return report.document("elastic", vars(options), *found)

        planned = [job for part in parts for job in _jobs(part, options)]
        with keeping() as stopped, tqdm(total=len(planned), unit="job", disable=None) as progress:
            for layout, plan in planned:
                progress.set_description(f"{layout.name} {plan['part']}")
                for row in jobs.run(layout, plan) or []:
                    rows.append({"layout": layout.name, "ranks": layout.ranks, **row})
                progress.update()
                if options.json:
                    report.write_json(options.json, written(0))
    document = written(stopped.code)
    report.publish(options, document, _text(document), plot)
    return stopped.code or int(bool(jobs.failures or not rows))


def _text(document: Mapping[str, Any]) -> str:
    """Tables of the parts, and all ratios."""
    results = document["results"]
    by_part = {part: rows for (part,), rows in report.grouped(results, "part").items()}
    timed: dict[str, Any] = {
        "layout": "layout",
        "at once": lambda row: row.get("workers", row["ranks"]),
        "": "candidate",
        "MB": lambda row: f"{row['bytes'] / 1e6:.0f}",
        "median ms": lambda row: f"{1e3 * statistics.median(row['s']):.2f}",
        "GB/s": lambda row: f"{row['bytes'] / 1e9 / statistics.median(row['s']):.2f}",
    }
    models: dict[str, Any] = {
        "layout": "layout",
        "ms of an iteration": "model",
        "MB": lambda row: f"{row['bytes'] / 1e6:.0f}",
    }
    for part in ITERATION:
        models[part] = lambda row, part=part: f"{1e3 * row['of_an_iteration_s'][part]:.1f}"
    studies: dict[str, Any] = {
        "shards": "shards",
        "workers": "workers",
        "": "candidate",
        "lr": lambda row: f"{row['lr']:g}",
        "mean model %": lambda row: f"{statistics.fmean(row['mean_model']):.2f}",
        "worst model %": lambda row: f"{statistics.fmean(row['worst_model']):.2f}",
    }
    for key, title in SPEEDS.items():
        studies[title] = lambda row, key=key: f"{row[key]:.2f}" if key in row else ""
    parts = []
    for rows, columns in (
        ([row for row in results if "s" in row], timed),
        (by_part.get("models"), models),
        (by_part.get("study"), studies),
    ):
        parts += [report.rows_table(rows, columns)] if rows else []
    return "\n".join([*parts, *(f"{name}: {v:g}" for name, v in document["ratios"].items())])


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Bars of all ratios against 1, and of gains in accuracy against 0."""
    found = document["ratios"]
    gains = {name: value for name, value in found.items() if name.startswith("gain/")}
    others = {name: value for name, value in found.items() if "gain/" not in name}
    panels = [(1.0, "ratio, above 1 is ahead", others), (0.0, "points over synchronous", gains)]
    panels = [panel for panel in panels if panel[2]]
    size = (7 * len(panels), 6)
    with report.figure(target, 1, len(panels), size=size) as axes:
        for axis, (base, label, values) in zip(axes[0], panels, strict=True):
            errors = [found.get(f"error_of_{name}", 0.0) for name in values]
            widths = [value - base for value in values.values()]
            axis.barh(list(values), widths, left=base, xerr=errors if any(errors) else None)
            axis.axvline(base, color="black", linewidth=0.8)
            axis.set_xlabel(label)
            axis.invert_yaxis()
            axis.tick_params(axis="y", labelsize=8)


def _parser() -> argparse.ArgumentParser:
    parser = report.argument_parser(
        *("Measure the parameter box and elastic averaging.", NOTES),
        quick="a smaller run, under a minute on an idle machine",
        png="plot the ratios there",
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, help="default: all, with --quick not all")
    add("--rounds", type=int, help="turns of each candidate (default 7)")
    add("--mbytes", type=int, metavar="MB", help="of the box, MiB (default 97: ResNet-50's)")
    add("--rates", nargs="+", choices=RATES, help="links of pushes, and the first of models (both)")
    add("--model", choices=MODELS, help="shapes of steps (default resnet50)")
    add("--models", nargs="+", choices=MODELS, help="of the part models (default the paper's four)")
    add("--steps", type=int, help="steps of a turn (default: the interval)")
    add("--workers", nargs="+", type=int, default=[2, 4, 8], help="of the study (default 2 4 8)")
    add("--seeds", type=int, default=20, help="of the study (default 20)")
    add("--epochs", type=int, default=20, help="of the study (default 20)")
    add("--lr", type=float, help="of the study, for all methods (default: the best for each)")
    add("--no-horovod", action="store_true", help="leave out Horovod")
    return parser


if __name__ == "__main__":
    sys.exit(main())
