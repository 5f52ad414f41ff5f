"""Train dense layers of 9 MB on images of handwritten digits: an ordinary Horovod script.

    mpirun -n 2 python examples/gain/train.py                         # plain Horovod
    HOROVOD_PLUGIN=hsgd-mpi mpirun -n 2 python examples/gain/train.py # its MPI calls through hsgd
    HOROVOD_PLUGIN=hsgd mpirun -n 2 python examples/gain/train.py     # hsgd.torch in its place

compare.py beside it runs all three in turns. After training, blocks of steps are timed, in turns
with blocks of the same steps without communication.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

TRAIN_IMAGES = 1437  # of 1797
GLOBAL_BATCH = 96
BLOCK = 5  # steps that are timed together
WARM_BLOCKS = 2


def build_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def train(
    step: Callable[[Tensor, Tensor], None], model: nn.Module, epochs: int
) -> list[dict[str, float]]:
    """Seconds of training and test accuracy after each epoch. Collective; equal on all ranks."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = images.float() / 16, labels.long()
    curve, seconds = [], 0.0
    for epoch in range(epochs):
        order = torch.randperm(TRAIN_IMAGES, generator=torch.Generator().manual_seed(epoch))
        hvd.barrier()
        begin = time.perf_counter()
        for batch in order.split(GLOBAL_BATCH)[:-1]:
            mine = batch[hvd.rank() :: hvd.size()]
            step(images[mine], labels[mine])
        seconds += time.perf_counter() - begin
        with torch.no_grad():
            right = model(images[TRAIN_IMAGES:]).argmax(1) == labels[TRAIN_IMAGES:]
        curve.append({"seconds": seconds, "accuracy": 100 * right.double().mean().item()})
    return curve


def timed_block(step: Callable[[Tensor, Tensor], None], images: Tensor, labels: Tensor) -> float:
    """Seconds per step of a few steps, the largest over the ranks. Collective."""
    hvd.barrier()
    begin = time.perf_counter()
    for _ in range(BLOCK):
        step(images, labels)
    return max(hvd.allgather_object((time.perf_counter() - begin) / BLOCK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training images")
    parser.add_argument("--blocks", type=int, default=8, help="of steps that are timed")
    parser.add_argument("--width", type=int, default=1500, help="of the two hidden layers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rank 0 writes its figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model, alone = build_model(options.width), build_model(options.width)
    alone_sgd = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # One group: gradients travel together, so that MPI adds them in the same order in each run.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), groups=1
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def together(images: Tensor, labels: Tensor) -> None:
        train_step(model, optimizer, images, labels)

    def by_itself(images: Tensor, labels: Tensor) -> None:
        train_step(alone, alone_sgd, images, labels)

    curve = train(together, model, options.epochs)
    batch = (
        torch.rand(GLOBAL_BATCH // hvd.size(), 64),
        torch.arange(GLOBAL_BATCH // hvd.size()) % 10,
    )
    pairs = [
        (timed_block(together, *batch), timed_block(by_itself, *batch))
        for _ in range(WARM_BLOCKS + options.blocks)
    ][WARM_BLOCKS:]
    if hvd.rank() == 0:
        size = sum(parameter.numel() * 4 for parameter in model.parameters())
        found = {"ranks": hvd.size(), "bytes": size, "curve": curve, "pairs_s": pairs}
        if options.json:
            options.json.write_text(json.dumps(found))
        print(f"{hvd.size()} ranks, {size / 1e6:.1f} MB: {curve[-1]['accuracy']:.2f} % right")


if __name__ == "__main__":
    main()
