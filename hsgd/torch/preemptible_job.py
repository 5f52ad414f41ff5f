"""PreemptibleJob: hsgd.torch as a front end of preempted()."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hsgd.comm import preemption
from hsgd.comm.communicator import Comm
from hsgd.torch import mpi_ops
from hsgd.torch.job import runtime

__all__ = ["PreemptibleJob", "register"]


class PreemptibleJob:
    """Lets preempted() use the job of hsgd.torch; local to make."""

    def __init__(self, job: runtime.Runtime) -> None:
        self._job = job

    @property
    def rank(self) -> int:
        return self._job.comm.rank

    def carriers(self) -> Sequence[Comm]:
        return self._job.carriers

    def any_rank(self, mine: bool) -> bool:
        if self._job.comm.size == 1:
            return mine
        value = torch.tensor([mine], dtype=torch.uint8)
        return bool(mpi_ops.allreduce(value, op=mpi_ops.Max, name="hsgd.preempted").item())

    def split(self) -> Comm:
        return self._job.private_comm(0, "save_and_exit")


def _find() -> PreemptibleJob | None:
    job = runtime.latest()
    return None if job is None else PreemptibleJob(job)


def register() -> None:
    """Let preempted() use the job of hsgd.torch while there is one; local."""
    preemption.register(_find)
