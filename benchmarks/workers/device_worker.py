"""A rank of device_allreduce.py: `python rank.py device_worker PLAN RANK PATH`.

Owns the candidates, the timing and the check of every turn. Rank 0 prints a line of JSON for each
turn as it ends; a rank ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.pattern import Pattern
from hsgd import Comm
from hsgd.config import Config
from workers.device_trace import traced_step

__all__: list[str] = []

LIMIT = timedelta(seconds=60)
MOST_CALLS = 50  # of a turn
Call = Callable[[Tensor], object]


class Job:
    """This rank, its device, and what it measures."""

    def __init__(self, plan: dict[str, Any], rank: int, path: str) -> None:
        self.plan, self.rank, self.path = plan, rank, path
        self.size: int = plan["ranks"]
        self.is_cuda = plan["device"] == "cuda"
        self.device = torch.device("cpu")
        if self.is_cuda:
            self.device = torch.device("cuda", rank // plan["ranks_per_device"])
            torch.cuda.set_device(self.device)
        torch.set_num_threads(1)
        self.config = Config.from_env()
        self._ready = contextlib.ExitStack()
        self.host = self.comm("host")
        self._group: Any = None
        self.nbytes = 0

    def comm(self, name: str, **changed: Any) -> Comm:
        """A communicator of its own."""
        config = dataclasses.replace(self.config, **changed)
        return Comm.local(f"{self.path}-{name}", self.rank, self.size, config)

    def group(self, backend: str) -> Any:
        """A group of torch.distributed."""
        if self._group is None:
            store = dist.FileStore(f"{self.plan['folder']}/store", self.size)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.size, timeout=LIMIT
            )
            self._group = dist.group.WORLD
        return self._group if backend == "gloo" else dist.new_group(backend=backend, timeout=LIMIT)

    def wait(self) -> None:
        """For the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def say(self, **told: Any) -> None:
        """One line, by rank 0."""
        if self.rank == 0:
            print(json.dumps(told), flush=True)


def staged(job: Job, name: str, **changed: Any) -> Call:
    """Comm.allreduce in place, through host memory."""
    comm = job.comm(name, nccl_library="none", **changed)
    return lambda tensor: comm.allreduce(tensor, out=tensor)


def by_nccl(job: Job) -> Call:
    """Comm.allreduce in place as it comes, where that is by NCCL."""
    comm = job.comm("own-nccl")
    layout = comm.device_comm(torch.ones(1, device=job.device)).layout
    if not layout.nccl_library:
        raise RuntimeError(f"hsgd does not use NCCL: {layout.reason}")
    return lambda tensor: comm.allreduce(tensor, out=tensor)


def of_group(job: Job, backend: str) -> Call:
    """torch.distributed.all_reduce."""
    group = job.group(backend)
    return lambda tensor: dist.all_reduce(tensor, group=group)


def pageable(job: Job, backend: str) -> Call:
    """Down into memory that the driver has to copy from, a sum there, and up."""
    comm, group = job.host, job.group("gloo") if backend == "gloo" else None

    def call(tensor: Tensor) -> None:
        host = tensor.cpu() if job.is_cuda else tensor.clone()
        if group is None:
            comm.allreduce(host, out=host)
        else:
            dist.all_reduce(host, group=group)
        tensor.copy_(host)

    return call


def bus(job: Job) -> Call:
    """Pinned memory down and up at the same time: no way through host memory is faster."""
    buffers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    streams: list[Any] = [None, None]
    if job.is_cuda:
        streams = [torch.cuda.Stream() for _ in range(2)]

    def call(tensor: Tensor) -> None:
        if tensor.numel() not in buffers:
            buffers.clear()
            host = [torch.ones(tensor.shape, pin_memory=job.is_cuda) for _ in range(2)]
            buffers[tensor.numel()] = (host[0], host[1], torch.empty_like(tensor))
        down, up, target = buffers[tensor.numel()]
        for stream, to, source in ((streams[0], down, tensor), (streams[1], target, up)):
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                to.copy_(source, non_blocking=True)

    return call


def makers(job: Job) -> dict[str, Callable[[], Call]]:
    """How to make each candidate of the plan."""
    known: dict[str, Callable[[], Call]] = {
        "hsgd-staged": lambda: staged(job, "staged"),
        "hsgd-nccl": lambda: by_nccl(job),
        "gloo": lambda: of_group(job, "gloo"),
        "nccl": lambda: of_group(job, "nccl"),
        "pageable-hsgd": lambda: pageable(job, "hsgd"),
        "pageable-gloo": lambda: pageable(job, "gloo"),
        "bus": lambda: bus(job),
    }
    for nbytes in job.plan["chunks"]:
        name = f"chunk-{nbytes}"
        known[name] = functools.partial(staged, job, name, device_chunk_bytes=nbytes)
    return {name: known[name] for name in job.plan["candidates"]}


def alive(job: Job) -> dict[str, Call]:
    """The candidates that work on all ranks; rank 0 says why others do not."""
    calls: dict[str, Call] = {}
    for name, make in makers(job).items():
        reason = ""
        try:
            call = make()
            call(torch.ones(1000, device=job.device))
            job.wait()
            calls[name] = call
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        reasons = [each for each in job.host.allgather_object(reason) if each]
        if reasons:
            calls.pop(name, None)
            job.say(failed=name, reason=reasons[0])
    return calls


class Turns:
    """Turns of the candidates with tensors of one size."""

    def __init__(self, job: Job, nbytes: int) -> None:
        pattern, count = Pattern(job.size), nbytes // 4
        self.job, self.nbytes = job, nbytes
        self.given = torch.tensor(pattern.given(job.rank, 0, count)).to(job.device)
        self.expected = torch.from_numpy(pattern.expected(0, count)).to(job.device)
        self.tensor = torch.empty_like(self.given)
        self.calls: dict[str, int] = {}  # of a turn

    def _timed(self, call: Call) -> float:
        """Seconds from when all ranks are there to when this rank's device has the result."""
        job = self.job
        self.tensor.copy_(self.given)
        job.wait()
        job.host.barrier()
        begin = time.perf_counter()
        call(self.tensor)
        job.wait()
        return time.perf_counter() - begin

    def take(self, name: str, call: Call, number: int) -> None:
        """One turn, whose last result is compared."""
        job = self.job
        if name not in self.calls:
            took_s = max(job.host.allgather_object(min(self._timed(call), self._timed(call))))
            calls = int(job.plan["budget_s"] / took_s) + 1
            self.calls[name] = min(max(calls, 2), MOST_CALLS)
        mine = [self._timed(call) for _ in range(self.calls[name])]
        wrong = 0
        if name != "bus":
            wrong = int((self.tensor != self.expected).sum())
        told = job.host.allgather_object((mine, wrong))
        slowest = [max(each) for each in zip(*(seconds for seconds, _ in told), strict=True)]
        wrong = sum(count for _, count in told)
        job.say(turn=name, bytes=self.nbytes, number=number, seconds=slowest, wrong=wrong)


def end_with_parent() -> None:
    """Whoever started this rank holds its standard input."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    plan, rank, path = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    end_with_parent()
    job = Job(plan, rank, path)
    name = torch.cuda.get_device_name(job.device) if job.is_cuda else "host memory"
    job.say(device=name, chunk_bytes=job.config.device_chunk_bytes)
    calls = alive(job)
    for nbytes in plan["sizes"]:
        turns = Turns(job, nbytes)
        for number in range(plan["rounds"]):
            order = list(calls)
            random.Random(number).shuffle(order)  # nobody follows the same one in each round
            for each in order:
                turns.take(each, calls[each], number)
    if plan["trace"]:
        job.say(trace=traced_step(job.comm("trace"), job.device))
    job.host.barrier()


if __name__ == "__main__":
    main()
