"""The ranks of overlap.py: trains the same model under each candidate, turn by turn, and times it.

Owns the models, the candidates and the check that all came to the same weights. Rank 0 writes what
was measured into the file that it is told.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn import functional

from hsgd import Comm
from hsgd.optim import NotifiedTree

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
    """NotifiedTree over sockets; a step ends when its weights are here."""

    options: ClassVar[dict[str, Any]] = {"overlap_forward": False, "network": "sockets"}

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        super().__init__(model, comm)
        self.optimizer = NotifiedTree(self.optimizer, self.model, comm, **self.options)

    def finish(self) -> None:
        self.optimizer.wait()

    def close(self) -> None:
        self.optimizer.close()


class TreeOverlap(Tree):
    """The same; the next forward pass begins before all weights are here."""

    options: ClassVar[dict[str, Any]] = {"network": "sockets"}


class TreeMpi(Tree):
    """The same over MPI in place of sockets."""

    options: ClassVar[dict[str, Any]] = {"network": "mpi"}


class TreeParts(Tree):
    """Over sockets, layers go in smaller parts than usual."""

    options: ClassVar[dict[str, Any]] = {"network": "sockets", "part_bytes": 256 << 10}


class TreeShared(Tree):
    """Over sockets, layers are shared among the nodes."""

    options: ClassVar[dict[str, Any]] = {"network": "sockets", "roots": "shared"}


class Ddp(Candidate):
    """torch's DistributedDataParallel over gloo."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        super().__init__(model, comm)
        import torch.distributed as dist

        if not dist.is_initialized():
            world = MPI.COMM_WORLD
            host = (
                socket.gethostbyname(socket.gethostname()) if comm.cross_size > 1 else "127.0.0.1"
            )
            store = dist.TCPStore(host, 0, is_master=True) if comm.rank == 0 else None
            host, port = world.bcast((host, store.port if store else 0))
            store = store or dist.TCPStore(host, port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
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


CANDIDATES: dict[str, type[Candidate]] = {
    "compute": Candidate,
    "ddp": Ddp,
    "horovod": Horovod,
    "two_level": TwoLevel,
    "tree": Tree,
    "tree_overlap": TreeOverlap,
    "tree_mpi": TreeMpi,
    "tree_parts": TreeParts,
    "tree_shared": TreeShared,
}


def keep_to_own_cores(comm: Comm) -> None:
    """Share the cores out among the nodes, as machines have theirs; threads made later follow."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= comm.cross_size:
        os.sched_setaffinity(0, cores[comm.cross_rank :: comm.cross_size])


def timed(run: Callable[[], Any]) -> float:
    """Seconds from a common start until the last rank has ended."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    run()
    return float(MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX))


def spent() -> np.ndarray:
    """Processor seconds of this rank's threads, how often one of them gave up its core, and seconds
    in which a core of this machine had nothing to do, added up over its cores.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    idle_s = (int(total[4]) + int(total[5])) / os.sysconf("SC_CLK_TCK")
    return np.array([used.ru_utime + used.ru_stime, used.ru_nvcsw + used.ru_nivcsw, idle_s])


def counted(candidate: Candidate, x: Tensor, y: Tensor, library: str) -> list[int]:
    """Collectives of all ranks within five steps: MPI's, as the preloaded library counts them, and
    hsgd's own.
    """
    comm, count = candidate.comm, ctypes.CDLL(library).collectives_counted
    candidate.step(x, y)
    candidate.finish()
    before = (count(), comm.metrics().calls)
    if not before[0]:
        raise RuntimeError("the counting library counts nothing")
    for _ in range(5):
        candidate.step(x, y)
    candidate.finish()
    own = np.array([count() - before[0], comm.metrics().calls - before[1]], np.int64)
    return [int(number) for number in comm.allreduce(own)]


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


def timeline(candidate: Tree, x: Tensor, y: Tensor) -> list[list[Any]]:
    """What rank 0 did in three steps: [lane, what, from, to] in seconds."""
    events: list[list[Any]] = []
    tree = candidate.optimizer
    wait_for, begin = tree._wait_for, time.monotonic()

    def now() -> float:
        return time.monotonic() - begin

    def waits(layer: int) -> None:
        start = now()
        wait_for(layer)
        events.append(["waits", f"layer {layer}", start, now()])

    tree._wait_for = waits
    for step in range(3):
        tree.zero_grad()
        start = now()
        loss = functional.cross_entropy(candidate.call(x), y)
        middle = now()
        loss.backward()
        end = now()
        tree.step()
        events += [["forward", str(step), start, middle], ["backward", str(step), middle, end]]
    candidate.finish()
    tree._wait_for = wait_for
    for layer, target, start, end in tree._engine.sent():
        if start >= begin:
            events.append(["sends", f"layer {layer} to rank {target}", start - begin, end - begin])
    return events


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0, help="computation of a step")
    parser.add_argument("--count", metavar="LIBRARY", help="count collectives, and time nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--own-cores", action="store_true", help="share cores out among nodes")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=[])
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    comm = Comm()
    if options.own_cores:
        keep_to_own_cores(comm)
    torch.manual_seed(0)
    model = MODELS[options.model](options.width)
    with torch.no_grad():
        model(data(options.model, options.width, 2, 0)[0])  # lazy layers learn their shape
    wire_s = communication_s(comm, model)
    wanted_s = options.step_s or wire_s
    batch = options.batch or balanced(options, model, comm, wanted_s)
    batch = MPI.COMM_WORLD.bcast(batch)
    x, y = data(options.model, options.width, batch, comm.rank)
    candidates = {name: CANDIDATES[name](model, comm) for name in options.candidates}
    took: dict[str, list[float]] = {name: [] for name in candidates}
    costs: dict[str, list[Any]] = {name: [] for name in candidates}
    if options.count:
        numbers = {name: counted(candidates[name], x, y, options.count) for name in candidates}
        return end(comm, candidates, options.out, numbers)

    def turn(name: str) -> None:
        before = spent()  # of a turn alone: MPI's barriers spin
        for _ in range(options.steps):
            candidates[name].step(x, y)
        candidates[name].finish()
        costs[name].append(spent() - before)

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
        "spent": {
            name: comm.allreduce(np.mean(cost[1:], axis=0) / options.steps, "mean").tolist()
            for name, cost in costs.items()
        },
        "apart": _apart(candidates),
    }
    if "tree_overlap" in candidates:
        result["timeline"] = timeline(candidates["tree_overlap"], x, y)  # type: ignore[arg-type]
    end(comm, candidates, options.out, result)


def end(comm: Comm, candidates: dict[str, Candidate], out: Path, result: object) -> None:
    for candidate in candidates.values():
        candidate.close()
    if comm.rank == 0:
        out.write_text(json.dumps(result))
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
