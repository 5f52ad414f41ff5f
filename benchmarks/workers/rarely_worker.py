"""A rank of rarely.py: `python rank.py rarely_worker OUT SEED STEPS BATCH WAY...`, under mpirun.

Trains the same model on the same tokens once for each way of communicating. Rank 0 writes rows to
OUT. The clock runs while ranks train, not while the loss is taken. The loss is that of the model
that the way would save: outer weights, the centre, the mean of all models.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hsgd.torch as hvd
from hsgd import Comm
from hsgd.config import Config
from hsgd.optim import Budget, DiLoCo, ElasticAveraging, Gossip, Nesterov, TopK
from studies.character_model import CharacterModel, Text

__all__ = ["WAYS"]

RATE, WARM_UP = 2e-3, 0.05
LOOKS = 10  # of the loss, evenly over the training
Make = Callable[[Any, CharacterModel, Comm, int], Any]


def _diloco(**options: Any) -> Make:
    return lambda adamw, net, comm, steps: DiLoCo(adamw, net, comm, **options)


def _elastic(mode: Any) -> Make:
    return lambda adamw, net, comm, steps: ElasticAveraging(
        adamw, net, comm, mode, update_interval=10
    )


def _gossip(adamw: Any, net: CharacterModel, comm: Comm, steps: int) -> Gossip:
    return Gossip(
        adamw,
        net,
        comm,
        Budget(1 / 10, steps),
        "exponential2",
        compression="bfloat16",
        hierarchical=comm.cross_size < comm.size,
        patience_s=5.0,
    )


_MEAN = Nesterov(lr=1.0, momentum=0.0)
_STREAM = {"fragments": 4, "delay": 2, "alpha": 0.5}
_SPARSE = TopK(0.03, error_decay=0.95)
WAYS: dict[str, Make] = {
    "synchronous": lambda adamw, net, comm, steps: hvd.DistributedOptimizer(
        adamw, net.named_parameters()
    ),
    "local-sgd-30": _diloco(sync_every=30, outer=_MEAN),
    "diloco-10": _diloco(sync_every=10),
    "diloco-30": _diloco(sync_every=30),
    "diloco-100": _diloco(sync_every=100),
    "streaming-30": _diloco(sync_every=30, **_STREAM),
    "diloco-30-int8": _diloco(sync_every=30, compression="int8"),
    "diloco-30-topk": _diloco(sync_every=30, compression="topk"),
    "sparse-30": _diloco(sync_every=30, compression=_SPARSE, outer=_MEAN),
    "diloco-100-int8": _diloco(sync_every=100, compression="int8"),
    "easgd_async-10": _elastic("async"),
    "easgd_hybrid-10": _elastic("hybrid"),
    "gossip-10": _gossip,
}
"""Ways of communicating, by name. The number is the period in steps, "sparse" the form of
SparseLoCo, gossip's a Budget of 1/10 in bfloat16."""


@contextlib.contextmanager
def _as_saved(optimizer: Any) -> Any:
    """Within it the model is what the way would save; collective."""
    if isinstance(optimizer, DiLoCo):
        inner: Any = optimizer.at_outer_weights()
    elif isinstance(optimizer, ElasticAveraging):
        inner = optimizer.at_centre()
    elif isinstance(optimizer, Gossip):
        optimizer.settle()
        inner = optimizer.mean_model()
    else:
        inner = contextlib.nullcontext()
    with inner:
        yield


def train(comm: Comm, text: Text, way: str, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """One training; collective. Bytes are those of all ranks to other nodes."""
    net = CharacterModel(seed)
    adamw = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = WAYS[way](adamw, net, comm, steps)
    warm = max(1, int(WARM_UP * steps))
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    held_out = text.held_out_batches(8 * -(-comm.size // 8), 32)[comm.rank :: comm.size]
    looks = {steps * (look + 1) // LOOKS for look in range(LOOKS)}
    before, seconds, curve = _sent_bytes(), 0.0, []
    comm.barrier()
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / warm) * cosine
        optimizer.zero_grad()
        net.loss(text.batch(batch, generator)).backward()
        optimizer.step()
        if step not in looks:
            continue
        seconds += time.perf_counter() - begin
        sent = _sent_bytes() - before  # without what the loss below costs
        with _as_saved(optimizer), torch.no_grad():
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
    out, seed, steps, batch, *ways = sys.argv[1:]
    with Comm(config=Config(timeout_s=120.0)) as comm:
        hvd.init(comm)
        text = Text()
        rows = [train(comm, text, way, int(seed), int(steps), int(batch)) for way in ways]
        if comm.rank == 0:
            Path(out).write_text(json.dumps(rows))
        hvd.shutdown()


if __name__ == "__main__":
    main()
