"""Elastic training under random faults: what a fault costs, and what is learned in spite of them.

`training.py --faults` is its front.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.layouts import JobLayout, on_one_node, open_testbed, read_layout
from harness.stopping import keeping
from hsgd.errors import LaunchError
from studies import recovery_figures as figures
from studies.recovery_jobs import SAMPLES, Training, run_training, write_samples

__all__ = ["main"]

EPILOG = """\
`hsgd run -np RANKS --min-np 1` trains digits (the network of examples/train_digits.py, SGD), or a
GPT of 0.25 M parameters on characters of Python's own sources (AdamW), by hvd.elastic.run, which
commits every 10 steps; ranks that are left share the batch. Every --every seconds this program
harms a rank that it draws: kills it (3 of 4; on several nodes 2 of 4), stops it (SIGSTOP; others
give up after HSGD_TIMEOUT_S, 5 s), or kills all processes of a node, its agent too. Agents
start new ranks, which join. A fault waits until the one before was overcome, and two ranks are
there that have made 5 steps.

A training lasts a fixed number of epochs. One seed follows another until --minutes of disturbed
training are over, for each task and layout; each seed also trains once undisturbed, on as many
ranks of one node, from the same weights and over as many samples.

"again after": from the fault to the first step of the survivors, with the time until it is noticed,
new connections, and the state that is sent. "lost" adds the steps that are done again, as they come
after the last commit. Ranks that join cost what lies between the last step without them and the
first with them. score: percent of test images right, or nats per character of the test text.

Ratios in the JSON: difference/TASK/LAYOUT is the score less the undisturbed one, the mean over
seeds, half_width/... its 95 % interval (paired); vs_undisturbed/time/... the undisturbed time over
the disturbed one; overcome/... the share of faults after which steps were made; lost_s_p50/... and
lost_s_p99/... seconds per fault.

Virtual nodes need Linux and root; they share the cores of this machine.

examples:
  python benchmarks/training.py --faults --quick
  python benchmarks/training.py --faults --json faults.json --png faults.png
  python benchmarks/training.py --faults --tasks gpt --layouts 2x2 --minutes 10
"""
EPOCHS = {"digits": 240, "gpt": 5}
QUICK_EPOCHS = {"digits": 60, "gpt": 1}
TIMEOUT_S = 5.0  # HSGD_TIMEOUT_S
START_S = 120.0  # of a job, on a machine that others use too


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when a training failed."""
    options = _options(argv)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with keeping() as stopped, tempfile.TemporaryDirectory(prefix="hsgd-samples-") as folder:
        for task in options.tasks:
            for row in _trainings(task, options, Path(folder), failures):
                rows.append(row)
                if options.json:
                    report.write_json(options.json, _document(options, rows, failures, 0))
    document = _document(options, rows, failures, stopped.code)
    text = [figures.tables(rows), *(f"{k}: {v:g}" for k, v in document["ratios"].items())]
    report.publish(options, document, "\n".join(text), figures.plot)
    return stopped.code or int(bool(failures) or not rows)


def _trainings(
    task: str, options: argparse.Namespace, folder: Path, failures: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows of a task: seed by seed undisturbed and on each layout, until each had its minutes."""
    samples = write_samples(task, folder)
    left_s = {layout.name: 60 * options.minutes for layout in options.layouts}
    seed = 0
    while any(seconds > 0 for seconds in left_s.values()) and seed < options.seeds:
        epochs = options.epochs or (QUICK_EPOCHS if options.quick else EPOCHS)[task]
        limit_s = START_S + 20 * 60 * options.minutes
        plain = Training(task, samples, seed, epochs, 0, TIMEOUT_S, limit_s)
        most = max(layout.ranks for layout in options.layouts)
        row = _row("undisturbed", on_one_node(most), plain, failures)
        if row:
            yield row
        for layout in options.layouts:
            if left_s[layout.name] <= 0:
                continue
            harmed = Training(task, samples, seed, epochs, options.every, TIMEOUT_S, limit_s)
            row = _row("disturbed", layout, harmed, failures)
            left_s[layout.name] -= row["seconds"] if row else 60 * options.minutes
            if row:
                yield row
        seed += 1


def _row(
    candidate: str, layout: JobLayout, training: Training, failures: list[str]
) -> dict[str, Any] | None:
    """A training's; None, and a line in `failures`, where it did not come to its end."""
    what = f"{training.task}, {layout.name}, seed {training.seed}, {candidate}"
    print(what, file=sys.stderr, flush=True)
    try:
        with open_testbed(layout) as testbed:
            found = run_training(testbed, training)
    except LaunchError as error:
        failures.append(f"{what}: {error}")
        return None
    faults = found["faults"]
    if "score" not in found:
        said = "; ".join(found["said"])
        failures.append(f"{what}: exit code {found['code']} after {len(faults)} faults: {said}")
        return None
    seconds, step_s = figures.pace(found["notes"])
    overcome = figures.costs_of_faults(found["notes"], faults)
    return {
        "candidate": candidate,
        "task": training.task,
        "layout": layout.name,
        "seed": training.seed,
        "score": round(found["score"], 4),
        "steps": found["step"],
        "seconds": round(seconds, 3),
        "step_s": round(step_s, 6),
        "exit_code": found["code"],
        "faults": len(faults),
        "overcome": [_rounded(cost) for cost in overcome],
        "joins_s": [round(s, 4) for s in figures.costs_of_joins(found["notes"], faults)],
    }


def _rounded(cost: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in cost.items()}


def _document(
    options: argparse.Namespace, rows: list[dict[str, Any]], failures: list[str], code: int
) -> dict[str, Any]:
    settings = {**vars(options), "layouts": {n.name: str(n) for n in options.layouts}}
    found = (figures.ratios(rows), rows, failures, code)
    return report.document("training --faults", settings, *found)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.argument_parser(
        *(__doc__.splitlines()[0], EPILOG),
        quick="digits once, a fault each 2 s: under a minute",
        png="plot faults and scores there",
    )
    add = parser.add_argument
    add("--faults", action="store_true", help="this study")
    add("--tasks", nargs="+", choices=list(SAMPLES), help="which (default: both)")
    add("--layouts", nargs="+", metavar="LAYOUT", help="like np4 2x2@1gbit (default np4 2x2)")
    add(
        "--minutes", type=float, help="of disturbed training, for each task and layout (default 10)"
    )
    add("--every", type=float, metavar="S", help="seconds between faults (default 20)")
    add("--epochs", type=int, help=f"of a training (default: {EPOCHS})")
    add("--seeds", type=int, help="trainings at most (default: as many as the time allows)")
    options = report.parse(parser, argv, layouts=_layout)
    quick = options.quick
    options.tasks = options.tasks or (["digits"] if quick else list(SAMPLES))
    options.minutes = options.minutes or (0.5 if quick else 10.0)
    options.every = options.every or (2.0 if quick else 20.0)
    options.seeds = options.seeds or (1 if quick else 10**6)
    options.layouts = options.layouts or list(map(_layout, ["np4"] if quick else ["np4", "2x2"]))
    if min(options.minutes, options.every, options.seeds) <= 0:
        parser.error("--minutes, --every, --seeds: above 0")
    if options.epochs is not None and options.epochs < 1:
        parser.error("--epochs: 1 or more")
    return options


def _layout(text: str) -> JobLayout:
    return on_one_node(int(text[2:])) if text.startswith("np") else read_layout(text)
