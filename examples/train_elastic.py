"""Train a small network on images of handwritten digits with ElasticAveraging.

    hsgd run -np 4 python examples/train_elastic.py
    hsgd run -np 4 python examples/train_elastic.py --skew --interval 4
    mpirun -n 4 --host node1:2,node2:2 python examples/train_elastic.py --mode hybrid

Training is asynchronous: each rank (or group of ranks) trains on its own images. A shared central
copy of the weights keeps the ranks from drifting apart (docs/elastic_averaging.md). With --skew a
rank sees only some of the ten digits: alone it would learn nothing of the others.
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
from hsgd.optim import ElasticAveraging


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mode", choices=("async", "hybrid"), default="async")
    parser.add_argument("--epochs", type=int, default=15, help="passes over a rank's images")
    parser.add_argument("--batch", type=int, default=16, help="images per step and rank")
    parser.add_argument("--interval", type=int, default=1, help="steps between two exchanges")
    parser.add_argument("--skew", action="store_true", help="give each rank some digits only")
    parser.add_argument(
        "--target-accuracy", type=float, default=0.0, help="percent; less is an error"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hsgd.init()
    rank, size = hsgd.rank(), hsgd.size()

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = images.float() / 16, labels.long()
    train, test = torch.arange(1437), torch.arange(1437, 1797)
    if options.skew:
        train = train[labels[train].argsort(stable=True)]
    mine = train.tensor_split(size)[rank] if options.skew else train[rank::size]
    steps = options.epochs * (1437 // size // options.batch)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    # The line that makes it distributed. The first rank that is done ends training for all.
    optimizer = ElasticAveraging(
        sgd,
        model,
        hsgd.world.comm(),
        options.mode,
        update_interval=options.interval,
        stop_rule="fastest",
        max_steps=steps,
    )

    begin = time.perf_counter()
    shuffled = torch.Generator().manual_seed(rank)
    while not optimizer.done:
        chosen = mine[torch.randint(len(mine), (options.batch,), generator=shuffled)]
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()  # waits for nobody

    optimizer.finish_push()
    hsgd.world.comm().barrier()  # until all have pushed their last
    with optimizer.at_centre(), torch.no_grad():  # all ranks, as groups do it together
        hits = model(images[test]).argmax(1) == labels[test]
    right = 100 * hits.float().mean().item()
    if rank == 0:
        metrics = optimizer.metrics()
        seconds = time.perf_counter() - begin
        print(
            f"{size} ranks, {optimizer.workers} workers: {right:.2f}% of test images right at the "
            f"centre, {metrics.steps} steps, {metrics.exchanges} exchanges, {seconds:.1f} s"
        )
    optimizer.close()
    if right < options.target_accuracy:
        raise SystemExit(f"below {options.target_accuracy}%")


if __name__ == "__main__":
    main()
