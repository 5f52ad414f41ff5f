"""What block shuffling costs in accuracy: paired trainings that differ in the order of samples.

For every seed one model is trained per order, from the same weights, over as many samples; the
models of many seeds are trained side by side, each on what its own loader reads. Shows the label
entropy of the batches next to the accuracy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hsgd.io import PartitionedLoader, ReadOptions, convert_to_slabs

from harness import report, stopping

__all__ = ["Models", "digits", "entropies", "extend", "main"]

BATCH = 32
HIDDEN = 64
GROUP = 50  # seeds that are trained side by side
EPILOG = """\
Orders: full (one permutation of all samples per epoch), block (blocks permuted, then samples drawn
from a window of blocks, data permuted at conversion: the default of hsgd.io), slabs (the same, with
blocks moving only among the slabs of four windows), sorted-block (block without the permutation at
conversion, on data sorted by class) and sorted (no shuffling at all). A block has 1/64 of the
samples and a window 1/8, as with 4 MiB and 64 MiB of larger data.

Differences are in points of test accuracy against full, the mean over the seeds, with the half
width of its 95 % confidence interval (paired). Ratios in the JSON: accuracy/DATA/ORDER is that
difference, half_width/DATA/ORDER the half width; entropy/DATA/ORDER the mean label entropy of a
batch over that with full. --json is written after each 50 seeds, and when the run is interrupted or
its --limit reached: what was trained by then counts.

examples:
  python benchmarks/shuffle_quality.py --quick
  python benchmarks/shuffle_quality.py --epochs 6 --json shuffle.json --png shuffle.png
  python benchmarks/shuffle_quality.py --epochs 6 --seeds 400 --orders block slabs --json many.json
"""
# order -> (permuted at conversion, shuffle of the loader)
ORDERS = {
    "full": (False, "full"),
    "block": (True, "block"),
    "slabs": (True, "slabs"),
    "sorted-block": (False, "block"),
    "sorted": (False, "none"),
}


@dataclass(frozen=True)
class Data:
    """A class-sorted training set and a test set; accuracy and entropy of each seed, by order."""

    name: str
    image: np.ndarray
    label: np.ndarray
    test_image: torch.Tensor
    test_label: torch.Tensor
    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def digits() -> Data:
    """scikit-learn's digits, a fifth of each class for the test."""
    from hsgd.io.convert.array_sources import digits_splits

    parts = {}
    for name, source in digits_splits(0.2, 0).items():
        columns = {s.name: np.concatenate(list(source.stream(s, 1000))) for s in source.specs}
        parts[name] = columns
    return _sorted("digits", parts["train"], parts["test"])


def synthetic() -> Data:
    """20 overlapping Gaussian classes in 32 dimensions, 6000 samples to train and 4000 to test."""
    random = np.random.default_rng(3)
    centres = random.normal(size=(20, 32)).astype(np.float32)
    parts = {}
    for name, count in (("train", 6000), ("test", 4000)):
        label = random.integers(0, 20, count)
        noise = random.normal(scale=1.8, size=(count, 32)).astype(np.float32)
        parts[name] = {"image": centres[label] + noise, "label": label}
    return _sorted("synthetic", parts["train"], parts["test"])


def _sorted(name: str, train: dict[str, np.ndarray], test: dict[str, np.ndarray]) -> Data:
    order = np.argsort(train["label"], kind="stable")
    return Data(
        name,
        train["image"][order],
        train["label"][order],
        torch.from_numpy(test["image"]),
        torch.from_numpy(test["label"]),
    )


SETS = {"digits": digits, "synthetic": synthetic}


class Models:
    """One small classifier for each seed, side by side: weights have an axis of seeds in front.

    What one learns does not depend on the others. Weights begin as torch.nn.Linear draws them after
    torch.manual_seed(seed).
    """

    def __init__(self, seeds: Sequence[int], inputs: int, classes: int) -> None:
        weights: list[list[torch.Tensor]] = []
        for seed in seeds:
            torch.manual_seed(seed)
            layers = torch.nn.Linear(inputs, HIDDEN), torch.nn.Linear(HIDDEN, classes)
            weights.append([v for layer in layers for v in (layer.weight.T, layer.bias[None])])
        self.weights = [torch.stack(values).detach() for values in zip(*weights, strict=True)]
        for values in self.weights:
            values.requires_grad_()
        self._optimizer = torch.optim.SGD(self.weights, lr=0.05, momentum=0.9)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """(seeds, samples, inputs) -> (seeds, samples, classes)."""
        first, first_bias, second, second_bias = self.weights
        hidden = torch.baddbmm(first_bias, image, first).relu()
        return torch.baddbmm(second_bias, hidden, second)

    def step(self, image: torch.Tensor, label: torch.Tensor) -> None:
        """One step of SGD on a batch for each seed: the mean loss over its samples."""
        self._optimizer.zero_grad()
        found = self(image).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, label.flatten(), reduction="sum")
        (loss / label.shape[1]).backward()
        self._optimizer.step()

    @torch.no_grad()
    def accuracies(self, image: torch.Tensor, label: torch.Tensor) -> list[float]:
        """Of each seed on one test set, in per cent."""
        found = self(image.expand(len(self.weights[0]), *image.shape)).argmax(2)
        shares: list[float] = (100 * (found == label).double().mean(1)).tolist()
        return shares


def entropies(label: torch.Tensor, classes: int) -> torch.Tensor:
    """(seeds, samples) -> (seeds,), of the labels of a batch, in bits."""
    counts = torch.zeros(len(label), classes).scatter_add_(1, label, torch.ones(label.shape))
    shares = counts / label.shape[1]
    return -torch.xlogy(shares, shares).sum(1) / float(np.log(2))


def train(
    data: Data, folders: Sequence[Path], shuffle: str, seeds: Sequence[int], epochs: int
) -> list[tuple[float, float]]:
    """For each seed, accuracy on the test set after training, and the mean label entropy of a
    batch, in bits. folders: of each seed.
    """
    samples = len(data.label)
    row_bytes = data.image[0].nbytes + 8
    loaders = [
        PartitionedLoader(
            folder,
            samples,  # at once: the order of samples does not depend on the size of a batch
            shuffle=shuffle,
            seed=seed,
            read=ReadOptions(
                block_bytes=samples * row_bytes // 64,
                window_bytes=samples * row_bytes // 8,
                threads=1,
            ),
        )
        for folder, seed in zip(folders, seeds, strict=True)
    ]
    classes = int(data.label.max()) + 1
    models = Models(seeds, data.image.shape[1], classes)
    bits = []
    for epoch in range(epochs):
        read = []
        for loader in loaders:
            loader.set_epoch(epoch)
            read += list(loader)
        image = torch.stack([batch["image"] for batch in read])
        label = torch.stack([batch["label"] for batch in read])
        del read
        for low in range(0, samples, BATCH):
            part = slice(low, low + BATCH)
            models.step(image[:, part], label[:, part])
            bits.append(entropies(label[:, part], classes))
    accuracies = models.accuracies(data.test_image, data.test_label)
    return list(zip(accuracies, torch.stack(bits).mean(0).tolist(), strict=True))


def extend(found: Data, folder: Path, seeds: Sequence[int], epochs: int) -> None:
    """Its orders with these seeds."""
    name = found.name
    source = folder / f"{name}.npz"
    np.savez(source, image=found.image, label=found.label)
    ordered = folder / f"{name}-ordered"
    convert_to_slabs(source, ordered, permute=False)
    permuted = [folder / f"{name}-{seed}" for seed in seeds]
    for seed, target in zip(seeds, permuted, strict=True):
        convert_to_slabs(source, target, seed=seed)  # another permutation for each seed
    trained = {
        order: train(found, permuted if permute else [ordered] * len(seeds), shuffle, seeds, epochs)
        for order, (permute, shuffle) in ORDERS.items()
        if order in found.values
    }
    for order, values in trained.items():
        found.values[order] += values


def rows_of(found: Data, epochs: int) -> list[dict[str, Any]]:
    """A row of results for each order; none before the first seeds are through."""
    full = found.values["full"]
    rows = []
    for order, values in found.values.items() if full else ():
        gaps = [a[0] - b[0] for a, b in zip(values, full, strict=True)]
        rows.append(
            {
                "candidate": order,
                "data": found.name,
                "seeds": len(values),
                "epochs": epochs,
                "accuracy": round(statistics.mean(v[0] for v in values), 3),
                "difference": round(statistics.mean(gaps), 3),
                "half_width": round(report.half_width(gaps), 3),
                "entropy_bits": round(statistics.mean(v[1] for v in values), 3),
                "accuracies": [round(v[0], 2) for v in values],
            }
        )
    return rows


def plot(document: dict[str, Any], target: Path) -> None:
    """Difference in accuracy against full, by order and data set."""
    sets = report.grouped(document["results"], "data")
    with report.figure(target, 1, len(sets), size=(8.5, 3.6)) as axes:
        for panel, ((name,), rows) in zip(axes[0], sets.items(), strict=True):
            part = [row for row in rows if row["candidate"] != "full"]
            values = [row["difference"] for row in part]
            bars = [row["half_width"] for row in part]
            panel.bar([row["candidate"] for row in part], values, yerr=bars, color="#4292c6")
            panel.axhline(0, color="black", linewidth=0.8)
            panel.set_title(f"{name}, {part[0]['seeds']} seeds", fontsize=10, loc="left")
            panel.set_ylabel("points against full shuffle")
            panel.set_yscale("symlog", linthresh=1)


def document(
    rows: Sequence[dict[str, Any]], settings: dict[str, Any], stopped: int
) -> dict[str, Any]:
    """What is written as JSON."""
    base = {row["data"]: row for row in rows if row["candidate"] == "full"}
    ratios: dict[str, float] = {}
    for row in rows:
        case, bits = f"{row['data']}/{row['candidate']}", base[row["data"]]["entropy_bits"]
        ratios[f"accuracy/{case}"] = row["difference"]
        ratios[f"half_width/{case}"] = row["half_width"]
        ratios[f"entropy/{case}"] = round(row["entropy_bits"] / bits, 4)
    return report.document("shuffle_quality", settings, ratios, rows, stopped=stopped)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each order and data set."""
    columns: dict[str, Any] = {
        "data": "data",
        "order": "candidate",
        "seeds": "seeds",
        "accuracy, %": lambda row: f"{row['accuracy']:.2f}",
        "points against full": lambda row: f"{row['difference']:+.2f} ± {row['half_width']:.2f}",
        "bits per batch": lambda row: f"{row['entropy_bits']:.2f}",
    }
    return report.rows_table(rows, columns)


def _settings(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.argument_parser(
        *("Accuracy with block shuffling against full shuffling.", EPILOG),
        quick="3 seeds, 3 epochs",
        png="plot differences there",
    )
    add = parser.add_argument
    add("--seeds", type=int, help="pairs (default 20)")
    add("--epochs", type=int, help="of each training (default 12)")
    add("--orders", nargs="+", choices=ORDERS, help="besides full, which (default: all)")
    add("--data", nargs="+", choices=SETS, help="which (default: both)")
    add("--limit", type=float, metavar="S", help="begin nothing new after S seconds")
    options = report.parse(parser, argv)
    options.seeds = options.seeds or (3 if options.quick else 20)
    options.epochs = options.epochs or (3 if options.quick else 12)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _settings(argv)
    torch.set_num_threads(1)
    began = time.monotonic()
    orders = ["full", *(order for order in options.orders or ORDERS if order != "full")]
    found = [SETS[name]() for name in options.data or SETS]
    for one in found:
        one.values.update({order: [] for order in orders})
    settings = {"seeds": options.seeds, "epochs": options.epochs, "limit_s": options.limit}
    rows: list[dict[str, Any]] = []

    with stopping.keeping() as stopped:
        for low in range(0, options.seeds, GROUP):
            seeds = range(low, min(low + GROUP, options.seeds))
            for one in found:
                if options.limit is not None and time.monotonic() - began > options.limit:
                    break
                with tempfile.TemporaryDirectory(prefix="hsgd-shuffle-") as folder:
                    extend(one, Path(folder), seeds, options.epochs)
                rows = [row for part in found for row in rows_of(part, options.epochs)]
                if options.json:
                    report.write_json(options.json, document(rows, settings, 0))
                print(f"{one.name}: {seeds.stop} seeds", file=sys.stderr, flush=True)
    found_now = document(rows, settings, stopped.code)
    report.publish(options, found_now, table(rows) if rows else "", plot)
    return stopped.code


if __name__ == "__main__":
    sys.exit(main())
