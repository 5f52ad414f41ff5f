"""Ranks that gossip, all in one process: many seeds at once, with the triggers and topologies of
hsgd.optim themselves.

A step of all ranks is one batch of matrix products; then each rank, in a random order that is the
same for all candidates, asks its trigger, and pairs are averaged one after the other. So an
exchange has no delay here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsgd.optim.gossip.topology import Topology
from hsgd.optim.triggers.communication_triggers import Trigger

__all__ = ["SHARDS", "Case", "Outcome", "Way", "digits", "shards", "simulate"]

PIXELS, HIDDEN, CLASSES = 64, 64, 10
SIZES = (PIXELS * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES)
MODEL_BYTES = 4 * sum(SIZES)
SHARDS = ("dirichlet0.1", "two-classes", "same")
TRAIN = 1437  # images; the other 360 are for the test
HELD_OUT = 287  # of those, for the choice of learning rates


@dataclass(frozen=True)
class Case:
    """What is trained on."""

    shards: str
    ranks: int
    seeds: tuple[int, ...]
    steps: int
    batch: int = 16
    tuning: bool = False
    """Train on a part of the training images, and score on the rest of them."""


@dataclass(frozen=True)
class Way:
    """How ranks communicate. `trigger` makes the rule of a rank from its seed; None: never.

    synchronous: the mean of all gradients in every step. group_size: gradients are averaged in
    groups of so many ranks, and their first ranks gossip. wire: what weights travel as.
    average_every: the mean of all models after so many steps, again and again. final_average: once,
    at the end.
    """

    name: str
    trigger: Callable[[int], Trigger] | None = None
    topology: Any = "random"
    synchronous: bool = False
    group_size: int = 1
    wire: torch.dtype = torch.float32
    average_every: int | None = None
    final_average: bool = False


@dataclass
class Outcome:
    """By seed, of one candidate."""

    bytes: list[float]
    messages: list[float]
    single: list[float]  # accuracy of a rank's own model, mean over ranks, percent
    worst: list[float]
    mean_model: list[float]
    distance: list[float]  # root of the mean squared distance to the mean model, over its norm

    def averaged(self, case: Case) -> Outcome:
        """With the mean of all models at the end, which an allreduce makes."""
        more = _allreduce_bytes(case, 1)
        return replace(
            self,
            bytes=[sent + more for sent in self.bytes],
            single=self.mean_model,
            worst=self.mean_model,
            distance=[0.0] * len(self.distance),
        )


def simulate(case: Case, way: Way, lr: float) -> Outcome:
    """Train all seeds of the case; what a seed draws does not depend on `way`."""
    crowd = _Crowd(case)
    gossips = [_Gossip(case, way, seed, crowd.weights_of(n)) for n, seed in enumerate(case.seeds)]
    for step in range(1, case.steps + 1):
        rate = lr * (0.1 + 0.45 * (1 + math.cos(math.pi * step / case.steps)))
        crowd.step(step, rate, case.ranks if way.synchronous else way.group_size)
        if way.trigger is not None:
            for gossip in gossips:
                gossip.step(step, rate)
        if way.average_every is not None and step % way.average_every == 0:
            crowd.average()
    every = 1 if way.synchronous else way.average_every
    together = 0 if every is None else _allreduce_bytes(case, case.steps // every)
    accuracy = crowd.accuracies()
    outcome = Outcome(
        bytes=[float(g.bytes + together) for g in gossips],
        messages=[float(g.exchanges) for g in gossips],
        single=accuracy.mean(1).tolist(),
        worst=accuracy.amin(1).tolist(),
        mean_model=crowd.accuracy_of_means().tolist(),
        distance=crowd.distances().tolist(),
    )
    return outcome.averaged(case) if way.final_average else outcome


def _allreduce_bytes(case: Case, count: int) -> int:
    """What allreduces send at the least: 2 (p - 1) / p of the model from each rank."""
    return 2 * (case.ranks - 1) * MODEL_BYTES * count


class _Gossip:
    """The exchanges of one seed."""

    def __init__(self, case: Case, way: Way, seed: int, weights: Tensor) -> None:
        self._weights, self._way = weights, way
        self._ranks = range(0, case.ranks, way.group_size)
        self._random = np.random.default_rng([seed, 7])
        self._topology = Topology(way.topology, len(self._ranks), seed)
        self._turns = [0] * len(self._ranks)
        self.exchanges = self.bytes = 0
        self._rows = [[weights[rank]] for rank in self._ranks]
        self._triggers = []
        if way.trigger is not None:
            self._triggers = [way.trigger(1000 * seed + k) for k in range(len(self._ranks))]
            for trigger, row in zip(self._triggers, self._rows, strict=True):
                trigger.reset(row)

    def step(self, step: int, lr: float) -> None:
        paired: set[frozenset[int]] = set()
        touched: set[int] = set()
        for me in self._random.permutation(len(self._ranks)).tolist():
            if not self._triggers[me].step(step, self._rows[me], lr):
                continue
            peer = self._topology.choose(me, self._turns[me])
            self._turns[me] += 1
            if peer is None or frozenset((me, peer)) in paired:
                continue
            paired.add(frozenset((me, peer)))
            a, b = self._rows[me][0], self._rows[peer][0]
            half = (a.to(self._way.wire) - b).mul_(0.5).to(self._way.wire)
            a -= half
            b += half
            for rank in (me, peer):
                self._triggers[rank].reset(self._rows[rank])
            touched |= {me, peer}
            self.exchanges += 1
            self.bytes += 2 * MODEL_BYTES * self._way.wire.itemsize // 4
        if self._way.group_size > 1:
            for k in touched:  # the leader tells its group
                first = self._ranks[k]
                self._weights[first : first + self._way.group_size] = self._weights[first].clone()


class _Crowd:
    """Models of all ranks and seeds: row seed * ranks + rank of one matrix."""

    def __init__(self, case: Case) -> None:
        self._case = case
        images, labels, tests, answers = digits(case.tuning)
        self._images, self._labels, self._tests, self._answers = images, labels, tests, answers
        rows = len(case.seeds) * case.ranks
        self._order = torch.empty(case.steps, rows, case.batch, dtype=torch.int64)
        starts = []
        for n, seed in enumerate(case.seeds):
            draw = np.random.default_rng([seed, 1])
            inputs = (PIXELS, PIXELS, HIDDEN, HIDDEN)
            first = np.concatenate(
                [
                    draw.uniform(-1, 1, n) / math.sqrt(of)
                    for n, of in zip(SIZES, inputs, strict=True)
                ]
            )
            starts += [torch.tensor(first, dtype=torch.float32)] * case.ranks
            for rank, shard in enumerate(
                shards(case.shards, case.ranks, draw, labels.numpy(), case.batch)
            ):
                turns = math.ceil(case.steps * case.batch / len(shard))
                drawn = np.concatenate([draw.permutation(shard) for _ in range(turns)])
                drawn = drawn[: case.steps * case.batch].reshape(case.steps, case.batch)
                self._order[:, n * case.ranks + rank] = torch.from_numpy(drawn)
        self._weights = torch.stack(starts)
        self._gradient = torch.zeros_like(self._weights)
        self._layers, self._slopes = _layers(self._weights), _layers(self._gradient)

    def weights_of(self, seed_index: int) -> Tensor:
        """A row per rank, the memory itself."""
        first = seed_index * self._case.ranks
        return self._weights[first : first + self._case.ranks]

    def step(self, step: int, lr: float, group: int) -> None:
        """One SGD step of all; gradients are the means of groups of so many ranks."""
        chosen = self._order[step - 1]
        x, y = self._images[chosen], self._labels[chosen]
        w1, b1, w2, b2 = self._layers
        hidden = torch.baddbmm(b1, x, w1).relu_()
        outer = torch.baddbmm(b2, hidden, w2).softmax(2)
        outer.scatter_add_(2, y.unsqueeze(2), torch.full((*y.shape, 1), -1.0))
        outer.div_(self._case.batch)
        inner = torch.bmm(outer, w2.transpose(1, 2)).mul_(hidden > 0)
        s1, c1, s2, c2 = self._slopes
        torch.bmm(x.transpose(1, 2), inner, out=s1)
        torch.sum(inner, 1, keepdim=True, out=c1)
        torch.bmm(hidden.transpose(1, 2), outer, out=s2)
        torch.sum(outer, 1, keepdim=True, out=c2)
        if group > 1:
            parts = self._gradient.view(-1, group, self._gradient.shape[1])
            parts.copy_(parts.mean(1, keepdim=True).expand_as(parts))
        self._weights.add_(self._gradient, alpha=-lr)

    def average(self) -> None:
        """Make the models of a seed their mean."""
        models = self._by_seed()
        models.copy_(models.mean(1, keepdim=True).expand_as(models))

    def accuracies(self) -> Tensor:
        """Of each seed and rank, percent."""
        return self._score(self._weights).view(-1, self._case.ranks)

    def accuracy_of_means(self) -> Tensor:
        """Of each seed's mean model, percent."""
        return self._score(self._by_seed().mean(1))

    def distances(self) -> Tensor:
        """Of each seed: root mean square distance to the mean model, over its norm."""
        mean = self._by_seed().mean(1, keepdim=True)
        squares = (self._by_seed() - mean).square().sum(2).mean(1)
        return squares.sqrt() / mean.norm(dim=2).squeeze(1)

    def _by_seed(self) -> Tensor:
        return self._weights.view(len(self._case.seeds), self._case.ranks, -1)

    def _score(self, weights: Tensor) -> Tensor:
        w1, b1, w2, b2 = _layers(weights)
        hidden = (self._tests @ w1 + b1).relu_()
        return (hidden @ w2 + b2).argmax(2).eq(self._answers).float().mean(1) * 100


def _layers(weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w1, b1, w2, b2 = weights.split(SIZES, 1)
    rows = len(weights)
    return (
        w1.view(rows, PIXELS, HIDDEN),
        b1.view(rows, 1, HIDDEN),
        w2.view(rows, HIDDEN, CLASSES),
        b2.view(rows, 1, CLASSES),
    )


@functools.cache
def digits(tuning: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training, and for the test; for `tuning` no test image is in either."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(images[order] / 16, dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    first, last = (TRAIN - HELD_OUT, TRAIN) if tuning else (TRAIN, len(y))
    return x[:first], y[:first], x[first:last], y[first:last]


def shards(
    kind: str, ranks: int, draw: np.random.Generator, labels: np.ndarray, least: int = 16
) -> list[np.ndarray]:
    """The images of each rank, by number; nobody has less than `least`."""
    if kind == "same":
        return [np.sort(part) for part in np.array_split(draw.permutation(len(labels)), ranks)]
    by_class = [draw.permutation(np.flatnonzero(labels == c)) for c in range(CLASSES)]
    parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    if kind == "two-classes":
        # As McMahan et al.: two pieces each of the images in the order of their labels.
        pieces = np.array_split(np.concatenate(by_class), 2 * ranks)
        dealt = draw.permutation(2 * ranks).reshape(ranks, 2)
        parts = [[pieces[k] for k in two] for two in dealt]
    else:
        while True:  # until nobody has less than a batch
            shares = draw.dirichlet([0.1] * ranks, CLASSES)
            cuts = [
                (np.cumsum(s)[:-1] * len(i)).astype(int)
                for s, i in zip(shares, by_class, strict=True)
            ]
            split = [np.split(images, cut) for images, cut in zip(by_class, cuts, strict=True)]
            parts = [[s[rank] for s in split] for rank in range(ranks)]
            if min(sum(map(len, part)) for part in parts) >= least:
                break
    return [np.sort(np.concatenate(part)) for part in parts]
