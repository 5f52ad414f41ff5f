"""Read half an epoch on four ranks, and the rest on two: each sample comes exactly once.

    python examples/gallery/loader_resume.py

The ranks are loaders of one process here; in a job each rank has its own. Writes loader_resume.png:
which rank read which sample, before and after.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from hsgd.io import PartitionedLoader, SampleWriter
from sklearn.datasets import load_digits

BATCH = 16


def write_digits(target: Path) -> int:
    images, labels = load_digits(return_X_y=True)
    with SampleWriter(target) as writer:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            writer.write({"image": image, "label": label, "number": np.int64(number)})
    return len(labels)


def open_loaders(data: Path, ranks: int) -> list[PartitionedLoader]:
    return [PartitionedLoader(data, BATCH, rank, ranks, seed=1) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14, help="of each of the four ranks")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of the plot")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits"
        count = write_digits(data)
        reader = np.full((2, count), -1)  # before, after: the rank that read each sample

        loaders = open_loaders(data, 4)
        state = None
        for rank, loader in enumerate(loaders):
            batches = iter(loader)
            for _ in range(options.steps):
                reader[0, next(batches)["number"]] = rank
            state = loader.state_dict()  # the same numbers on all ranks
            loader.close()

        for rank, loader in enumerate(open_loaders(data, 2)):
            loader.load_state_dict(state)
            for batch in loader:
                reader[1, batch["number"]] = rank
            loader.close()

    times = (reader >= 0).sum(axis=0)
    print(f"4 ranks read {(reader[0] >= 0).sum()} of {count} samples in {options.steps} steps")
    print(f"2 ranks read {(reader[1] >= 0).sum()}, the rest of that epoch")
    print(f"samples that came once: {(times == 1).sum()}, twice: {(times == 2).sum()}")
    plot(options.output, reader)
    if (times != 1).any():
        raise SystemExit("some samples did not come exactly once")


def plot(folder: Path, reader: np.ndarray) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.where(reader < 0, np.nan, reader), aspect="auto", cmap="viridis")
    axes.set(yticks=[0, 1], yticklabels=["4 ranks", "2 ranks"], xlabel="sample")
    figure.colorbar(image, label="rank")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "loader_resume.png", dpi=120)


if __name__ == "__main__":
    main()
