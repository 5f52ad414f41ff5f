"""What torch's own code does over a process group, step by step, for the tests of its faults.

Owns the families: each makes a step that can be called again and again. And what a rank does in
place of its step. Never judges.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DEVIATIONS", "FAMILIES", "LOSSES", "SINGLE"]

Step = Callable[[], object]
SIZE = 2


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))


def _trained(model: nn.Module, outputs: Callable[[Any], Any] = lambda found: found) -> Step:
    def step() -> None:
        model.zero_grad()
        outputs(model(torch.ones(4, 64))).sum().backward()

    return step


def _ddp(hook: str = "", net: Callable[[], nn.Module] = _net, **options: Any) -> Step:
    model = DistributedDataParallel(net(), **options)
    if hook == "power":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook:
        model.register_comm_hook(None, getattr(default_hooks, f"{hook}_hook"))
    return _trained(model)


def _normed() -> nn.Module:
    return nn.Sequential(_net(), nn.BatchNorm1d(3))


def _fsdp() -> Step:
    model = _net()
    for layer in model:
        fully_shard(layer)
    return _trained(fully_shard(model))


def _functional(name: str, *options: Any, size: int = 12) -> Step:
    call = getattr(functional, name)
    return lambda: functional.wait_tensor(call(torch.ones(size), *options, dist.group.WORLD))


def _coalesced(name: str, *options: Any) -> Step:
    call = getattr(functional, name)

    def step() -> None:
        for each in call([torch.ones(12), torch.ones(4)], *options, dist.group.WORLD):
            functional.wait_tensor(each)

    return step


def _in_backward() -> Step:
    """A functional collective with a gradient of its own, which autograd's engine calls."""
    from torch.distributed.nn.functional import all_reduce

    def step() -> None:
        all_reduce(torch.ones(12, requires_grad=True)).sum().backward()

    return step


def _dtensor() -> Step:
    mesh = init_device_mesh("cpu", (SIZE,))
    sharded = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)])
    return lambda: (sharded @ sharded.redistribute(placements=[Replicate()]).t()).full_tensor()


FAMILIES: dict[str, Callable[[], Step]] = {
    "DDP": _ddp,
    "DDP, unused": partial(_ddp, find_unused_parameters=True),
    "DDP, static graph": partial(_ddp, static_graph=True),
    "DDP, views": partial(_ddp, gradient_as_bucket_view=True, bucket_cap_mb=0.001),
    "DDP, buffers": partial(_ddp, net=_normed),
    "hook allreduce": partial(_ddp, "allreduce"),
    "hook fp16": partial(_ddp, "fp16_compress", bucket_cap_mb=0.001),
    "hook PowerSGD": partial(_ddp, "power", bucket_cap_mb=0.001),
    "FSDP2": _fsdp,
    "all_reduce": partial(_functional, "all_reduce", "sum"),
    "all_gather": partial(_functional, "all_gather_tensor", 0),
    "reduce_scatter": partial(_functional, "reduce_scatter_tensor", "sum", 0),
    "all_to_all": partial(_functional, "all_to_all_single", None, None),
    "all_reduce coalesced": partial(_coalesced, "all_reduce_coalesced", "sum"),
    "all_gather coalesced": partial(_coalesced, "all_gather_into_tensor_coalesced"),
    "reduce_scatter coalesced": partial(
        _coalesced, "reduce_scatter_tensor_coalesced", "sum", [0, 0]
    ),
    "in backward": _in_backward,
    "DTensor": _dtensor,
}
# A step of these is one collective: ranks that differed in it are in step again.
SINGLE = {
    *("DDP", "DDP, static graph", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("all_reduce coalesced", "in backward"),
}

LOSSES: dict[str, Callable[[], object]] = {
    "exits": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
DEVIATIONS: dict[str, Callable[[], object]] = {
    "another shape": lambda: dist.all_reduce(torch.ones(4159)),
    "another dtype": lambda: dist.all_reduce(torch.ones(4160, dtype=torch.float64)),
    "another collective": lambda: dist.broadcast(torch.ones(12), 0),
    "a barrier": lambda: dist.barrier(),
}
