"""ResNet-18 on images of handwritten digits: what train_horovod.py and train_ddp.py have in common.

Owns model, data, training and timing. A block of steps is timed in turns with a block of the same
steps of an equal model that exchanges nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

TRAIN_IMAGES = 1437  # of 1797; the others are the test
GLOBAL_BATCH = 48
BLOCK = 3  # steps that are timed together
WARM_BLOCKS = 1


class Ranks(Protocol):
    """What the timing asks of the library that connects the ranks."""

    rank: int
    size: int

    def barrier(self) -> None: ...
    def largest(self, seconds: float) -> float: ...


class Block(nn.Module):
    """Two convolutions and a shortcut (He et al., Deep Residual Learning, 2015)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3)
        self.shortcut = (
            nn.Identity() if inputs == outputs else convolution(inputs, outputs, 1, stride)
        )

    def forward(self, images: Tensor) -> Tensor:
        changed = self.second(functional.relu(self.first(images)))
        return functional.relu(changed + self.shortcut(images))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


def build_model() -> nn.Module:
    """Build ResNet-18 for small images: 11.2 million parameters, 44.7 MB of gradients."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
    first = [convolution(1, 64, 3), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*first, *blocks, *last)


def make_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    options: argparse.Namespace,
) -> list[dict[str, float]]:
    """Return seconds of training, test loss and accuracy after each epoch. Collective."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = images.float().reshape(-1, 1, 8, 8) / 16, labels.long()
    curve, seconds = [], 0.0
    for epoch in range(options.epochs):
        order = torch.randperm(options.images, generator=torch.Generator().manual_seed(epoch))
        ranks.barrier()
        begin = time.perf_counter()
        for batch in order[: len(order) // GLOBAL_BATCH * GLOBAL_BATCH].split(GLOBAL_BATCH):
            mine = batch[ranks.rank :: ranks.size]
            train_step(model, optimizer, images[mine], labels[mine])
        seconds += time.perf_counter() - begin
        model.eval()
        with torch.no_grad():
            scores = model(images[TRAIN_IMAGES:])
        right = scores.argmax(1) == labels[TRAIN_IMAGES:]
        model.train()
        curve.append(
            {
                "seconds": seconds,
                "loss": functional.cross_entropy(scores, labels[TRAIN_IMAGES:]).item(),
                "accuracy": 100 * right.double().mean().item(),
            }
        )
    return curve


def timed_block(step: Callable[[], None], ranks: Ranks) -> float:
    """Return the seconds per step of a few steps, the largest over the ranks. Collective."""
    ranks.barrier()
    begin = time.perf_counter()
    for _ in range(BLOCK):
        step()
    return ranks.largest((time.perf_counter() - begin) / BLOCK)


def image_count(text: str) -> int:
    """Return the number, from one batch to all images of the training. ValueError."""
    count = int(text)
    if not GLOBAL_BATCH <= count <= TRAIN_IMAGES:
        raise argparse.ArgumentTypeError(f"{count}: use {GLOBAL_BATCH} to {TRAIN_IMAGES}")
    return count


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training images")
    parser.add_argument("--images", type=image_count, default=TRAIN_IMAGES, help="of an epoch")
    parser.add_argument("--blocks", type=int, default=4, help="of steps that are timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rank 0 writes its figures there")


def run(
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> None:
    """Train, time blocks, and write the figures. Collective."""
    alone = build_model()
    alone_sgd = make_sgd(alone)
    curve = train(model, optimizer, ranks, options)
    count = GLOBAL_BATCH // ranks.size
    batch = (torch.rand(count, 1, 8, 8), torch.arange(count) % 10)
    pairs = [
        (
            timed_block(lambda: train_step(model, optimizer, *batch), ranks),
            timed_block(lambda: train_step(alone, alone_sgd, *batch), ranks),
        )
        for _ in range(WARM_BLOCKS + options.blocks)
    ][WARM_BLOCKS:]
    if ranks.rank == 0:
        size = sum(parameter.numel() * 4 for parameter in model.parameters())
        found: dict[str, Any] = {"ranks": ranks.size, "bytes": size}
        found |= {"curve": curve, "pairs_s": pairs}
        if options.json:
            options.json.write_text(json.dumps(found))
        print(f"{ranks.size} ranks, {size / 1e6:.1f} MB: {curve[-1]['accuracy']:.2f} % right")
