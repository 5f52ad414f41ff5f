"""A communicator for the ranks of a process group of torch.distributed.

Owns the names of the meetings. Never uses the group for anything else.
"""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import torch.distributed as dist

from hsgd.comm.communicator import Comm

__all__ = ["comm_of"]

_meetings = itertools.count()


def comm_of(given: Any, what: str) -> tuple[Comm, bool]:
    """`given`, or a new communicator over the ranks of a process group, and whether it is new;
    collective over the group then, blocking.

    given: a Comm, or a process group of any backend; dist.group.WORLD is the default one. None:
        a new one of this rank alone; local.
    Raises TypeError for anything else, and what Comm.over_store raises.
    """
    if isinstance(given, Comm):
        return given, False
    if given is None:
        return Comm.local(f"@hsgd-{secrets.token_hex(16)}", 0, 1), True
    if not dist.is_available() or not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"{what}: comm is a {type(given).__name__}; give a Comm or a process group of "
            "torch.distributed"
        )
    rank, size = dist.get_rank(given), dist.get_world_size(given)
    # The number of this rank's meetings may differ from another's: the first rank's counts.
    name = [f"hsgd/{what}/{next(_meetings)}/{dist.get_process_group_ranks(given)[0]}"]
    dist.broadcast_object_list(name, src=dist.get_global_rank(given, 0), group=given)
    store = dist.distributed_c10d._get_default_store()
    return Comm.over_store(store, rank, size, prefix=name[0]), True
