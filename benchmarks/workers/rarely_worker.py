"""A rank of rarely.py.

Trains the same model on the same samples once for each way of communicating. The clock runs while
ranks train, not while the loss is taken. The loss is that of the model that the way would save:
outer weights, the centre, the mean of all models. Plan: task, seed, steps, batch, rate (of AdamW),
outer (learning rate and momentum of DiLoCo's outer steps), start (a file of rarely_pretraining, or
"scratch"), ways, and longer: so many times the steps other ways than synchronous training, which
comes first, may take; above 1 they end at its last loss.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hsgd.torch as hvd
from hsgd import Comm
from hsgd.config import Config
from hsgd.optim import DiLoCo
from tasks.training_task import TASKS, Batch, TrainingTask, loss_of
from workers.rarely_ways import BASE, EAGER, NEEDS_GLOO, OUTER, WAYS, as_saved
from workers.serving import meet, read_plan, write_result

__all__: list[str] = []

WARM_UP = 0.05  # of a training from scratch
LOOKS = 10  # of the loss, evenly over the training


@dataclass(frozen=True)
class _Training:
    """What all ways of a job have in common.

    longer: so many times the steps other ways than synchronous training may take. start: weights
    and AdamW's state to go on from.
    """

    task: TrainingTask
    seed: int
    steps: int
    longer: float
    batch: int
    rate: float
    start: dict[str, Any] | None

    def steps_of(self, way: str) -> int:
        return self.steps if way == BASE else round(self.steps * self.longer)

    def rate_at(self, step: int, steps: int) -> float:
        """A cosine down to a tenth, after a warm-up where nothing was trained before."""
        warm = max(1, int(WARM_UP * steps)) if self.start is None else 1
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        return self.rate * min(1.0, step / warm) * cosine

    def begin(self) -> tuple[nn.Module, torch.optim.AdamW]:
        net = self.task.model(self.seed)
        adamw = self.task.adamw(net)
        if self.start is not None:
            net.load_state_dict(self.start["model"])
            adamw.load_state_dict(copy.deepcopy(self.start["adamw"]))  # it keeps the tensors
        return net, adamw


def train(comm: Comm, training: _Training, way: str, target: float | None) -> dict[str, Any]:
    """One training; collective. Bytes are those of all ranks to other nodes. target: the loss at
    which it ends.
    """
    net, adamw = training.begin()
    steps = training.steps_of(way)
    optimizer = WAYS[way](adamw, net, comm, steps)
    forward = getattr(optimizer, "forward", net)
    generator = torch.Generator().manual_seed(1000 * training.seed + comm.rank)
    own = training.seed, comm.rank, comm.size
    held_out = training.task.held_out(comm.size)[comm.rank :: comm.size]
    looks = {
        training.steps * (look + 1) // LOOKS for look in range(math.ceil(LOOKS * training.longer))
    } | {steps}
    before, seconds, curve = _sent_bytes(), 0.0, []
    comm.barrier()
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = training.rate_at(step, steps)
        optimizer.zero_grad()
        given, classes = training.task.batch(*own, training.batch, generator)
        loss_of(forward(given), classes).backward()
        optimizer.step()
        if step not in looks:
            continue
        if way in EAGER:
            # An exchange that has just begun shall count, too: seconds are an upper bound then.
            optimizer.settle()
        seconds += time.perf_counter() - begin
        sent = _sent_bytes() - before  # without what the loss below costs
        with as_saved(optimizer):
            loss, right = _scores(net, held_out)
        numbers = np.array([[loss, right, seconds, float(sent) * (comm.local_rank == 0)]])
        every = comm.allgather(numbers)
        loss, right = every[:, :2].mean(0).tolist()
        curve.append([step, loss, float(every[:, 2].max()), float(every[:, 3].sum())])
        if target is not None and loss <= target:
            break
        before = _sent_bytes() - sent
        comm.barrier()
        begin = time.perf_counter()
    waited = optimizer.metrics().wait_s if isinstance(optimizer, DiLoCo) else math.nan
    if hasattr(optimizer, "close"):
        optimizer.close()
    return {
        "candidate": way,
        "seed": training.seed,
        "steps": curve[-1][0],
        "loss": round(curve[-1][1], 5),
        "accuracy": round(100 * right, 4),
        "seconds": round(curve[-1][2], 3),
        "sent_bytes": int(curve[-1][3]),
        "wait_s": None if math.isnan(waited) else round(waited, 4),
        "parameters": sum(p.numel() for p in net.parameters()),
        "curve": [[s, round(x, 5), round(t, 3), int(b)] for s, x, t, b in curve],
    }


def _scores(net: nn.Module, parts: list[Batch]) -> tuple[float, float]:
    """The loss, and the share of classes that are right."""
    with torch.no_grad():
        found = [(net(given), classes) for given, classes in parts]
    losses = [float(loss_of(*one)) for one in found]
    right = [float((outputs.argmax(-1) == classes).float().mean()) for outputs, classes in found]
    return float(np.mean(losses)), float(np.mean(right))


def _sent_bytes() -> int:
    """What this node's interfaces have sent, as the kernel counts, without the loopback."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            total += int(numbers.split()[8])
    return total


def main() -> None:
    torch.set_num_threads(1)
    plan = read_plan()
    OUTER.lr, OUTER.momentum = plan.outer
    with Comm(config=Config(timeout_s=120.0)) as comm:
        hvd.init(comm)
        if set(plan.ways) & set(NEEDS_GLOO):
            meet(comm)
        start = None if plan.start == "scratch" else torch.load(plan.start)
        numbers = (plan.seed, plan.steps, plan.longer, plan.batch, plan.rate)
        training = _Training(TASKS[plan.task](), *numbers, start)
        target, rows = None, []
        for way in plan.ways:
            rows.append(train(comm, training, way, None if way == BASE else target))
            if way == BASE and training.longer > 1:
                target = rows[-1]["loss"]
            if comm.rank == 0:  # what is there counts, should a later way fail
                write_result(rows)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        hvd.shutdown()


if __name__ == "__main__":
    main()
