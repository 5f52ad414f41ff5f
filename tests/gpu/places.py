"""Where the programs of this folder have their tensors: on a CUDA device, or in host memory.

Owns streams, sleeps and waits of that place, which in host memory do nothing, so that the same
program runs in both. Run as a program it says in one line, by its exit code too, whether there is a
CUDA device.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from hsgd import Comm, _native
from hsgd.errors import HsgdError

__all__ = ["Place", "why_not_cuda", "why_not_nccl"]

SHARED_FROM = 23000  # NCCL 2.30, with NCCL_MULTI_RANK_GPU_ENABLE=1

CYCLES_PER_MS = 1_500_000  # of a GPU at some 1.5 GHz: how long a sleep is need not be exact


def why_not_cuda() -> str:
    """Why there is no CUDA device; "" where there is one. Local."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a build with it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device on this machine (nvidia-smi -L)"
    return ""


def why_not_nccl(ranks: int) -> str:
    """Why so many ranks of this machine cannot use NCCL; "" where they can. Local."""
    try:
        version = _native.nccl_version("libnccl.so.2")
    except HsgdError as error:
        return str(error)
    if torch.cuda.device_count() >= ranks:
        return ""
    if version >= SHARED_FROM:
        return ""
    return (
        f"{torch.cuda.device_count()} GPUs for {ranks} ranks, which NCCL {version} lets nobody "
        "share: NCCL 2.30 is needed"
    )


class Place:
    """kind: "cuda", the first device, which all ranks share; "nccl", a device of the rank's own,
    or the same ones in turn where NCCL lets ranks share them; or "cpu".
    """

    def __init__(self, kind: str, rank: int) -> None:
        torch.set_num_threads(1)  # ranks share the cores
        self.is_cuda = kind != "cpu"
        self.by_nccl = kind == "nccl"
        self.device = torch.device("cpu")
        if self.by_nccl:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if self.is_cuda:
            number = rank % torch.cuda.device_count() if self.by_nccl else 0
            self.device = torch.device("cuda", number)
            torch.cuda.set_device(self.device)

    @property
    def backend(self) -> str:
        """That of torch.distributed for tensors of both kinds."""
        return "cpu:hsgd,cuda:hsgd" if self.is_cuda else "hsgd"

    def check_way(self, comm: Comm) -> None:
        """Raise AssertionError unless hsgd uses NCCL where it should; collective."""
        if self.is_cuda:
            layout = comm.device_comm(torch.ones(1, device=self.device)).layout
            assert bool(layout.nccl_library) == (self.by_nccl and comm.size > 1), layout

    def new_stream(self) -> Any:
        """A CUDA stream, or None."""
        return torch.cuda.Stream(self.device) if self.is_cuda else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which this stream is the current one."""
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def sleep(self, ms: float) -> None:
        """The current stream does nothing for so long; the caller does not wait."""
        if self.is_cuda:
            torch.cuda._sleep(int(ms * CYCLES_PER_MS))

    def mark(self) -> Any:
        """A timed event on the current stream, or None."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """The caller waits for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """A context in which whatever of torch waits for the device raises an error."""
        self.wait()
        if self.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if self.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
        self.wait()


if __name__ == "__main__":
    reason = why_not_cuda()
    sys.exit(f"make test-gpu: {reason}" if reason else 0)
