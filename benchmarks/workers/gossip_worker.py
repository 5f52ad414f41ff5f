"""A rank of gossip_links.py. Plan: target, steps, ways.

Trains one model after the other, one per way, until the mean accuracy of the ranks' own models
reaches the target, in percent, or for so many steps. The clock runs
while ranks train and wait, not while accuracies are measured.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hsgd import Comm
from hsgd.config import Config
from hsgd.optim import Budget, FixedPeriod, Gossip, RelativeChange
from studies.gossip_simulation import digits, shards
from workers.serving import read_plan, write_result

__all__ = ["WAYS"]

WIDTH, LR = 1600, 0.2
LOOK_EVERY = 10  # steps: coprime to the periods, so as to see models at all distances from one
PATIENCE_S = 5.0
WAYS = {
    "synchronous": None,
    "every-step": lambda steps: FixedPeriod(1),
    "every-step-bf16": lambda steps: FixedPeriod(1),
    "every-step-no-wait": lambda steps: FixedPeriod(1),
    "fixed-6": lambda steps: FixedPeriod(6),
    "fixed-6-bf16": lambda steps: FixedPeriod(6),
    "fixed-13": lambda steps: FixedPeriod(13),
    "change": lambda steps: RelativeChange(0.1),
    "budget-6.5": lambda steps: Budget(2 / 13, steps, reserve=4),
    "budget-6.5-bf16": lambda steps: Budget(2 / 13, steps, reserve=4),
    "budget-13": lambda steps: Budget(1 / 13, steps, reserve=4),
    "budget-13-bf16": lambda steps: Budget(1 / 13, steps, reserve=4),
}
"""Triggers by name; "-bf16" sends 16 bits, "-no-wait" goes on without the answer."""


def train(comm: Comm, way: str, target: float, steps: int) -> dict[str, Any]:
    """Seconds, bytes and steps until the target; collective."""
    images, labels, tests, answers = digits()
    part = shards("two-classes", comm.size, np.random.default_rng(5), labels.numpy())[comm.rank]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    sgd = torch.optim.SGD(net.parameters(), lr=LR)
    make = WAYS[way]
    gossip = None
    if make is not None:
        patience_s = 0.0 if way.endswith("no-wait") else PATIENCE_S
        gossip = Gossip(
            sgd,
            net.parameters(),
            comm,
            make(steps),
            "exponential2",
            patience_s=patience_s,
            compression="bfloat16" if way.endswith("-bf16") else None,
        )
    draw = torch.Generator().manual_seed(comm.rank)
    seconds, curve, reached = 0.0, [], None
    before = comm.metrics().inter_bytes_sent
    comm.barrier()
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        batch = torch.from_numpy(part)[torch.randint(len(part), (16,), generator=draw)]
        net.zero_grad()
        functional.cross_entropy(net(images[batch]), labels[batch]).backward()
        if gossip is not None:
            gossip.step()
        else:
            for parameter in net.parameters():
                assert parameter.grad is not None
                comm.allreduce(parameter.grad, "mean", out=parameter.grad)
            sgd.step()
        if step % LOOK_EVERY:
            continue
        if gossip is not None:
            gossip.settle()
        seconds += time.perf_counter() - begin
        with torch.no_grad():
            right = float(net(tests).argmax(1).eq(answers).float().mean()) * 100
        every = comm.allgather(np.array([[seconds, right]]))
        curve.append([step, float(every[:, 0].max()), float(every[:, 1].mean())])
        if curve[-1][2] >= target:
            reached = curve[-1]
            break
        comm.barrier()
        begin = time.perf_counter()
    sent = comm.metrics().inter_bytes_sent - before
    if gossip is not None:
        sent = gossip.metrics().remote_bytes
        gossip.close()
    total = int(comm.allreduce(np.array([sent], np.int64))[0])
    return {
        "way": way,
        "reached": reached is not None,
        "steps": curve[-1][0],
        "seconds": curve[-1][1],
        "accuracy": curve[-1][2],
        "mbytes": total / 1e6,
        "model_bytes": 4 * sum(p.numel() for p in net.parameters()),
        "curve": curve,
    }


def main() -> None:
    torch.set_num_threads(1)
    plan = read_plan()
    with Comm(config=Config(timeout_s=60.0)) as comm:
        reports = [train(comm, name, plan.target, plan.steps) for name in plan.ways]
        if comm.rank == 0:
            write_result(reports)


if __name__ == "__main__":
    main()
