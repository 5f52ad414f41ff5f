"""When a device computes and when it copies in one step of a DistributedOptimizer.

Owns the model of that step, and which kinds of work torch's profiler has seen. Never draws.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hsgd import Comm

__all__ = ["lane_of", "traced_step"]

LAYERS, WIDTH, ROWS = 12, 2048, 8192  # 16 MiB of gradients in each layer
SMALL = (4, 64, 32)


def traced_step(comm: Comm, device: torch.device) -> list[dict[str, Any]]:
    """What rank 0's device did in one step, as {"lane", "begin_ms", "ms", "name"}; collective."""
    import hsgd.torch as hvd

    layers, width, count = (LAYERS, WIDTH, ROWS) if device.type == "cuda" else SMALL
    hvd.init(comm)
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*parts).to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), bucket_cap_mb=16)
    rows = torch.randn(count, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    comm.barrier()
    with profile(activities=activities) as seen:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    comm.barrier()
    hvd.shutdown()
    return _lanes(events)


def lane_of(event: Mapping[str, Any]) -> str | None:
    """ "compute", "down" or "up"; None for what is no work of the device."""
    name, kind = str(event.get("name", "")), event.get("cat")
    if kind == "gpu_memcpy":
        if "DtoH" in name:
            return "down"
        return "up" if "HtoD" in name else "compute"
    if kind == "kernel" and "nccl" not in name.lower():
        return "compute"
    # In host memory, where nothing is copied: so that the rest can be tried out.
    return "compute" if kind == "cpu_op" and name in ("aten::addmm", "aten::mm") else None


def _lanes(events: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = [(lane_of(event), event) for event in events if event.get("ph") == "X"]
    on_device = any(event.get("cat") in ("kernel", "gpu_memcpy") for _, event in found)
    kept = [
        (lane, event)
        for lane, event in found
        if lane and (event.get("cat") != "cpu_op" or not on_device)
    ]
    start = min((float(event["ts"]) for _, event in kept), default=0.0)
    return [
        {
            "lane": lane,
            "begin_ms": round((float(event["ts"]) - start) / 1e3, 4),
            "ms": round(float(event["dur"]) / 1e3, 4),
            "name": str(event["name"])[:60],
        }
        for lane, event in kept
    ]
