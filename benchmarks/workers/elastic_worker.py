"""The ranks of elastic.py: the box against copies and sums of the same bytes, pushes over a link,
training steps under each candidate and what they are made of.

Checks that results are right; accuracy is elastic_study.py's. Plan: the part, and the options of
elastic.py that are for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.shapes import MODELS
from hsgd import Comm, ParameterBox
from hsgd.optim import ElasticAveraging
from studies.elastic_study import study
from workers.plain_tcp import PlainTcp
from workers.serving import read_plan, write_result

__all__: list[str] = []


def slowest(comm: Comm, seconds: float) -> float:
    """Of all ranks. They sleep while they wait, which ranks within MPI do not."""
    return float(comm.allreduce(np.array([seconds]), "max")[0])


def timed(comm: Comm, run: Callable[[], Any]) -> float:
    """Seconds from a common start until the last rank has ended."""
    comm.barrier()
    begin = time.perf_counter()
    run()
    return slowest(comm, time.perf_counter() - begin)


# --- the box ---


def box_speed(comm: Comm, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Reads and pushes of 1, 2, ... workers at once; at the least, a copy and a sum in place."""
    count = nbytes // 4
    weights, other, ones, sums = (torch.ones(count) for _ in range(4))
    rows = []
    with ParameterBox.over(comm, np.zeros(count, np.float32)) as box:
        candidates: dict[str, Callable[[], Any]] = {
            "read": lambda: box.read(weights),
            "copy": lambda: weights.copy_(other),
            "accumulate": lambda: box.accumulate(ones),
            "add": lambda: sums.add_(ones),
        }
        for workers in range(1, comm.size + 1):
            seconds: dict[str, list[float]] = {name: [] for name in candidates}
            for number in range(rounds + 1):
                for name, run in candidates.items():
                    act = run if comm.rank < workers else (lambda: None)
                    took = timed(comm, act)
                    if number:
                        seconds[name].append(took)
            rows += [
                {"part": "box", "workers": workers, "candidate": name, "bytes": nbytes, "s": took}
                for name, took in seconds.items()
            ]
        comm.barrier()
    return rows


def push_speed(comm: Comm, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """The last rank pushes into a box that rank 0's node owns; all it sends crosses the link. In
    turns with it, as many bytes each way over plain TCP.
    """
    count = nbytes // 4
    last = comm.rank == comm.size - 1
    candidates: dict[str, Callable[[], Any]] = {}
    with contextlib.ExitStack() as opened:
        boxes = []
        for name, dtype in (("push", torch.float32), ("push bf16", torch.bfloat16)):
            box = ParameterBox.over(comm, np.zeros(count, np.float32), shards=None)
            boxes.append(opened.enter_context(box))
            delta = torch.ones(count if last else 0, dtype=dtype)
            candidates[name] = partial(box.accumulate, delta) if last else lambda: None
        plain = PlainTcp(comm, nbytes)
        opened.callback(plain.close)
        candidates["tcp"] = plain.both_ways
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(rounds + 1):
            for name, run in candidates.items():
                seconds[name].append(timed(comm, run))
        for box in boxes:
            box.refresh()
            out = np.empty(count, np.float32)
            box.read(out)
            assert (out == rounds + 1).all(), "the box has not what was pushed"
        comm.barrier()
    # The new values come back as float32, so no direction carries more than that.
    return [
        {"part": "push", "candidate": name, "bytes": nbytes, "s": took[1:]}
        for name, took in seconds.items()
    ]


# --- steps ---


class Plain:
    """Computes, and makes gradients of the model's shapes; no other rank is there."""

    busy = False

    def __init__(self, shapes: list[tuple[int, ...]], comm: Comm) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.comm = comm
        self.gradients = [torch.full(shape, 1e-3) for shape in shapes]
        self.optimizer: Any = torch.optim.SGD(self.parameters, lr=0.1, fused=True)

    def step(self, compute_s: float) -> None:
        """One step: a processor of this rank's own, or a core of the machine, is busy for so long;
        gradients, and what follows.
        """
        end = time.perf_counter() + compute_s
        if not self.busy:
            time.sleep(compute_s)
        while time.perf_counter() < end:
            pass
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.finish()

    def finish(self) -> None:
        self.optimizer.step()

    def close(self) -> None:
        """End what runs beside the program."""


class TwoLevel(Plain):
    """hsgd's allreduce of all gradients at once, then the update."""

    def __init__(self, shapes: list[tuple[int, ...]], comm: Comm) -> None:
        super().__init__(shapes, comm)
        self.flat = comm.empty(sum(p.numel() for p in self.parameters), torch.float32)
        parts = self.flat.split([p.numel() for p in self.parameters])
        self.gradients = [
            part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)
        ]
        self.flat.fill_(1e-3)

    def finish(self) -> None:
        self.comm.allreduce(self.flat, "mean", out=self.flat)
        self.optimizer.step()


class Horovod(Plain):
    """Plain Horovod over MPI: flat allreduce."""

    def __init__(self, shapes: list[tuple[int, ...]], comm: Comm) -> None:
        super().__init__(shapes, comm)
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd

    def finish(self) -> None:
        handles = [self.hvd.allreduce_async_(g, name=str(n)) for n, g in enumerate(self.gradients)]
        for handle in handles:
            self.hvd.synchronize(handle)
        self.optimizer.step()


class Elastic(Plain):
    """ElasticAveraging."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, shapes: list[tuple[int, ...]], comm: Comm, mode: Any = "async") -> None:
        super().__init__(shapes, comm)
        self.optimizer = ElasticAveraging(
            self.optimizer, self.parameters, comm, mode, **self.options
        )

    def close(self) -> None:
        self.optimizer.close()


STEPPERS: dict[str, Callable[..., Plain]] = {
    "compute": Plain,
    "two_level": TwoLevel,
    "horovod": Horovod,
    "async": Elastic,
    "hybrid": partial(Elastic, mode="hybrid"),  # synchronous within a node
}


def step_times(comm: Comm, options: Any) -> list[dict[str, Any]]:
    """Steps of all candidates, turn by turn; some of a turn follow one another."""
    Elastic.options = {"update_interval": options.interval}
    shapes = MODELS[options.model]()
    steppers = {name: STEPPERS[name](shapes, comm) for name in options.candidates}
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for number in range(options.rounds + 1):
        for name, stepper in steppers.items():

            def turn(stepper: Plain = stepper, steps: int = options.steps) -> None:
                for _ in range(steps):
                    stepper.step(options.compute_s)

            averages = isinstance(stepper, Elastic)
            if averages:
                turn(steps=options.interval)  # the push that the first exchange will wait for
            took = timed(comm, turn) / options.steps
            if averages:
                stepper.optimizer.finish_push()  # nothing of it in another one's turn
            if number:
                seconds[name].append(took)
    rows = []
    nbytes = 4 * sum(math.prod(shape) for shape in shapes)
    for name, stepper in steppers.items():
        row: dict[str, Any] = {"part": "steps", "candidate": name, "bytes": nbytes}
        row["s"] = seconds[name]
        rows.append(row)
        comm.barrier()
        stepper.close()
    return rows


def median_of(comm: Comm, rounds: int, run: Callable[[], Any]) -> float:
    return statistics.median([timed(comm, run) for _ in range(rounds + 1)][1:])


def exchange_parts(comm: Comm, count: int, rounds: int) -> dict[str, float]:
    """What an exchange of so many values is made of: each part alone, by all ranks at once."""
    delta, weights = torch.zeros(count), torch.zeros(count)
    with ParameterBox.create(f"parts-{comm.rank}", count=count) as own:
        accumulate = median_of(comm, rounds, lambda: own.accumulate(delta))
    with ParameterBox.over(comm, delta) as box:
        read = median_of(comm, rounds, lambda: box.read(weights))
        both = median_of(comm, rounds, lambda: box.elastic([weights], 0.0, delta))
        change = median_of(comm, rounds, lambda: box.accumulate(delta))
        comm.barrier()
    push, mix = max(0.0, change - accumulate), max(0.0, both - read)
    return {"accumulate": accumulate, "push": push, "read": read, "mix": mix}


def iteration_parts(comm: Comm, options: Any) -> list[dict[str, Any]]:
    """An iteration with an exchange in each step, and what it is made of."""
    shapes = MODELS[options.model]()
    count = sum(math.prod(shape) for shape in shapes)
    found = exchange_parts(comm, count, options.rounds)
    Elastic.options = {"update_interval": 1}
    for part, kind in (("computation", Plain), ("iteration", Elastic)):
        stepper = kind(shapes, comm)

        def turn(stepper: Plain = stepper) -> None:
            for _ in range(options.steps):
                stepper.step(options.compute_s)

        found[part] = median_of(comm, options.rounds, turn) / options.steps
        comm.barrier()
        stepper.close()
    row = {"part": "models", "model": options.model, "bytes": 4 * count}
    return [{**row, "of_an_iteration_s": found}]


def slow_worker(comm: Comm, options: Any) -> list[dict[str, Any]]:
    """Steps per second of the others when the last rank computes three times as long."""
    rows = []
    Plain.busy = True
    Elastic.options = {"update_interval": options.interval}
    for name in ("two_level", "async"):
        stepper = STEPPERS[name](MODELS[options.model](), comm)
        rates: dict[int, list[float]] = {1: [], 3: []}
        for _ in range(options.rounds):
            for factor, found in rates.items():
                slow = comm.rank == comm.size - 1
                steps = options.steps // factor if slow else options.steps
                steps = options.steps if name == "two_level" else steps
                comm.barrier()
                begin = time.perf_counter()
                for _ in range(steps):
                    stepper.step(options.compute_s * (factor if slow else 1))
                own = (time.perf_counter() - begin) / steps
                found.append(1 / slowest(comm, 0.0 if slow else own))
        comm.barrier()
        stepper.close()
        row = {"part": "slow", "candidate": name}
        rows.append({**row, "undisturbed": rates[1], "disturbed": rates[3]})
    return rows


def main() -> None:
    options = read_plan()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    comm = Comm()
    parts = {
        "box": lambda: box_speed(comm, options.bytes, options.rounds),
        "push": lambda: push_speed(comm, options.bytes, options.rounds),
        "steps": lambda: step_times(comm, options),
        "models": lambda: iteration_parts(comm, options),
        "slow": lambda: slow_worker(comm, options),
        "study": lambda: study(comm, options),
    }
    rows = parts[options.part]()
    if comm.rank == 0:
        write_result(rows)
    comm.close()


if __name__ == "__main__":
    main()
