"""The job's communicator behind `hsgd.init()`, `hsgd.rank()` and the like."""

from __future__ import annotations

import threading
from typing import Any

from hsgd.comm.communicator import Comm

__all__ = [
    "comm",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_lock = threading.Lock()
_world: list[Comm] = []


def init(comm: Any | None = None) -> None:
    """Set up the job's communicator; collective, blocking. A second call does nothing.

    Args:
        comm: an mpi4py communicator; None is all ranks of the job, as for Comm. A Comm is used
            directly, and shutdown() closes it.

    Raises:
        MissingExtra: mpi4py is not installed.
        LaunchError: the MPI libraries do not agree, or MPI sees one rank of several started ones.
    """
    with _lock:
        if not _world:
            _world.append(comm if isinstance(comm, Comm) else Comm(comm))


def shutdown() -> None:
    """Close the job's communicator if there is one; local."""
    with _lock:
        while _world:
            _world.pop().close()


def is_initialized() -> bool:
    """Return whether init() was called, and shutdown() was not; local."""
    return bool(_world)


def comm() -> Comm:
    """Return the job's communicator; local. Raises ValueError before init()."""
    if not _world:
        raise ValueError("hsgd is not initialized; call hsgd.init() first")
    return _world[0]


def rank() -> int:
    """Return the rank in the job, from 0; local."""
    return comm().rank


def size() -> int:
    """Return the number of ranks in the job; local."""
    return comm().size


def local_rank() -> int:
    """Return the rank among those that share this node's memory, from 0; local."""
    return comm().local_rank


def local_size() -> int:
    """Return the number of ranks that share this node's memory; local."""
    return comm().local_size


def cross_rank() -> int:
    """Return the index of this node, from 0; local."""
    return comm().cross_rank


def cross_size() -> int:
    """Return the number of nodes in the job; local."""
    return comm().cross_size
