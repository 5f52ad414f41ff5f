"""Classify JPEG images of any size with LARS: converted as they are, decoded by the loader.

    hsgd run -np 2 python examples/gallery/images_lars.py
    torchrun --standalone --nproc-per-node 2 examples/gallery/images_lars.py

The images are scikit-learn's digits, saved as photos/CLASS/NUMBER.jpg. Writes images_lars.png: a
batch as the loader gives it, and the accuracy by step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from hsgd.io import PartitionedLoader, convert_to_slabs, images
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import hsgd.torch as hvd
from hsgd.optim import LARS

SIDE, TESTED = 24, 297


def write_photos(folder: Path) -> None:
    """JPEG files of 40 x 40 to 71 x 71 pixels, a folder for each class."""
    pixels, labels = load_digits(return_X_y=True)
    for number, (values, label) in enumerate(zip(pixels, labels, strict=True)):
        part = "test" if number < TESTED else "train"
        place = folder / "photos" / part / str(label)
        place.mkdir(parents=True, exist_ok=True)
        photo = Image.fromarray((values.reshape(8, 8) * 15).astype("uint8")).convert("RGB")
        photo.resize((40 + number % 32,) * 2).save(place / f"{number}.jpg", quality=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of the plot")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))
    data = folder / "slabs"
    if hvd.rank() == 0:
        write_photos(folder)
        for part in ("train", "test"):
            convert_to_slabs(folder / "photos" / part, data / part, encoded=True, progress=False)
    hvd.barrier()
    layers = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, SIDE, SIDE))
    lars = LARS(model.parameters(), lr=2.0, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(lars, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    step, curve = 0, []
    crops = {"image": images(SIDE, "random", scale=(0.7, 1.0))}
    with PartitionedLoader(data / "train", 64, seed=1, drop_last=True, decode=crops) as loader:
        while step < options.steps:
            for found in loader:  # another order, and other crops, each epoch
                shown = found["image"][:16].clone()
                optimizer.zero_grad()
                logits = model(found["image"] / 255)
                functional.cross_entropy(logits, found["label"]).backward()
                optimizer.step()
                curve.append((logits.argmax(1) == found["label"]).float().mean())
                if (step := step + 1) == options.steps:
                    break
    middle = {"image": images(SIDE)}
    with PartitionedLoader(data / "test", 64, decode=middle) as loader, torch.no_grad():
        right = sum((model(t["image"] / 255).argmax(1) == t["label"]).sum() for t in loader)
    accuracy = hvd.allreduce(right.float(), op=hvd.Sum) / TESTED
    curve = hvd.allreduce(torch.stack(curve))
    if hvd.rank() == 0:
        print(f"{step} steps of {hvd.size() * 64} images with LARS: accuracy {accuracy:.1%}")
        plot(options.output, shown, curve)
    hvd.shutdown()


def plot(folder: Path, shown: Tensor, curve: Tensor) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = shown.permute(0, 2, 3, 1).unflatten(0, (-1, 4)).permute(0, 2, 1, 3, 4)
    left.imshow(rows.reshape(-1, 4 * SIDE, 3))
    left.set(title="random crops of a batch")
    right.plot(curve)
    right.set(title="accuracy by step")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "images_lars.png", dpi=120)


if __name__ == "__main__":
    main()
