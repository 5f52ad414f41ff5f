"""The communicator of the whole job behind `hsgd.init()`, `hsgd.rank()` and their like.

Owns the only module state of the package: the job's Comm, between init() and shutdown().
"""

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

    comm: an mpi4py communicator; None is all ranks of the job, as for Comm. A Comm is taken as it
    is, and closed by shutdown().
    Raises MissingExtra without mpi4py, LaunchError when the MPI libraries do not agree, or MPI sees
    one rank where the launcher started more.
    """
    with _lock:
        if not _world:
            _world.append(comm if isinstance(comm, Comm) else Comm(comm))


def shutdown() -> None:
    """Close the job's communicator; local. Does nothing when there is none."""
    with _lock:
        while _world:
            _world.pop().close()


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not; local."""
    return bool(_world)


def comm() -> Comm:
    """The job's communicator; local. Raises ValueError before init()."""
    if not _world:
        raise ValueError("hsgd is not initialized; call hsgd.init() first")
    return _world[0]


def rank() -> int:
    """Rank in the job, from 0; local."""
    return comm().rank


def size() -> int:
    """Ranks in the job; local."""
    return comm().size


def local_rank() -> int:
    """Rank among those that share this node's memory, from 0; local."""
    return comm().local_rank


def local_size() -> int:
    """Ranks that share this node's memory; local."""
    return comm().local_size


def cross_rank() -> int:
    """Index of this node, from 0; local."""
    return comm().cross_rank


def cross_size() -> int:
    """Nodes in the job; local."""
    return comm().cross_size
