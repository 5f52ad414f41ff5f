"""register() lets hsgd.preempted() use torch.distributed's default group."""

from __future__ import annotations

import torch.distributed

from hsgd.c10d.collectives import Collectives
from hsgd.comm import preemption

__all__ = ["register"]


def register() -> None:
    """Let hsgd.preempted() use the default group; local."""
    preemption.register(_find)


def _find() -> preemption.OverComm | None:
    if not torch.distributed.is_initialized():
        return None
    group = torch.distributed.group.WORLD
    comm = group.comm if isinstance(group, Collectives) else None
    return None if comm is None or comm.closed else preemption.OverComm(comm)
