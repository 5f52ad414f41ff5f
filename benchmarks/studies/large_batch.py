"""Accuracy against the size of the batch: SGD and LARS, each with its own tuned learning rate,
after the same number of epochs.

Nothing is timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from harness import report
from harness.stopping import keeping
from hsgd.optim import LARS, WarmupPolynomialLR
from shuffle_quality import digits

__all__ = ["OPTIMIZERS", "main"]

EPILOG = """\
One process stands for any number of ranks: the batch is the global one. A perceptron (64-64-10)
learns scikit-learn's digits, a fifth of each class for the test. Every training lasts the same
number of epochs, so a larger batch means fewer steps. Both optimizers have momentum 0.9, weight
decay 1e-4 and the schedule of the MLPerf reference, with a tenth of the steps to warm up.

The learning rate is tuned for each batch and optimizer: powers of two, until the best of them has
worse neighbours on both sides, judged by seeds that are not used again and a fifth of the training
images, which these trainings do not see. Then all seeds train on all training images. Two
trainings of the same seed have the same first weights and the same order of images.

Differences are in points of test accuracy, LARS less SGD, the mean over the seeds with the half
width of its 95 % confidence interval (paired). A point is four test images. Ratios in the JSON:
difference/BATCH.

examples:
  python benchmarks/lars.py --accuracy --quick
  python benchmarks/lars.py --accuracy --json large_batch.json --png large_batch.png
"""
SHARED: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
Weights = list[torch.nn.Parameter]
OPTIMIZERS: dict[str, tuple[float, Callable[[Weights, float], torch.optim.Optimizer]]] = {
    "sgd": (0.125, lambda p, lr: torch.optim.SGD(p, lr, **SHARED)),
    "lars": (1.0, lambda p, lr: LARS(p, lr, trust_coefficient=0.02, **SHARED)),
}
"""Where the search for the learning rate begins, and how the optimizer is made."""
TUNING_SEEDS = range(1000, 1005)
MOST_RATES = 15


Images = tuple[torch.Tensor, torch.Tensor]
"""Rows of 64 numbers in 0..1 and their labels."""


@dataclass(frozen=True)
class TrainingPlan:
    """A training but for its seed."""

    optimizer: str
    lr: float
    batch: int
    epochs: int


def load() -> tuple[Images, Images]:
    """Images to learn from, and images to be judged by."""
    found = digits()
    learn = torch.from_numpy(found.image), torch.from_numpy(found.label)
    return learn, (found.test_image, found.test_label)


def train(learn: Images, judge: Images, plan: TrainingPlan, seed: int) -> float:
    """Accuracy on `judge` in percent; 0 where the weights are no numbers any more."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = OPTIMIZERS[plan.optimizer][1](list(model.parameters()), plan.lr)
    image, label = learn
    count = len(label)
    steps = plan.epochs * math.ceil(count / plan.batch)
    for group in optimizer.param_groups:
        group["initial_lr"] = plan.lr  # the schedule goes on after its step 0, whose rate is 0
    scheduler = WarmupPolynomialLR(optimizer, max(1, steps // 10), steps, end_lr=0.0, last_epoch=0)
    for _ in range(plan.epochs):
        for rows in torch.randperm(count, generator=draw).split(plan.batch):
            loss = torch.nn.functional.cross_entropy(model(image[rows]), label[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    with torch.no_grad():
        output = model(judge[0])
        right = (output.argmax(1) == judge[1]).float().mean()
        return 100 * float(right) if bool(output.isfinite().all()) else 0.0


def tune(score: Callable[[float], float], start: float, most: int) -> tuple[float, bool]:
    """The power of two times `start` with the best score, and whether it has worse neighbours on
    both sides. `most`: scores that are asked for.
    """
    known = {0: score(start)}
    while True:
        best = max(known, key=lambda power: (known[power], -abs(power)))
        missing = [power for power in (best - 1, best + 1) if power not in known]
        if not missing or len(known) + len(missing) > most:
            return start * 2.0**best, not missing
        known.update({power: score(start * 2.0**power) for power in missing})


def compare(
    batches: Sequence[int], seeds: int, epochs: int, rates: int, rows: list[dict[str, Any]]
) -> None:
    """Every batch with both optimizers: rows of results, into `rows` as they come."""
    learn, judge = load()
    part = torch.randperm(len(learn[1]), generator=torch.Generator().manual_seed(0))
    held = len(part) // 5
    seen, unseen = ((learn[0][r], learn[1][r]) for r in (part[held:], part[:held]))
    with tqdm(total=len(batches) * len(OPTIMIZERS), unit="case", disable=None) as progress:
        for batch in batches:
            whole = batch >= len(part)
            plan = TrainingPlan("", 0.0, len(seen[1]) if whole else batch, epochs)
            found: dict[str, list[float]] = {}
            both = []
            for name, (start, _) in OPTIMIZERS.items():
                named = replace(plan, optimizer=name)
                lr, inside = tune(lambda lr, p=named: _judged(seen, unseen, p, lr), start, rates)
                final = replace(named, lr=lr, batch=batch)
                found[name] = [train(learn, judge, final, seed) for seed in range(seeds)]
                both.append(_row(final, len(part), inside, found[name]))
                progress.update()
            gaps = [a - b for a, b in zip(found["lars"], found["sgd"], strict=True)]
            both[-1]["difference"] = round(statistics.mean(gaps), 3)
            both[-1]["half_width"] = round(report.half_width(gaps), 3)
            rows += both


def _judged(seen: Images, unseen: Images, plan: TrainingPlan, lr: float) -> float:
    return statistics.mean(train(seen, unseen, replace(plan, lr=lr), s) for s in TUNING_SEEDS)


def _row(plan: TrainingPlan, images: int, inside: bool, values: list[float]) -> dict[str, Any]:
    return {
        "candidate": plan.optimizer,
        "batch": plan.batch,
        "steps": plan.epochs * math.ceil(images / plan.batch),
        "lr": plan.lr,
        "lr_has_worse_neighbours": inside,
        "seeds": len(values),
        "accuracy": round(statistics.mean(values), 3),
        "worst": round(min(values), 3),
        "accuracies": [round(value, 3) for value in values],
    }


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Mean and worst accuracy over the batch."""
    with report.figure(target, size=(7, 4)) as ((axes,),):
        for name, colour in (("sgd", "#bbbbbb"), ("lars", "#4292c6")):
            rows = [row for row in document["results"] if row["candidate"] == name]
            sizes = [row["batch"] for row in rows]
            axes.plot(sizes, [row["accuracy"] for row in rows], "-o", color=colour, label=name)
            worst = [row["worst"] for row in rows]
            axes.plot(sizes, worst, ":", color=colour, label=f"{name}, worst seed")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(f"batch; {document['meta']['settings']['epochs']} epochs")
        axes.set_ylabel("test accuracy, %")
        axes.legend(fontsize=8, frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = report.argument_parser(
        *("Compare the accuracy of SGD and LARS against the size of the batch.", EPILOG),
        quick="two batches, 3 seeds, few rates: under a minute",
        png="plot the accuracies there",
        program="lars.py --accuracy",
    )
    add = parser.add_argument
    add("--batches", nargs="+", type=int, metavar="N", help="default: 64 to 1024, and all images")
    add("--seeds", type=int, help="pairs (default 20)")
    add("--epochs", type=int, default=30, help="of each training (default 30)")
    add("--rates", type=int, help=f"learning rates that are tried at most (default {MOST_RATES})")
    options = report.parse(parser, argv)
    everything = len(load()[0][1])
    chosen = [256, everything] if options.quick else [64, 128, 256, 512, 1024, everything]
    batches = [min(batch, everything) for batch in options.batches or chosen]
    seeds = options.seeds or (3 if options.quick else 20)
    rates = options.rates or (5 if options.quick else MOST_RATES)
    if min(*batches, seeds, options.epochs, rates) < 1:
        parser.error("--batches, --seeds, --epochs and --rates: 1 or more")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with keeping() as stopped:
        compare(batches, seeds, options.epochs, rates, rows)
    settings = {"seeds": seeds, "epochs": options.epochs, "rates": rates, **SHARED}
    failures = [
        f"batch {row['batch']}, {row['candidate']}: the best learning rate, {row['lr']:g}, is the "
        "last that was tried"
        for row in rows
        if not row["lr_has_worse_neighbours"]
    ]
    ratios = {f"difference/{r['batch']}": r["difference"] for r in rows if "difference" in r}
    document = report.document("large_batch", settings, ratios, rows, failures, stopped.code)
    report.publish(options, document, table(document), plot)
    return stopped.code


def table(document: Mapping[str, Any]) -> str:
    """A line for each batch."""
    lines = []
    rows = document["results"]
    for sgd, lars in zip(rows[::2], rows[1::2], strict=True):
        lines.append(
            [
                str(sgd["batch"]),
                str(sgd["steps"]),
                *(f"{row['accuracy']:.2f} ({row['worst']:.2f})" for row in (sgd, lars)),
                f"{lars['difference']:+.2f} ± {lars['half_width']:.2f}",
                *(f"{row['lr']:g}" for row in (sgd, lars)),
            ]
        )
    header = ["batch", "steps", "SGD (worst)", "LARS (worst)", "LARS - SGD", "lr of SGD", "of LARS"]
    seeds = document["meta"]["settings"]["seeds"]
    return f"test accuracy, %, mean over {seeds} seeds\n" + report.table(header, lines)
