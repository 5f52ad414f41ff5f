"""The ranks of ddp.py: times DDP's step over each backend, turn by turn. Plan: store (a file),
rounds, models.
"""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hsgd.c10d
from lars import MODELS, Shapes
from workers.serving import read_plan, write_result

__all__: list[str] = []

LIMIT = timedelta(seconds=60)


class _Given(torch.autograd.Function):
    """A function whose gradients are what somebody gave it."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


class _Model(torch.nn.Module):
    def __init__(self, shapes: Shapes, rank: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(rank)
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.gradients = [torch.randn(shape, generator=draw) for shape in shapes]

    def forward(self) -> torch.Tensor:
        result: torch.Tensor = _Given.apply(self.gradients, *self.weights)
        return result


class _Done(dist.Work):  # type: ignore[misc]
    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = LIMIT) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Nothing(dist.ProcessGroup):  # type: ignore[misc]
    """Collectives that send nothing and have ended when they begin."""

    def allreduce(self, tensors: Any, opts: Any = None) -> _Done:
        return _Done(tensors)

    broadcast = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Done:
        for parts, source in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(source)
        return _Done(outputs)


def _create_nothing(store: Any, rank: int, size: int, limit: timedelta) -> _Nothing:
    return _Nothing(rank, size)


def main() -> None:
    """Measure seconds of each step by model and candidate, of the slowest rank."""
    plan = read_plan()
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    rounds = plan.rounds
    torch.set_num_threads(1)
    hsgd.c10d.register()
    dist.Backend.register_backend("nothing", _create_nothing, devices="cpu")
    file = dist.FileStore(plan.store, size)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=size, timeout=LIMIT)
    groups: dict[str, Any] = {
        "hsgd": dist.new_group(backend="hsgd", timeout=LIMIT),
        "gloo": dist.group.WORLD,
        "nothing": dist.new_group(backend="nothing", timeout=LIMIT),
    }
    found: dict[str, Any] = {"seconds": {}, "failures": []}
    for name in plan.models:
        steps = {}
        for candidate, group in groups.items():
            model = DistributedDataParallel(
                _Model(MODELS[name](), rank), process_group=group, gradient_as_bucket_view=True
            )
            steps[candidate] = model
        seconds = torch.zeros(len(steps), rounds, dtype=torch.float64)
        order = list(enumerate(steps.values()))
        for turn in range(-3, rounds):  # DDP rebuilds its buckets after the first step
            random.Random(turn).shuffle(order)  # alike on all ranks
            for k, model in order:
                model.zero_grad()
                dist.barrier(groups["hsgd"])
                begin = time.perf_counter()
                model().backward()
                if turn >= 0:
                    seconds[k, turn] = time.perf_counter() - begin
        found["failures"] += _wrong(name, steps, size, groups["hsgd"])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found["seconds"][name] = dict(zip(steps, seconds.tolist(), strict=True))
        if rank == 0:  # model by model, for what an interrupted run has
            write_result(found)
    dist.destroy_process_group()


def _wrong(name: str, steps: dict[str, Any], size: int, group: Any) -> list[str]:
    """Candidates whose gradients are not the average, or differ between ranks."""
    lines = []
    for candidate in ("hsgd", "gloo"):
        for weight, own in zip(
            steps[candidate].module.weights, steps[candidate].module.gradients, strict=True
        ):
            everybody = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(everybody, own, group=group)
            results = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(results, weight.grad.contiguous(), group=group)
            mean = torch.stack(everybody).mean(0)
            same = all(torch.equal(result, results[0]) for result in results)
            if not same or not torch.allclose(results[0], mean, rtol=1e-5, atol=1e-6):
                lines.append(f"{name}: wrong gradients over {candidate}")
                break
    return lines


if __name__ == "__main__":
    main()
