"""The ranks of device_allreduce.py: the candidates, the timing and the check of every turn."""

from __future__ import annotations

import contextlib
import dataclasses
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
from workers.staying_processes import orders

__all__ = ["rank_main"]

LIMIT = timedelta(seconds=60)
MOST_CALLS = 50  # of a turn
Call = Callable[[Tensor], object]


class Job:
    """This rank, its device, and what it does when told: `tell_device`, `start`, `turn`."""

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
        self.host = self.comm("host")
        self._group: Any = None
        self._calls: dict[str, Call] = {}
        self._turns: Turns | None = None

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

    def tell_device(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else "host memory"
        return {"device": name}

    def start(self, name: str) -> dict[str, Any]:
        """Why it does not work, in a line; "" where it does."""
        try:
            self._calls[name] = MAKERS[name](self)
            self._calls[name](torch.ones(1000, device=self.device))
            self.wait()
        except Exception as error:
            return {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        return {"reason": ""}

    def turn(self, name: str, nbytes: int) -> dict[str, Any]:
        if self._turns is None or self._turns.nbytes != nbytes:
            self._turns = Turns(self, nbytes)
        return self._turns.take(name, self._calls[name])

    def wait(self) -> None:
        """For the device."""
        if self.is_cuda:
            torch.cuda.synchronize()


def staged(job: Job) -> Call:
    """Comm.allreduce in place, through host memory."""
    comm = job.comm("staged", nccl_library="none")
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


MAKERS: dict[str, Callable[[Job], Call]] = {
    "hsgd-staged": staged,
    "hsgd-nccl": by_nccl,
    "gloo": lambda job: of_group(job, "gloo"),
    "nccl": lambda job: of_group(job, "nccl"),
    "pageable-hsgd": lambda job: pageable(job, "hsgd"),
    "pageable-gloo": lambda job: pageable(job, "gloo"),
    "bus": bus,
}


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

    def take(self, name: str, call: Call) -> dict[str, Any]:
        """One turn, whose last result is compared: seconds of its calls, and wrong elements."""
        job = self.job
        if name not in self.calls:
            took_s = max(job.host.allgather_object(min(self._timed(call), self._timed(call))))
            calls = int(job.plan["budget_s"] / took_s) + 1
            self.calls[name] = min(max(calls, 2), MOST_CALLS)
        seconds = [self._timed(call) for _ in range(self.calls[name])]
        wrong = 0 if name == "bus" else int((self.tensor != self.expected).sum())
        return {"seconds": seconds, "wrong": wrong}


def rank_main(plan: dict[str, Any], number: int, path: str, pipe: Any) -> None:
    """Body of a rank's process."""
    job = Job(plan, number, path)
    orders(pipe, lambda order, *words: getattr(job, order)(*words))
