"""A rank of rarely.py, by mpirun:
`python rank.py rarely_worker OUT SEED STEPS BATCH RATE LR MOMENTUM START WAY...`.

Trains the same model on the same tokens once for each way of communicating. Rank 0 writes rows to
OUT. The clock runs while ranks train, not while the loss is taken. The loss is that of the model
that the way would save: outer weights, the centre, the mean of all models. RATE: of AdamW. LR,
MOMENTUM: of DiLoCo's outer steps. START: a file of rarely_pretraining, or "scratch".
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import hsgd.torch as hvd
from hsgd import Comm
from hsgd.config import Config
from hsgd.optim import DiLoCo
from studies.character_model import RATE, CharacterModel, Text, adamw_of
from workers.rarely_ways import NEEDS_GLOO, OUTER, WAYS, as_saved, meet

__all__: list[str] = []

WARM_UP = 0.05  # of a training from scratch
LOOKS = 10  # of the loss, evenly over the training


class _Schedule:
    """A cosine from `rate` down to a tenth, after a warm-up where nothing was trained before."""

    def __init__(self, steps: int, rate: float, warm: int) -> None:
        self._steps, self._rate, self._warm = steps, rate, warm

    def rate(self, step: int) -> float:
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / self._steps)
        return self._rate * min(1.0, step / self._warm) * cosine


def train(
    comm: Comm,
    text: Text,
    way: str,
    seed: int,
    steps: int,
    batch: int,
    rate: float,
    start: dict[str, Any] | None,
) -> dict[str, Any]:
    """One training; collective. Bytes are those of all ranks to other nodes. rate: after
    pre-training.
    """
    net = CharacterModel(seed)
    adamw = adamw_of(net)
    if start is not None:
        net.load_state_dict(start["model"])
        adamw.load_state_dict(copy.deepcopy(start["adamw"]))  # it keeps the tensors
    optimizer = WAYS[way](adamw, net, comm, steps)
    forward = getattr(optimizer, "forward", net)
    warm = max(1, int(WARM_UP * steps)) if start is None else 1
    schedule = _Schedule(steps, RATE if start is None else rate, warm)
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    held_out = text.held_out_batches(8 * -(-comm.size // 8), 16)[comm.rank :: comm.size]
    looks = {steps * (look + 1) // LOOKS for look in range(LOOKS)}
    before, seconds, curve = _sent_bytes(), 0.0, []
    comm.barrier()
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        optimizer.zero_grad()
        symbols, targets = text.batch(batch, generator)
        functional.cross_entropy(forward(symbols).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        if step not in looks:
            continue
        seconds += time.perf_counter() - begin
        sent = _sent_bytes() - before  # without what the loss below costs
        with as_saved(optimizer), torch.no_grad():
            loss = np.mean([float(net.loss(part)) for part in held_out])
        numbers = np.array([[loss, seconds, float(sent) * (comm.local_rank == 0)]])
        every = comm.allgather(numbers)
        curve.append([step, float(every[:, 0].mean()), float(every[:, 1].max()), every[:, 2].sum()])
        before = _sent_bytes() - sent
        comm.barrier()
        begin = time.perf_counter()
    waited = optimizer.metrics().wait_s if isinstance(optimizer, DiLoCo) else math.nan
    if hasattr(optimizer, "close"):
        optimizer.close()
    return {
        "candidate": way,
        "seed": seed,
        "steps": steps,
        "loss": round(curve[-1][1], 5),
        "seconds": round(curve[-1][2], 3),
        "sent_bytes": int(curve[-1][3]),
        "wait_s": None if math.isnan(waited) else round(waited, 4),
        "parameters": sum(p.numel() for p in net.parameters()),
        "curve": [[s, round(x, 5), round(t, 3), int(b)] for s, x, t, b in curve],
    }


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
    out, seed, steps, batch, rate, outer_lr, outer_momentum, start, *ways = sys.argv[1:]
    OUTER.lr, OUTER.momentum = float(outer_lr), float(outer_momentum)
    numbers = int(seed), int(steps), int(batch), float(rate)
    begin = None if start == "scratch" else torch.load(start)
    with Comm(config=Config(timeout_s=120.0)) as comm:
        hvd.init(comm)
        if set(ways) & set(NEEDS_GLOO):
            meet(comm, Path(out).with_suffix(".store"))
        text = Text()
        rows = []
        for way in ways:
            rows.append(train(comm, text, way, *numbers, begin))
            if comm.rank == 0:  # what is there counts, should a later way fail
                Path(out).write_text(json.dumps(rows))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        hvd.shutdown()


if __name__ == "__main__":
    main()
