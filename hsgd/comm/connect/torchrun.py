"""Set-up of hsgd.Comm() under torchrun: random socket names, sent through torchrun's store."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from hsgd.comm.connect.meeting_path import draw_meeting_path
from hsgd.errors import CollectiveTimeout, LaunchError, about
from hsgd.jobs.environment import launcher_variables
from hsgd.jobs.stores import agent_store
from hsgd.jobs.stores.sealed_store import sealed

__all__ = ["meeting_point", "next_prefix", "store"]


_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


def meeting_point(worker: launcher_variables.Torchrun, timeout_s: float) -> str:
    """Return the path for Comm.local that all workers use; collective over them, blocking.

    Raises:
        LaunchError: torchrun's store cannot be reached.
        CollectiveTimeout: rank 0 did not join.
    """
    kept, key = sealed(store(timeout_s)), next_prefix()
    if worker.rank == 0:
        kept.set(key, draw_meeting_path())
    try:
        kept.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:
        raise about(
            0,
            CollectiveTimeout(
                f"Comm: rank 0 did not join within {timeout_s:g} s; check that all ranks "
                "make this communicator"
            ),
        ) from None
    return str(kept.get(key), "utf-8")


def next_prefix() -> str:
    """Return the key prefix of the next set-up, the same on all workers; local."""
    restarts = launcher_variables.restarts()
    return f"hsgd/comm/{restarts}/{next(_numbers[restarts])}"


@functools.cache
def store(timeout_s: float) -> Any:
    """Return torchrun's store, kept as others may still read it; blocking. LaunchError."""
    if launcher_variables.agent_round() is not None:
        return agent_store.connect(timeout_s)
    from torch.distributed.rendezvous import rendezvous

    try:
        limit = timedelta(seconds=timeout_s)
        found, _, _ = next(iter(rendezvous("env://", timeout=limit)))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"Comm: torchrun's store cannot be reached: {reason}") from None
    return found
