"""Train a small network on images of handwritten digits with Gossip, each rank on its own digits.

    hsgd run -np 4 python examples/train_gossip.py
    mpirun -n 4 --host node1:2,node2:2 python examples/train_gossip.py --hierarchical

Each rank has images of a few digits only, and could learn no more from them. Ranks step on
their own gradients, and average their weights with one other now and then (docs/gossip.md).
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import hsgd
import hsgd.world
from hsgd.optim import Budget, Gossip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training images")
    parser.add_argument("--rate", type=float, default=0.25, help="averages per step")
    parser.add_argument("--patience", type=float, default=0.05, help="seconds to wait for a peer")
    parser.add_argument("--hierarchical", action="store_true", help="gossip between nodes only")
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
    by_label = labels[train].argsort(stable=True)
    mine = by_label.tensor_split(hsgd.size())[hsgd.rank()]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)
    steps = options.epochs * (1437 // hsgd.size() // 16)

    optimizer = Gossip(  # the statement that makes it distributed
        sgd,
        model.parameters(),
        hsgd.world.comm(),
        Budget(options.rate, steps),
        topology="exponential2",
        hierarchical=options.hierarchical,
        patience_s=options.patience,
    )

    for step in range(steps):
        batch = mine[torch.randint(len(mine), (16,))]
        optimizer.zero_grad()
        functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()  # waits for nobody
        sgd.param_groups[0]["lr"] = 0.3 * (1 - 0.9 * step / steps)
    optimizer.settle()

    def accuracy() -> float:
        with torch.no_grad():
            return 100 * (model(images[test]).argmax(1) == labels[test]).float().mean().item()

    scores, metrics = optimizer.compare(accuracy), optimizer.metrics()
    if hsgd.rank() == 0:
        print(
            f"{hsgd.size()} ranks: {scores.average:.1f}% of test images right, the worst rank "
            f"{scores.worst:.1f}%, the mean model {scores.mean_model:.1f}%; "
            f"{metrics.averaged} averages of rank 0 in {steps} steps"
        )
    optimizer.close()
    if scores.worst < options.target_accuracy:
        raise SystemExit(f"below {options.target_accuracy}%")


if __name__ == "__main__":
    main()
