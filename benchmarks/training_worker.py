"""A rank of benchmarks/training.py: makes steps with one way to communicate, and without.

Owns the timing of a step: from a barrier until its gradients are those of all ranks (for "cnn":
until the weights are updated). Never compares candidates.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn

import steps

__all__: list[str] = []

WARM_STEPS = 3
WORLD = MPI.COMM_WORLD


class Way:
    """How gradients travel: not at all."""

    def start(self, folder: Path) -> None:
        """Collective."""

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        """What runs forward, what steps, and what ends a step without an update."""
        return model, optimizer, lambda: None

    def end(self) -> None:
        """Collective."""


class ByHorovod(Way):
    """horovod.torch, with the plugin or without, or hsgd.torch."""

    def __init__(self, module: str) -> None:
        self._module = module

    def start(self, folder: Path) -> None:
        import importlib

        self._hvd = importlib.import_module(self._module)
        self._hvd.init()

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        self._hvd.broadcast_parameters(model.state_dict(), 0)
        made = self._hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return model, made, made.synchronize

    def end(self) -> None:
        self._hvd.shutdown()


class ByGloo(Way):
    """DistributedDataParallel over gloo, as torch comes, with gradients as views of buckets."""

    def start(self, folder: Path) -> None:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/gloo-meeting",
            rank=WORLD.rank,
            world_size=WORLD.size,
        )

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return wrapped, optimizer, lambda: None

    def end(self) -> None:
        torch.distributed.destroy_process_group()


WAYS: dict[str, Callable[[], Way]] = {
    "horovod": lambda: ByHorovod("horovod.torch"),
    "hsgd": lambda: ByHorovod("hsgd.torch"),
    "ddp": ByGloo,
}


class Bench:
    """Steps of one case, with communication and without."""

    def __init__(self, way: str, folder: Path) -> None:
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        torch.set_num_threads(threads)
        self._way = WAYS[way]()
        self._way.start(folder)
        self._steps: tuple[Callable[[], None], Callable[[], None]] | None = None

    def setup(self, case: str) -> dict[str, Any]:
        """Build, warm up, and check the gradients. Collective."""
        plain = self._make(case, Way())
        step = self._make(case, self._way)
        for _ in range(WARM_STEPS):
            plain()
            step()
        self._steps = plain, step
        return {}

    def _make(self, case: str, way: Way) -> Callable[[], None]:
        model, batch = steps.build(case, WORLD.rank, WORLD.size)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        forward, stepper, finish = way.wrap(model, optimizer)

        def step() -> None:
            stepper.zero_grad()
            loss: Tensor = forward(batch)
            loss.backward()
            if isinstance(model, steps.Gradients):
                finish()
            else:
                stepper.step()

        if isinstance(model, steps.Gradients):
            step()
            expected = WORLD.rank + 1.0 if type(way) is Way else (WORLD.size + 1) / 2
            wrong = model.wrong(expected)
            if wrong is not None:
                raise RuntimeError(f"wrong result: {wrong}")
        return step

    def measure(self, count: int) -> dict[str, Any]:
        """Seconds of `count` steps of both kinds, in turn. Collective."""
        assert self._steps is not None
        found: list[list[float]] = [[], []]
        for _ in range(count):
            for kind, step in enumerate(self._steps):
                WORLD.Barrier()
                begin = time.perf_counter()
                step()
                found[kind].append(time.perf_counter() - begin)
        return {"plain": found[0], "step": found[1]}

    def release(self) -> dict[str, Any]:
        """Forget the models."""
        self._steps = None
        return {}

    def end(self) -> dict[str, Any]:
        """Collective."""
        self._way.end()
        return {}


def obey(bench: Bench, verb: str, words: list[str]) -> dict[str, Any]:
    try:
        if verb == "setup":
            return bench.setup(words[0])
        if verb == "measure":
            return bench.measure(int(words[0]))
        return bench.release() if verb == "release" else bench.end()
    except Exception as error:  # the parent goes on with others
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def main(way: str, address: str) -> None:
    """Serve the parent at `address` until it says `end`, or is gone."""
    bench = Bench(way, Path(address).parent)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as lines:
            lines.write(f"{WORLD.rank}\n")
            lines.flush()
            for line in lines:
                verb, *words = line.split()
                with contextlib.suppress(BrokenPipeError):
                    lines.write(json.dumps(obey(bench, verb, words)) + "\n")
                    lines.flush()
                if verb == "end":
                    break


if __name__ == "__main__":
    main(*sys.argv[1:])
