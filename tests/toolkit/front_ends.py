"""A program that enters a job by every front end in turn, whatever launcher started its ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

__all__ = ["FRONT_ENDS", "check_answers", "write_program"]

FRONT_ENDS = ("hvd", "strategy", "Comm", "hsgd.init", "backend hsgd", "backend gloo", "loader")
_PROGRAM = """
import json, os, sys, numpy as np, torch
import torch.distributed as dist
from torch import nn
import hsgd, hsgd.io
import hsgd.torch as hvd
from hsgd.world import comm

torch.set_num_threads(1)

def trained(make):
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer, forward = make(model)
    for step in range(3):
        optimizer.zero_grad()
        forward(torch.full((2, 3), step + 1.0)).sum().backward()
        optimizer.step()
    return round(model.weight.sum().item(), 4)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)

def by_hvd(**options):
    def make(model):
        named = model.named_parameters()
        return hvd.DistributedOptimizer(sgd(model), named_parameters=named, **options), model
    hvd.init()
    try:
        size, value = hvd.size(), trained(make)
        if options:
            value = "its own"  # ranks of gossip train apart
        # The others work inside of an elastic job after this.
        inner = by_comm() if "HSGD_AGENT_FD" in os.environ else [size, 0]
        return [size, value if inner[0] == size else inner]
    finally:
        hvd.shutdown()

def by_comm():
    with hsgd.Comm() as one:
        return [one.size, float(one.allreduce(np.ones(3))[0])]

def by_init():
    hsgd.init()
    try:
        return [hsgd.size(), float(comm().allreduce(np.ones(3))[0])]
    finally:
        hsgd.shutdown()

def by_backend(name):
    dist.init_process_group(name)
    try:
        kind = type(dist.group.WORLD).__name__
        assert kind == {"hsgd": "HsgdProcessGroup", "gloo": "GlooGroup"}[name], kind
        ddp = lambda model: (sgd(model), nn.parallel.DistributedDataParallel(model))
        return [dist.get_world_size(), trained(ddp)]
    finally:
        dist.destroy_process_group()

def by_loader():
    loader = hsgd.io.PartitionedLoader(sys.argv[1], batch_size=2)
    return [len(loader), sum(int(row) for batch in loader for row in np.ravel(batch["x"]))]

ways = {
    "hvd": by_hvd,
    "strategy": lambda: by_hvd(strategy="gossip"),
    "Comm": by_comm,
    "hsgd.init": by_init,
    "backend hsgd": lambda: by_backend("hsgd"),
    "backend gloo": lambda: by_backend("gloo"),
    "loader": by_loader,
}
said = {}
for name in sys.argv[2].split(","):
    try:
        said[name] = ways[name]()
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
sys.stdout.write("|" + json.dumps(said) + "|\\n")
sys.stdout.flush()
"""


def write_program(folder: Path, front_ends: Sequence[str] = FRONT_ENDS) -> list[str]:
    """Write the program and 8 rows of data; return the script and its arguments."""
    import h5py

    with h5py.File(folder / "rows.h5", "w") as file:
        file["x"] = list(range(8))
    script = folder / "train.py"
    script.write_text(_PROGRAM)
    return [str(script), str(folder / "rows.h5"), ",".join(front_ends)]


def check_answers(text: str, front_ends: Sequence[str], size: int) -> None:
    """Fail unless all ranks entered one job by each front end, and got the same result there."""
    said = [json.loads(part) for part in text.split("|") if part.startswith("{")]
    assert len(said) == size, text
    for name in front_ends:
        found = [rank[name] for rank in said]
        assert all(isinstance(each, list) for each in found), (name, found)
        if name == "loader":
            assert [each[0] for each in found] == [8 // 2 // size] * size
            assert sum(each[1] for each in found) == sum(range(8))
        else:
            assert found == [found[0]] * size and found[0][0] == size, (name, found)
