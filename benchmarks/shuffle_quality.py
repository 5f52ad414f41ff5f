"""What block shuffling costs in accuracy: paired trainings that differ in the order of samples.

Owns the data sets sorted by class, the small classifier, and the pairing. For every seed one model
is trained per order, from the same weights, over as many samples. Shows the label entropy of the
batches next to the accuracy. Never times anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hsgd.io import PartitionedLoader, convert_to_slabs

import report

__all__ = ["digits", "main"]

BATCH = 32
EPILOG = """\
Orders: full (one permutation of all samples per epoch), block (blocks permuted, then samples drawn
from a window of blocks, data permuted at conversion: the default of hsgd.io), slabs (the same, with
blocks moving only among the slabs of four windows), sorted-block (block without the permutation at
conversion, on data sorted by class) and sorted (no shuffling at all). A block has 1/64 of the
samples and a window 1/8, as with 4 MiB and 64 MiB of larger data.

Differences are in points of test accuracy against full, the mean over the seeds, with the half
width of its 95 % confidence interval (paired). Ratios in the JSON: accuracy/DATA/ORDER is that
difference; entropy/DATA/ORDER the mean label entropy of a batch over that with full.

examples:
  python benchmarks/shuffle_quality.py --quick
  python benchmarks/shuffle_quality.py --seeds 20 --json shuffle.json --png shuffle.png
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
    """A class-sorted training set and a test set."""

    name: str
    image: np.ndarray
    label: np.ndarray
    test_image: torch.Tensor
    test_label: torch.Tensor


def digits() -> Data:
    """scikit-learn's digits, a fifth of each class for the test."""
    from hsgd.io.sources import digits_splits

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


def train(data: Data, folder: Path, shuffle: str, seed: int, epochs: int) -> tuple[float, float]:
    """Accuracy on the test set after training, and the mean label entropy of a batch, in bits."""
    samples = len(data.label)
    row_bytes = data.image[0].nbytes + 8
    loader = PartitionedLoader(
        folder,
        BATCH,
        shuffle=shuffle,
        seed=seed,
        block_bytes=samples * row_bytes // 64,
        window_bytes=samples * row_bytes // 8,
        threads=1,
    )
    torch.manual_seed(seed)
    classes = int(data.label.max()) + 1
    model = torch.nn.Sequential(
        torch.nn.Linear(data.image.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, classes)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    entropies = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()
            shares = np.bincount(batch["label"].numpy()) / len(batch["label"])
            shares = shares[shares > 0]
            entropies.append(float(-(shares * np.log2(shares)).sum()))
    with torch.no_grad():
        right = (model(data.test_image).argmax(1) == data.test_label).float().mean()
    return 100 * float(right), statistics.mean(entropies)


def compare(data: Data, folder: Path, seeds: int, epochs: int) -> list[dict[str, Any]]:
    """All orders with all seeds: rows of results."""
    source = folder / f"{data.name}.npz"
    np.savez(source, image=data.image, label=data.label)
    found: dict[str, list[tuple[float, float]]] = {order: [] for order in ORDERS}
    for seed in range(seeds):
        made = {}
        for permute in (True, False):  # another permutation for each seed
            made[permute] = folder / f"{data.name}-{seed}-{permute}"
            convert_to_slabs(source, made[permute], seed=seed, permute=permute)
        for order, (permute, shuffle) in ORDERS.items():
            found[order].append(train(data, made[permute], shuffle, seed, epochs))
    rows = []
    for order, values in found.items():
        gaps = [a[0] - b[0] for a, b in zip(values, found["full"], strict=True)]
        rows.append(
            {
                "candidate": order,
                "data": data.name,
                "seeds": seeds,
                "epochs": epochs,
                "accuracy": round(statistics.mean(v[0] for v in values), 3),
                "difference": round(statistics.mean(gaps), 3),
                "half_width": round(report.half_width(gaps), 3),
                "entropy_bits": round(statistics.mean(v[1] for v in values), 3),
                "accuracies": [round(v[0], 2) for v in values],
            }
        )
    return rows


def plot(rows: Sequence[dict[str, Any]], target: Path) -> None:
    """Difference in accuracy against full, by order and data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["data"] for row in rows))
    figure, panels = pyplot.subplots(1, len(names), figsize=(8.5, 3.6), layout="constrained")
    for panel, name in zip(np.atleast_1d(panels), names, strict=True):
        part = [row for row in rows if row["data"] == name and row["candidate"] != "full"]
        values = [row["difference"] for row in part]
        bars = [row["half_width"] for row in part]
        panel.bar([row["candidate"] for row in part], values, yerr=bars, color="#4292c6")
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(f"{name}, {part[0]['seeds']} seeds", fontsize=10, loc="left")
        panel.set_ylabel("points against full shuffle")
        panel.set_yscale("symlog", linthresh=1)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Accuracy with block shuffling against full shuffling.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="3 seeds, 3 epochs")
    parser.add_argument("--seeds", type=int, help="pairs (default 20)")
    parser.add_argument("--epochs", type=int, help="of each training (default 12)")
    parser.add_argument("--data", nargs="+", choices=SETS, help="which (default: both)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot differences there")
    options = parser.parse_args(argv)
    seeds = options.seeds or (3 if options.quick else 20)
    epochs = options.epochs or (3 if options.quick else 12)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hsgd-shuffle-") as folder:
        sets = [SETS[name]() for name in options.data or SETS]
        rows = [row for data in sets for row in compare(data, Path(folder), seeds, epochs)]
    base = {row["data"]: row for row in rows if row["candidate"] == "full"}
    ratios: dict[str, float] = {}
    for row in rows:
        case = f"{row['data']}/{row['candidate']}"
        ratios[f"accuracy/{case}"] = row["difference"]
        ratios[f"entropy/{case}"] = round(
            row["entropy_bits"] / base[row["data"]]["entropy_bits"], 4
        )
    lines = [
        [
            row["data"],
            row["candidate"],
            f"{row['accuracy']:.2f}",
            f"{row['difference']:+.2f} ± {row['half_width']:.2f}",
            f"{row['entropy_bits']:.2f}",
        ]
        for row in rows
    ]
    header = ["data", "order", "accuracy, %", "points against full", "bits per batch"]
    print(report.table(header, lines))
    meta = {**report.facts("shuffle_quality"), "settings": {"seeds": seeds, "epochs": epochs}}
    doc = {"meta": meta, "ratios": ratios, "failures": [], "results": rows}
    if options.json:
        report.write_json(options.json, json.loads(json.dumps(doc)))
    if options.png:
        plot(rows, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
