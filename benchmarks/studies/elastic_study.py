"""The ranks of the part "study" of elastic.py: accuracy on digits of workers that exchange with a
centre, of synchronous training and of none, at equal epochs.

What averages is ElasticAveraging itself, on as many processes as there are workers. A process
trains a few rows at once, each a network of its own with its own seed or learning rate: all that is
done to weights is done value by value, so that rows have nothing to do with one another, but for
the order in which workers exchange.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hsgd import Comm
from hsgd.optim import ElasticAveraging
from studies.gossip_simulation import CLASSES, HIDDEN, PIXELS, TRAIN, digits

__all__ = ["best_rate", "study"]

RATES_TO_TRY = (0.1, 0.2, 0.4, 0.8, 1.6)  # and beyond, where the best lies at their border
LEAST_RATE, MOST_RATE = 0.003, 13.0
TUNING_SEEDS = (1_000_001, 1_000_002, 1_000_003, 1_000_004)  # of no run that counts
ROWS = 5  # at once
BATCH = 16
GROUP = 2  # ranks, of hybrid
PULL = 0.9
ELASTIC: dict[str, dict[str, Any]] = {
    "async": {"mode": "async"},
    "hybrid": {"mode": "hybrid", "group_size": GROUP},
    "async-pull": {"mode": "async", "pull_rate": PULL},
    "hybrid-pull": {"mode": "hybrid", "group_size": GROUP, "pull_rate": PULL},
}
METHODS = ("sync", "none", *ELASTIC)


class Row(NamedTuple):
    """One network of each worker."""

    seed: int
    lr: float


class Outcome(NamedTuple):
    """Of a row: percent of images that the mean model and the worst worker's get right."""

    mean_model: float
    worst_model: float


class Shard(NamedTuple):
    """What a worker learns from, and what all are judged by."""

    images: Tensor
    labels: Tensor
    test: Tensor
    wanted: Tensor


def shard_of(comm: Comm, *, skew: bool, tuning: bool) -> Shard:
    """For `tuning` no test image is in it: a part of the others is what is judged by."""
    images, labels, test, wanted = digits(tuning)
    order = labels.argsort(stable=True) if skew else torch.arange(len(labels))
    mine = order.tensor_split(comm.size)[comm.rank] if skew else order[comm.rank :: comm.size]
    return Shard(images[mine], labels[mine], test, wanted)


class Networks:
    """64-64-10 for each row: equal on all ranks at the beginning."""

    def __init__(self, rows: Sequence[Row]) -> None:
        bound1, bound2 = 1 / math.sqrt(PIXELS), 1 / math.sqrt(HIDDEN)
        shapes = (((PIXELS, HIDDEN), bound1), ((1, HIDDEN), bound1))
        shapes += (((HIDDEN, CLASSES), bound2), ((1, CLASSES), bound2))
        drawn: list[list[Tensor]] = [[] for _ in shapes]
        for row in rows:
            draw = torch.Generator().manual_seed(row.seed)
            for found, (shape, bound) in zip(drawn, shapes, strict=True):
                found.append(torch.empty(shape).uniform_(-bound, bound, generator=draw))
        self.parameters = [nn.Parameter(torch.stack(found)) for found in drawn]

    def __call__(self, images: Tensor) -> Tensor:
        """Images: rows x batch x pixels, or 1 x batch x pixels for all rows."""
        w1, b1, w2, b2 = self.parameters
        images = images.expand(len(w1), -1, -1)
        return torch.baddbmm(b2, torch.baddbmm(b1, images, w1).relu(), w2)

    def right(self, shard: Shard) -> np.ndarray[Any, Any]:
        """Percent, by row."""
        with torch.no_grad():
            hits = self(shard.test[None]).argmax(2) == shard.wanted
        return 100 * hits.double().mean(1).numpy()


class Study:
    """What all runs of a job have in common."""

    def __init__(self, comm: Comm, options: Any) -> None:
        self.comm, self.options = comm, options
        self.told: dict[str, list[float]] = {}

    def train(self, method: str, rows: Sequence[Row], *, tuning: bool) -> list[Outcome]:
        """Collective. A row's learning rate is a factor of its loss, which for SGD is the same."""
        comm, options = self.comm, self.options
        shard = shard_of(comm, skew=options.skew, tuning=tuning)
        networks = Networks(rows)
        sgd = torch.optim.SGD(networks.parameters, lr=1.0)
        optimizer: Any = sgd
        if method in ELASTIC:
            optimizer = ElasticAveraging(sgd, networks.parameters, comm, **ELASTIC[method])
        steps = options.epochs * TRAIN // comm.size // BATCH
        rates = torch.tensor([row.lr for row in rows])
        pace_s = options.pace_ms / 1e3 if method in ELASTIC else 0.0
        comm.barrier()
        begin = time.perf_counter()
        for step, chosen in enumerate(self._draws(rows, steps, len(shard.labels))):
            end = time.perf_counter() + pace_s
            # Along a cosine to a tenth, for all methods.
            factor = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
            sgd.param_groups[0]["lr"] = factor
            optimizer.zero_grad()
            output = networks(shard.images[chosen])
            losses = functional.cross_entropy(
                output.flatten(0, 1), shard.labels[chosen].flatten(), reduction="none"
            )
            (losses.view(chosen.shape).mean(1) * rates).sum().backward()
            if method == "sync":
                self._average([p.grad for p in networks.parameters])
            optimizer.step()
            time.sleep(max(0.0, end - time.perf_counter()))
        if method in ELASTIC:
            self._note(optimizer, time.perf_counter() - begin)
        return self._score(networks, optimizer, shard)

    def _draws(self, rows: Sequence[Row], steps: int, images: int) -> Iterator[Tensor]:
        """The images of each step, rows x batch; the same for all methods and learning rates."""
        draws = [torch.Generator().manual_seed(1000 * r.seed + self.comm.rank) for r in rows]
        size = (steps, BATCH)
        chosen = torch.stack([torch.randint(images, size, generator=draw) for draw in draws])
        yield from chosen.unbind(1)

    def _average(self, tensors: Sequence[Tensor | None]) -> None:
        found = [tensor for tensor in tensors if tensor is not None]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in found])
        self.comm.allreduce(flat, "mean", out=flat)
        parts = flat.split([tensor.numel() for tensor in found])
        with torch.no_grad():
            for tensor, part in zip(found, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _note(self, optimizer: Any, took_s: float) -> None:
        """How unequal the workers' speeds were, and how much others had changed meanwhile."""
        optimizer.finish_push()
        late = optimizer.metrics().staleness
        sums = np.array([sum(n * count for n, count in late.items()), sum(late.values())], float)
        pushes = self.comm.allreduce(sums)
        slowest, fastest = (
            float(self.comm.allreduce(np.array([took_s]), how)[0]) for how in ("max", "min")
        )
        self.told.setdefault("staleness", []).append(float(pushes[0] / pushes[1]))
        self.told.setdefault("slowest_to_fastest", []).append(slowest / fastest)

    def _score(self, networks: Networks, optimizer: Any, shard: Shard) -> list[Outcome]:
        self.comm.barrier()
        worst = self.comm.allreduce(networks.right(shard), "min")
        self._average(networks.parameters)
        if hasattr(optimizer, "close"):
            optimizer.close()
        mean = networks.right(shard)
        return [Outcome(*pair) for pair in zip(mean.tolist(), worst.tolist(), strict=True)]

    def train_all(self, method: str, rows: Sequence[Row], *, tuning: bool) -> list[Outcome]:
        """A few rows after the other."""
        found = []
        for first in range(0, len(rows), ROWS):
            found += self.train(method, rows[first : first + ROWS], tuning=tuning)
        return found

    def best_rate_of(self, method: str) -> float:
        """For the mean model, on other seeds and images than those that count."""

        def scores(rates: Sequence[float]) -> list[float]:
            rows = [Row(seed, lr) for lr in rates for seed in TUNING_SEEDS]
            found = [outcome.mean_model for outcome in self.train_all(method, rows, tuning=True)]
            return np.array(found).reshape(len(rates), -1).mean(1).tolist()

        return best_rate(scores)


def best_rate(scores_of: Callable[[Sequence[float]], Sequence[float]]) -> float:
    """The learning rate of the highest score, with neighbours on both sides that are worse: of
    RATES_TO_TRY, then of half or twice the best as long as that is the least or the largest.
    """
    scores = dict(zip(RATES_TO_TRY, scores_of(RATES_TO_TRY), strict=True))
    while True:
        best = max(scores, key=lambda lr: scores[lr])
        beyond = best / 2 if best == min(scores) else 2 * best
        if best not in (min(scores), max(scores)) or not LEAST_RATE <= beyond <= MOST_RATE:
            return best
        (scores[beyond],) = scores_of([beyond])


def study(comm: Comm, options: Any) -> list[dict[str, Any]]:
    """All methods; collective."""
    methods = list(METHODS)
    if comm.size % GROUP:
        methods = [method for method in METHODS if "group_size" not in ELASTIC.get(method, {})]
    run, rows = Study(comm, options), []
    for method in methods:
        lr = options.lr or run.best_rate_of(method)
        run.told.clear()
        seeds = [Row(seed, lr) for seed in range(options.seeds)]
        found = run.train_all(method, seeds, tuning=False)
        rows.append(
            {
                "part": "study",
                "candidate": method,
                "shards": "label skew" if options.skew else "same distribution",
                "workers": comm.size,
                "lr": lr,
                "epochs": options.epochs,
                "mean_model": [outcome.mean_model for outcome in found],
                "worst_model": [outcome.worst_model for outcome in found],
                **{name: float(np.mean(told)) for name, told in run.told.items()},
            }
        )
    return rows
