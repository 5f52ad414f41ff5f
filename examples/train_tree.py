"""Train a small network on images of handwritten digits with NotifiedTree.

    mpirun -n 2 python examples/train_tree.py
    mpirun -n 4 --host node1:2,node2:2 python examples/train_tree.py

Gradients go up a tree while the backward pass makes them, and each layer's new weights come down
while the next forward pass is on its way: no rank ever waits in a collective (docs/tree.md). The
global batch is fixed, so the weights do not depend on the number of ranks, but for rounding.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import hsgd
import hsgd.world
from hsgd.optim import NotifiedTree


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training images")
    parser.add_argument("--global-batch", type=int, default=96, help="images per step, all ranks")
    parser.add_argument(
        "--target-accuracy", type=float, default=0.0, help="percent; less is an error"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hsgd.init()

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = images.float() / 16, labels.long()
    train, test = slice(0, 1437), slice(1437, None)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    optimizer = NotifiedTree(sgd, model, hsgd.world.comm())  # the line that makes it distributed

    begin = time.perf_counter()
    for epoch in range(options.epochs):
        order = torch.randperm(1437, generator=torch.Generator().manual_seed(epoch))
        for whole in order.split(options.global_batch)[:-1]:
            mine = whole[hsgd.rank() :: hsgd.size()]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[train][mine]), labels[train][mine])
            loss.backward()
            optimizer.step()  # returns at once; the next call of the model waits, layer by layer
    with torch.no_grad():
        right = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    if hsgd.rank() == 0:
        seconds = time.perf_counter() - begin
        print(f"{hsgd.size()} ranks: {100 * right:.2f}% of test images right, {seconds:.1f} s")
    optimizer.close()
    if 100 * right < options.target_accuracy:
        raise SystemExit(f"below {options.target_accuracy}%")


if __name__ == "__main__":
    main()
