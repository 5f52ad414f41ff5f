"""The ranks of overlap.py: trains the same model under each candidate, turn by turn, and times it.

Checks that all came to the same weights. Plan: model, width, batch (0: one whose computation takes
about as long as the communication), rounds, steps, candidates.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn import functional

from hsgd import Comm
from hsgd.optim import NotifiedTree
from workers.serving import meet, read_plan, write_result

__all__: list[str] = []

CLASSES = 10
SAMPLE_S = 50e-6  # of a layer's forward pass without a core; the backward pass takes twice as long


def mlp(width: int) -> nn.Module:
    """20 linear layers of the same width."""
    layers: list[nn.Module] = []
    for _ in range(19):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Elsewhere(torch.autograd.Function):
    """Takes the time of a layer's computation, and no core, as an accelerator would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SAMPLE_S * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(2 * SAMPLE_S * len(grads[0]))
        return grads[0]


class Offloaded(nn.Module):
    """Follows a layer: its output is there after that time, and its gradient before it is not."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Elsewhere.apply(x)  # type: ignore[no-untyped-call]
        return result


def offloaded(width: int) -> nn.Module:
    """The same linear layers; nearly all of their time passes without a core of this machine."""
    layers: list[nn.Module] = []
    for layer in mlp(width):
        layers += [layer, Offloaded()] if isinstance(layer, nn.Linear) else [layer]
    return nn.Sequential(*layers)


def cnn(width: int) -> nn.Module:
    """Six convolutions on 8 x 8 images and two linear layers."""
    layers: list[nn.Module] = [nn.Unflatten(1, (-1, 8, 8)), nn.LazyConv2d(width, 3, padding=1)]
    for _ in range(5):
        layers += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    layers += [nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * width, 2 * width), nn.Linear(2 * width, CLASSES))


MODELS: dict[str, Callable[[int], nn.Module]] = {"mlp": mlp, "cnn": cnn, "offloaded": offloaded}


class Candidate:
    """Trains its own copy of the model. This one alone, without other ranks."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self.model, self.comm = copy.deepcopy(model), comm
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.call: nn.Module = self.model

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        functional.cross_entropy(self.call(x), y).backward()
        self.optimizer.step()

    def finish(self) -> None:
        """The weights of the last step are here."""

    def close(self) -> None:
        """End what runs beside the program."""


class TwoLevel(Candidate):
    """hsgd.torch's DistributedOptimizer: buckets, and a two-level allreduce of each."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        super().__init__(model, comm)
        import hsgd.torch as hvd

        hvd.init()
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, named_parameters=self.model.named_parameters()
        )
        self.end = hvd.shutdown

    def close(self) -> None:
        self.end()


class Tree(Candidate):
    """NotifiedTree; a step ends when its weights are here."""

    def __init__(self, model: nn.Module, comm: Comm, **options: Any) -> None:
        super().__init__(model, comm)
        self.optimizer = NotifiedTree(self.optimizer, self.model, comm, **options)

    def finish(self) -> None:
        self.optimizer.wait()

    def close(self) -> None:
        self.optimizer.close()


class Ddp(Candidate):
    """torch's DistributedDataParallel over gloo."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        super().__init__(model, comm)
        meet(comm)
        self.call = nn.parallel.DistributedDataParallel(self.model)


class Horovod(Candidate):
    """Plain Horovod over MPI."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        super().__init__(model, comm)
        import horovod.torch as hvd

        hvd.init()
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, named_parameters=self.model.named_parameters()
        )

    def step(self, x: Tensor, y: Tensor) -> None:
        for parameter in self.model.parameters():  # its own zero_grad does not know newer torch
            parameter.grad = None
        functional.cross_entropy(self.call(x), y).backward()
        self.optimizer.step()


CANDIDATES: dict[str, Callable[[nn.Module, Comm], Candidate]] = {
    "compute": Candidate,
    "ddp": Ddp,
    "horovod": Horovod,
    "two_level": TwoLevel,
    "tree": partial(Tree, network="sockets", overlap_forward=False),
    "tree_overlap": partial(Tree, network="sockets"),
    "tree_mpi": partial(Tree, network="mpi"),
    "tree_shared": partial(Tree, network="sockets", roots="shared"),
}


def timed(run: Callable[[], Any]) -> float:
    """Seconds from a common start until the last rank has ended."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    run()
    return float(MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX))


def communication_s(comm: Comm, model: nn.Module) -> float:
    """One allreduce of all gradients, with nothing else to do."""
    flat = np.ones(sum(p.numel() for p in model.parameters()), np.float32)
    return float(
        np.median([timed(lambda: comm.allreduce(flat, "mean", out=flat)) for _ in range(5)])
    )


def data(model: str, width: int, size: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    features = 3 * 64 if model == "cnn" else width
    x = torch.randn(size, features, generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def balanced(options: Any, model: nn.Module, comm: Comm, wanted_s: float) -> int:
    """The batch whose computation takes about as long as the communication."""
    size, alone = 8, Candidate(model, comm)
    for _ in range(4):
        x, y = data(options.model, options.width, size, comm.rank)
        alone.step(x, y)
        took = timed(lambda x=x, y=y: [alone.step(x, y) for _ in range(2)]) / 2
        size = max(1, min(4096, round(size * wanted_s / took)))
    return size


def main() -> None:
    options = read_plan()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    comm = Comm()
    torch.manual_seed(0)
    model = MODELS[options.model](options.width)
    with torch.no_grad():
        model(data(options.model, options.width, 2, 0)[0])  # lazy layers learn their shape
    wire_s = communication_s(comm, model)
    batch = options.batch or balanced(options, model, comm, wire_s)
    batch = MPI.COMM_WORLD.bcast(batch)
    x, y = data(options.model, options.width, batch, comm.rank)
    candidates = {name: CANDIDATES[name](model, comm) for name in options.candidates}
    took: dict[str, list[float]] = {name: [] for name in candidates}

    def turn(name: str) -> None:
        for _ in range(options.steps):
            candidates[name].step(x, y)
        candidates[name].finish()

    for number in range(options.rounds + 1):
        for name in candidates:
            seconds = timed(lambda n=name: turn(n)) / options.steps
            if number:  # the first round warms up
                took[name].append(seconds)
    result: dict[str, Any] = {
        "batch": batch,
        "bytes": sum(p.numel() * 4 for p in model.parameters()),
        "communication_s": wire_s,
        "seconds": took,
        "apart": _apart(candidates),
    }
    for candidate in candidates.values():
        candidate.close()
    if comm.rank == 0:
        write_result(result)
    comm.close()
    MPI.COMM_WORLD.Barrier()


def _apart(candidates: dict[str, Candidate]) -> dict[str, float]:
    """Largest difference of any weight from those of the first candidate that communicates."""
    names = [name for name in candidates if name != "compute"]
    with torch.no_grad():
        first = [p.clone() for p in candidates[names[0]].model.parameters()] if names else []
        return {
            name: max(
                float((p - q).abs().max())
                for p, q in zip(candidates[name].model.parameters(), first, strict=True)
            )
            for name in names[1:]
        }


if __name__ == "__main__":
    main()
