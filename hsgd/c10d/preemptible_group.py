"""PreemptibleGroup: torch.distributed's default group as a front end of preempted()."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed

from hsgd.c10d.collectives import Collectives
from hsgd.comm import preemption
from hsgd.comm.communicator import Comm

__all__ = ["PreemptibleGroup", "register"]


class PreemptibleGroup:
    """Lets preempted() use torch.distributed's default group, over `comm`; local to make."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def rank(self) -> int:
        return self._comm.rank

    def carriers(self) -> Sequence[Comm]:
        return [self._comm]

    def any_rank(self, mine: bool) -> bool:
        return preemption.any_rank(self._comm, mine)

    def split(self) -> Comm:
        return preemption.whole(self._comm)


def _find() -> PreemptibleGroup | None:
    if not torch.distributed.is_initialized():
        return None
    group = torch.distributed.group.WORLD
    comm = group.comm if isinstance(group, Collectives) else None
    return None if comm is None or comm.closed else PreemptibleGroup(comm)


def register() -> None:
    """Let hsgd.preempted() use the default group; local."""
    preemption.register(_find)
