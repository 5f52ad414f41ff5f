"""Where the workers of torchrun meet, when they call hsgd.Comm() on one node.

Owns the keys in torchrun's store. Names of sockets are random and told through the store, so that
nobody outside the job can foretell them. Every wait has a deadline.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from hsgd.errors import CollectiveTimeout, LaunchError
from hsgd.job import launcher_variables
from hsgd.job.meeting_path import draw_meeting_path

__all__ = ["meeting_point"]


def meeting_point(worker: launcher_variables.Torchrun, number: int, timeout_s: float) -> str:
    """The path for Comm.local that all workers use; collective over them, blocking.

    number: counts the meetings of this process, which all workers have in the same order.
    Raises LaunchError for workers of several nodes and where torchrun's store is out of reach,
    CollectiveTimeout when rank 0 does not come.
    """
    if worker.local_size != worker.size:
        raise LaunchError(
            f"torchrun started {worker.size} ranks, {worker.local_size} of them on this node: "
            "hsgd.Comm() and init() run under torchrun on one node only; between nodes start with "
            'mpirun or `hsgd run`, or use torch.distributed.init_process_group("hsgd")'
        )
    store, key = _store(timeout_s), f"hsgd/comm/{launcher_variables.restarts()}/{number}"
    if worker.rank == 0:
        store.set(key, draw_meeting_path())
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:
        raise CollectiveTimeout(
            f"Comm: rank 0 did not come within {timeout_s:g} s; see whether all ranks make this "
            "communicator"
        ) from None
    return str(store.get(key), "utf-8")


@functools.cache
def _store(timeout_s: float) -> Any:
    """torchrun's store. Kept: where rank 0 serves it, others may still be reading."""
    from torch.distributed.rendezvous import rendezvous

    try:
        limit = timedelta(seconds=timeout_s)
        store, _, _ = next(iter(rendezvous("env://", timeout=limit)))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"Comm: torchrun's store cannot be reached: {reason}") from None
    return store
