"""Training that rarely communicates: a character-level language model, or digits with skewed
labels; loss against bytes, and against seconds on slow links.

The ranks are rarely_worker.py.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from harness import report
from harness.layouts import rank_command, read_layout
from harness.stopping import keeping
from harness.worker_jobs import WorkerJobs
from tasks.training_task import TASKS
from workers.rarely_ways import BASE, WAYS, missing, torchft_version

__all__ = ["main", "ratios"]

NOTES = """\
Ranks of virtual nodes train with AdamW, each on batches of its own; what is held out gives the loss
of the model that a way would save. Each job is a seed, and trains one way after the other on the
same samples.

--task text: a transformer of 1.07 million parameters on the sources of Python's standard library;
the loss is in nats per character. Before, one process trains the model of each seed for --pretrain
steps of batch 8; all ways go on from its weights and AdamW's state. --rate and --outer are those
chosen for a batch of 1. --task vision: a perceptron of 120,010 parameters on scikit-learn's digits,
from random weights. Each rank has two pieces of the images in the order of their labels.

--rate and --outer were chosen with seed 99, which five seeds from 0 leave out; NoLoCo's outer
steps are the default.

torchft is measured where it is installed. Bytes are what the nodes' interfaces have sent, as the
kernel counts them, headers included. "waited" is what step() waited for exchanges, of DiLoCo. Nodes
share the cores of this machine, so computation takes longer than on nodes of their own, and
communication that hides behind it hides more easily.

With --longer 1.5 other ways than synchronous training may take 1.5 times its steps, and end where
their loss first is its last one; the learning rate falls over 1.5 times the steps then.

Ratios, above 1 is ahead: vs_peer/bytes/WAY/LAYOUT is the bytes of synchronous training in a step
over those of the way; vs_peer/loss/WAY/LAYOUT the loss of synchronous training over that of the
way, paired by seed, the mean; error/... half of its 95 % interval, from two seeds on;
points/accuracy/... the percent of right answers above those of synchronous training;
vs_peer/seconds/WAY/LAYOUT seconds of synchronous training in a step over those of the way;
vs_peer/time_to_loss/WAY/LAYOUT seconds until synchronous training reaches its last loss over those
until the way does, where it does, and vs_peer/bytes_to_loss/WAY/LAYOUT the same of bytes.

Virtual nodes need Linux and root.

examples:
  python benchmarks/rarely.py --quick
  python benchmarks/rarely.py --layouts 4x1 2x2 --seeds 5 --json rarely.json --png rarely.png
  python benchmarks/rarely.py --task vision --layouts 4x1 --json vision.json
  python benchmarks/rarely.py --layouts 4x1@100mbit 4x1@1gbit --seeds 1 --longer 1.5
"""
QUICK = ("synchronous", "diloco-10", "diloco-30-int8")
JOB_LIMIT_S = 3600.0
RATE_AFTER_PRETRAINING = 1e-3


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Every way against synchronous training, by layout."""
    found: dict[str, float] = {}
    for (layout,), here in report.grouped(rows, "layout").items():
        base = {row["seed"]: row for row in here if row["candidate"] == BASE}
        for (way,), mine in report.grouped(here, "candidate").items():
            pairs = [(base[row["seed"]], row) for row in mine if row["seed"] in base]
            if way == BASE or not pairs:
                continue
            case = f"{way}/{layout}"
            losses = [theirs["loss"] / mine["loss"] for theirs, mine in pairs]
            found[f"vs_peer/loss/{case}"] = statistics.mean(losses)
            points = [mine["accuracy"] - theirs["accuracy"] for theirs, mine in pairs]
            found[f"points/accuracy/{case}"] = statistics.mean(points)
            if len(pairs) > 1:
                found[f"error/loss/{case}"] = report.half_width(losses)
                found[f"error/accuracy/{case}"] = report.half_width(points)
            for what, column in (("seconds", 2), ("bytes", 3)):
                shares = [b["curve"][-1] for pair in pairs for b in pair]
                shares = [one[column] / one[0] for one in shares]
                found |= _ratio(f"{what}/{case}", shares[::2], shares[1::2])
                reached = [_until(mine, theirs["loss"], column) for theirs, mine in pairs]
                ends = [_until(theirs, theirs["loss"], column) for theirs, _ in pairs]
                name = {"seconds": "time"}.get(what, what)
                found |= _ratio(f"{name}_to_loss/{case}", ends, reached)
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _ratio(
    name: str, theirs: Sequence[float | None], mine: Sequence[float | None]
) -> dict[str, float]:
    """The median over seeds; nothing where one of ours is not there, or 0."""
    shares = [b / a for b, a in zip(theirs, mine, strict=True) if a and b is not None]
    return {f"vs_peer/{name}": statistics.median(shares)} if len(shares) == len(theirs) else {}


def _until(row: Mapping[str, Any], loss: float, column: int) -> float | None:
    """Seconds or bytes until the loss, between the looks by a straight line; None: it was not
    reached.
    """
    before: Sequence[float] | None = None
    for point in row["curve"]:
        if point[1] <= loss:
            if before is None:
                return float(point[column])
            share = (before[1] - loss) / (before[1] - point[1])
            return float(before[column] + share * (point[column] - before[column]))
        before = point
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when a job failed."""
    options = _read(argv)
    rows: list[dict[str, Any]] = []
    left_out = list(filter(None, map(missing, options.ways)))
    print(*left_out, sep="\n", end="\n" * bool(left_out), file=sys.stderr)
    options.ways = [way for way in options.ways if missing(way) is None]
    names = ("task", "steps", "longer", "batch", "pretrain", "rate", "outer")
    settings = {name: getattr(options, name) for name in (*names, "first_seed", "seeds", "ways")}
    settings["layouts"] = {one.name: str(one) for one in options.layouts}
    meta = {"left_out": left_out, "torchft": torchft_version()}

    def document(failures: list[str], stopped: int) -> dict[str, Any]:
        found = (ratios(rows), rows, failures, stopped)
        return report.document("rarely", settings, *found, meta=meta)

    failures: list[str] = []
    with keeping() as stopped, tempfile.TemporaryDirectory() as folder:
        jobs = WorkerJobs("rarely_worker", Path(folder), JOB_LIMIT_S)
        failures = jobs.failures
        for _ in _measure(options, jobs, rows):
            if options.json:
                report.write_json(options.json, document(failures, 1))
    written = document(failures, stopped.code)
    report.publish(
        options, written, tables(written), lambda doc, target: plot(doc["results"], target)
    )
    return stopped.code or int(bool(failures))


def _measure(
    options: argparse.Namespace, jobs: WorkerJobs, rows: list[dict[str, Any]]
) -> Iterator[None]:
    """All jobs, into `rows` one by one; yields after each."""
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    cases = [(layout, seed) for seed in seeds for layout in options.layouts]
    begin = time.monotonic()
    for layout, seed in tqdm(cases, unit="job", disable=None):
        if options.limit_s is not None and time.monotonic() - begin > options.limit_s:
            print(f"{options.limit_s:g} s are over: the rest is left out", file=sys.stderr)
            return
        start = _pretrained(options, seed, jobs)
        if start is None:
            continue
        names = ("task", "steps", "longer", "batch", "rate", "outer", "ways")
        plan = {name: getattr(options, name) for name in names}
        # where it fails, the ways before count
        jobs.run(layout, {**plan, "seed": seed, "start": start})
        rows += [{"layout": layout.name, **row} for row in jobs.written() or []]
        yield


def _pretrained(options: argparse.Namespace, seed: int, jobs: WorkerJobs) -> str | None:
    """The file that all ways of this seed go on from, made where it is not there, or "scratch";
    None, and a line among the failures, where it cannot be made.
    """
    if options.pretrain == 0:
        return "scratch"
    file = jobs.out.parent / f"{seed}-{options.pretrain}.pt"
    if not file.exists():
        command = rank_command("rarely_pretraining", str(file), str(seed), str(options.pretrain))
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            jobs.failures.append(f"pretraining of seed {seed}: {''.join(reason)}")
            return None
    return str(file)


def tables(document: Mapping[str, Any]) -> str:
    """A table for each layout."""
    parts = []
    settings, compared = document["meta"]["settings"], document["ratios"]
    for (layout,), here in report.grouped(document["results"], "layout").items():
        lines = []
        for (way,), mine in report.grouped(here, "candidate").items():
            case = f"{way}/{layout}"
            waits = [row["wait_s"] for row in mine if row["wait_s"] is not None]
            loss = statistics.mean(row["loss"] for row in mine)
            lines.append(
                [
                    way,
                    f"{loss:.4f}",
                    _percent(compared, case),
                    *_accuracy(mine, compared, case),
                    f"{statistics.mean(row['steps'] for row in mine):.0f}",
                    f"{statistics.median(row['sent_bytes'] for row in mine) / 1e6:.2f}",
                    _share(compared.get(f"vs_peer/bytes/{case}")),
                    f"{statistics.median(row['seconds'] for row in mine):.1f}",
                    f"{statistics.median(waits):.2f}" if waits else "-",
                    _share(compared.get(f"vs_peer/time_to_loss/{case}")),
                ]
            )
        seeds = len({row["seed"] for row in here})
        after = f" after {settings['pretrain']} of one process" if settings["pretrain"] else ""
        where = settings["layouts"][layout]
        parts.append(f"{where}, {settings['steps']} steps{after}, {seeds} seeds")
        header = ["", "loss", "over sync", "right %", "points", "steps", "MB of all", "fewer"]
        parts.append(report.table([*header, "s", "waited", "faster to loss"], lines))
    return "\n".join(parts)


def _percent(compared: Mapping[str, float], case: str) -> str:
    if f"vs_peer/loss/{case}" not in compared:
        return "-"
    over = 100 * (1 / compared[f"vs_peer/loss/{case}"] - 1)
    return f"{over:+.2f}{_error(compared, f'loss/{case}', 100)} %"


def _accuracy(
    rows: Sequence[Mapping[str, Any]], compared: Mapping[str, float], case: str
) -> tuple[str, str]:
    """The mean, and what it is above synchronous training's."""
    mean = f"{statistics.mean(row['accuracy'] for row in rows):.2f}"
    points = compared.get(f"points/accuracy/{case}")
    if points is None:
        return mean, "-"
    return mean, f"{points:+.2f}{_error(compared, f'accuracy/{case}', 1)}"


def _error(compared: Mapping[str, float], case: str, factor: float) -> str:
    """Half of an interval; nothing of a single seed, which has none."""
    half = compared.get(f"error/{case}")
    return "" if half is None else f" +- {factor * half:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} x"


def plot(rows: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Loss against bytes, and against seconds, a column for each layout."""
    layouts = list(report.grouped(rows, "layout").items())
    first = min(row["seed"] for row in rows)
    size = (5 * len(layouts) + 1, 7)
    with report.figure(target, 2, len(layouts), size=size) as axes:
        for (above, below), ((layout,), here) in zip(axes.T, layouts, strict=True):
            for row in (row for row in here if row["seed"] == first):
                steps = [point for point in row["curve"] if point[3] > 0]
                style = "k-" if row["candidate"] == BASE else "-"
                losses = [point[1] for point in steps]
                for axis, which, scale in ((above, 3, 1e-6), (below, 2, 1.0)):
                    x = [point[which] * scale for point in steps]
                    axis.plot(x, losses, style, label=row["candidate"], linewidth=1.4)
            above.set_title(layout, fontsize=10)
            above.set_xlabel("MB sent by all nodes")
            above.set_xscale("log")
            below.set_xlabel("seconds of training")
            for axis in (above, below):
                axis.set_ylabel("loss, nats")
                axis.grid(True, color="#dddddd", linewidth=0.6)
        axes[0][0].legend(fontsize=7, frameon=False)


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what --quick changes."""
    parser = report.argument_parser(
        *(str(__doc__).splitlines()[0], NOTES),
        quick="few ways and steps: under a minute",
        png="plot losses there",
    )
    add = parser.add_argument
    add("--layouts", nargs="+", metavar="L", help="such as 2x2 or 4x1@100mbit")
    add("--ways", nargs="+", choices=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)}; all")
    add("--task", choices=TASKS, default="text", help="what is learned (default text)")
    add("--seeds", type=int, help="paired trainings (default 5)")
    add("--first-seed", type=int, default=0, help="of them (default 0)")
    add("--steps", type=int, help="of each training (default 600)")
    add("--longer", type=float, default=1.0, help="times the steps, to the loss (default 1)")
    add("--batch", type=int, help="samples in a rank's step (default: text 1, vision 16)")
    add("--pretrain", type=int, metavar="STEPS", help="of text, before all begin (default 1500)")
    add("--rate", type=float, help="of AdamW (default: 0.001 after pre-training, else the task's)")
    add(
        "--outer",
        type=float,
        nargs=2,
        metavar=("LR", "MOMENTUM"),
        help="of DiLoCo's outer steps (default: text 0.7 0.5, vision 0.7 0.9)",
    )
    add("--limit-s", type=float, help="begin no job after so long, and keep what there is")
    options = report.parse(parser, argv, layouts=read_layout)
    options.layouts = options.layouts or [read_layout("2x1" if options.quick else "4x1")]
    options.ways = options.ways or list(QUICK if options.quick else WAYS)
    options.ways.sort(key=lambda way: way != BASE)
    _fill_in(parser, options)
    if min(options.rate, options.outer[0]) <= 0 or not 0 <= options.outer[1] < 1:
        parser.error("--rate, --outer: rates above 0, a momentum from 0 to below 1")
    if options.steps < 10:
        parser.error("--steps: 10 or more, for ten looks at the loss")
    if options.longer < 1 or (options.longer > 1 and BASE not in options.ways):
        parser.error(f"--longer: 1 or more, and above 1 with {BASE} among --ways")
    return options


def _fill_in(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What was not given: in a quick run, or for the task."""
    text = options.task == "text"
    if options.pretrain and not text:
        parser.error("--pretrain: for --task text")
    defaults = {
        "seeds": (1, 5),
        "steps": (30, 600),
        "batch": (2, 1 if text else 16),
        "pretrain": (0, 1500 if text else 0),
    }
    for name, (few, many) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, few if options.quick else many)
        least = 0 if name == "pretrain" else 1
        if getattr(options, name) < least:
            parser.error(f"--{name}: {least} or more")
    options.outer = options.outer or list(TASKS[options.task].outer)
    if options.rate is None:
        options.rate = RATE_AFTER_PRETRAINING if options.pretrain else TASKS[options.task].rate


if __name__ == "__main__":
    sys.exit(main())
