"""A rank of benchmarks/training.py: makes steps with one way to communicate, and without.

Owns the timing of a step: from a barrier until its gradients are those of all ranks (for "cnn":
until the weights are updated). Serves `setup CASE`, `tune SECONDS`, `measure COUNT`, `weigh CASE`,
`release` and `end` (serving.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn

from harness import steps
from workers.serving import serve
from workers.training_limit import Link, Transfer

__all__: list[str] = []

WARM_STEPS = 3
TUNING_STEPS = 5  # between two looks at the clock
TUNED_STEPS = 20  # of one setting of Horovod's autotuner: it tries no more of them
WORLD = MPI.COMM_WORLD

Wrapped = tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer, Callable[[], None]]
"""What runs forward, what steps, and what ends a step without an update."""


class Way:
    """How gradients travel: not at all."""

    adds = False  # whether they become those of all ranks

    def start(self, folder: Path) -> None:
        """Collective."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return model, optimizer, lambda: None

    def tried(self) -> int:
        """How many settings it has tried out by itself."""
        return 0

    def choosing(self) -> bool:
        """Whether it still chooses, in its first steps, what it then stays with; alike on all
        ranks.
        """
        return False

    def end(self) -> None:
        """Collective."""


class ByHorovod(Way):
    """horovod.torch, with the plugin hsgd-mpi or without, or hsgd.torch."""

    adds = True

    def __init__(self, module: str, **options: Any) -> None:
        self._module = module
        self._options = options
        self._strategies: dict[int, str] = {}  # what was chosen, by the number of parameters
        self._made: Callable[[], Any] = lambda: None  # a weak reference: it holds the model
        self._count = 0

    def start(self, folder: Path) -> None:
        import importlib

        self._log = folder / "autotune.csv"
        os.environ["HOROVOD_AUTOTUNE_LOG"] = str(self._log)
        self._hvd = importlib.import_module(self._module)
        self._hvd.init()

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        self._hvd.broadcast_parameters(model.state_dict(), 0)
        self._count = sum(parameter.numel() for parameter in model.parameters())
        options = dict(self._options)
        if self._count in self._strategies:
            options["strategy"] = self._strategies[self._count]
        wrapped = self._hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        self._made = weakref.ref(wrapped)
        return model, wrapped, wrapped.synchronize

    def choosing(self) -> bool:
        """Until hsgd.torch knows whether gradients should travel during backward. Models that are
        made anew for each turn choose once.
        """
        choice = getattr(self._made(), "overlap_choice", None)
        if choice is None:
            return False
        if choice.steps_left == 0 and choice.during_s is not None:
            self._strategies[self._count] = "overlap" if choice.overlaps else "after_backward"
        return bool(choice.steps_left > 0)

    def tried(self) -> int:
        """Lines in the log of Horovod's autotuner, on the rank that writes it."""
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0

    def end(self) -> None:
        self._hvd.shutdown()


class ByGloo(Way):
    """DistributedDataParallel over gloo, as torch comes, with gradients as views of buckets; with
    ZeroRedundancyOptimizer or without.
    """

    adds = True

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def start(self, folder: Path) -> None:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/gloo-meeting",
            rank=WORLD.rank,
            world_size=WORLD.size,
        )

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self._zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            (group,) = optimizer.param_groups
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=type(optimizer), **options
            )
        return wrapped, optimizer, lambda: None

    def end(self) -> None:
        torch.distributed.destroy_process_group()


class ByLimit(Way):
    """Bytes that must be moved, without sums."""

    def start(self, folder: Path) -> None:
        self._link = Link(WORLD)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        transfer = Transfer(self._link, nbytes)

        def forward(batch: Tensor) -> Tensor:
            transfer.begin()
            output: Tensor = model(batch)
            return output

        optimizer.register_step_pre_hook(lambda *_: transfer.end())
        return forward, optimizer, transfer.end

    def end(self) -> None:
        self._link.close()


WAYS: dict[str, Callable[[], Way]] = {
    "horovod": lambda: ByHorovod("horovod.torch"),
    "hsgd": lambda: ByHorovod("hsgd.torch"),
    "hsgd-early": lambda: ByHorovod("hsgd.torch", strategy="overlap"),
    "hsgd-late": lambda: ByHorovod("hsgd.torch", strategy="after_backward"),
    "hsgd-node-shared": lambda: ByHorovod("hsgd.torch", node_shared=True),
    "ddp": ByGloo,
    "limit": ByLimit,
    "ddp-zero": lambda: ByGloo(zero=True),
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
        """Build, warm up, and check the gradients; seconds of a step of both kinds. Collective."""
        plain = self._make(case, Way())
        step = self._make(case, self._way)
        for _ in range(WARM_STEPS):
            plain()
            step()
        while self._way.choosing():
            step()
        begin = time.perf_counter()
        plain()
        step()
        self._steps = plain, step
        return {"both_s": time.perf_counter() - begin}

    def tune(self, seconds: str) -> dict[str, Any]:
        """Steps for a way that tunes itself, until it is done with that or `seconds` have passed.
        Collective.
        """
        assert self._steps is not None
        end_s = time.perf_counter() + float(seconds)
        steps = last = tried = 0
        while WORLD.bcast(time.perf_counter() < end_s and steps - last < TUNED_STEPS):
            for _ in range(TUNING_STEPS):
                self._steps[1]()
            steps += TUNING_STEPS
            if self._way.tried() > tried:
                tried, last = self._way.tried(), steps
        return {"steps": steps, "tried": tried}

    def _make(self, case: str, way: Way) -> Callable[[], None]:
        model, batch = steps.build(case, WORLD.rank, WORLD.size)
        updates = not isinstance(model, steps.Gradients) or (case in steps.UPDATES and way.adds)
        more: dict[str, Any] = {"momentum": 0.9, "fused": True} if case in steps.UPDATES else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **more)
        forward, stepper, finish = way.wrap(model, optimizer)

        def step() -> None:
            stepper.zero_grad()
            loss: Tensor = forward(batch)
            loss.backward()
            if updates:
                stepper.step()
            else:
                finish()

        if not isinstance(model, steps.Gradients):
            return step
        step()
        if updates:
            expected = -1e-3 * (WORLD.size + 1) / 2
            for number, weight in enumerate(model.weights):
                if not torch.allclose(weight, torch.full_like(weight, expected), rtol=1e-6):
                    raise RuntimeError(f"wrong result: parameter {number} is not {expected}")
        else:
            expected = (WORLD.size + 1) / 2 if way.adds else WORLD.rank + 1.0
            wrong = model.wrong(expected)
            if wrong is not None:
                raise RuntimeError(f"wrong result: {wrong}")
        return step

    def measure(self, count: str) -> dict[str, Any]:
        """Seconds of `count` steps of both kinds, in turn. Collective."""
        assert self._steps is not None
        found: list[list[float]] = [[], []]
        for _ in range(int(count)):
            for kind, step in enumerate(self._steps):
                WORLD.Barrier()
                begin = time.perf_counter()
                step()
                found[kind].append(time.perf_counter() - begin)
        return {"plain": found[0], "step": found[1]}

    def weigh(self, case: str) -> dict[str, Any]:
        """Resident bytes that this rank gains by a model that is trained. Collective."""
        WORLD.Barrier()
        before = resident_bytes()
        WORLD.Barrier()
        step = self._make(case, self._way)
        step()
        WORLD.Barrier()
        gained = resident_bytes() - before
        WORLD.Barrier()
        return {"bytes": gained}

    def release(self) -> dict[str, Any]:
        """Forget the models."""
        self._steps = None
        resident_bytes()  # gives back what they held
        return {}

    def end(self) -> dict[str, Any]:
        """Collective."""
        self._way.end()
        return {}


def resident_bytes() -> int:
    """Of this process, shared pages divided by those who share them, without what the C library
    keeps after free().
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main(way: str, address: str) -> None:
    """Serve the parent at `address`."""
    bench = Bench(way, Path(address).parent)
    serve(address, WORLD.rank, lambda verb, *words: getattr(bench, verb)(*words))


if __name__ == "__main__":
    main(*sys.argv[1:])
