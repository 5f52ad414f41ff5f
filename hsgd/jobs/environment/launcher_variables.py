"""Meaning of the launchers' variables, without MPI or torch: `hsgd info` uses it too."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from hsgd.base import built
from hsgd.errors import LaunchError
from hsgd.jobs.environment.launched_once import launched_once
from hsgd.jobs.environment.launchers import LAUNCHERS, launched, number
from hsgd.jobs.environment.scheduled_step import scheduled_step

__all__ = [
    "AGENT_ROUND",
    "Torchrun",
    "agent_round",
    "describe",
    "mpi_rank",
    "mpi_size",
    "refuse_alone",
    "restarts",
    "torchrun",
    "usable_mpi_rank",
    "world_rank",
]

AGENT_ROUND = "HSGD_AGENT_ROUND"

_OF_MPI = [row for row in LAUNCHERS if row.counts_for_mpi]
_LOCAL = "shared memory of this node, without MPI"
_LEADERS = "shared memory inside nodes, TCP between their leaders, without MPI"
_MPI = "two-level collectives over MPI"


@dataclass(frozen=True)
class Torchrun:
    """A worker of torchrun: its rank, the number of workers, and of those on this node."""

    rank: int
    size: int
    local_size: int


def torchrun(environ: Mapping[str, str] = os.environ) -> Torchrun | None:
    """Return torchrun's variables for this worker, even if under mpirun; else None; local."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    size = number(environ, "WORLD_SIZE") or 1
    return Torchrun(number(environ, "RANK") or 0, size, number(environ, "LOCAL_WORLD_SIZE") or size)


def agent_round(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the world of a worker of `hsgd run --min-np`, from 1; None elsewhere; local."""
    return number(environ, AGENT_ROUND)


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often torchrun has restarted this job's workers; 0 without torchrun; local.

    For keys in torchrun's store: it outlives the workers, and a restarted worker must not find
    values of a dead one. On several nodes this is 0: each node's agent counts only its own
    restarts, and a number that differs between ranks would be worse than none.
    """
    world = agent_round(environ)
    if world is not None:  # all nodes know it
        return world
    worker = torchrun(environ)
    if worker is None or worker.local_size != worker.size:
        return 0
    return number(environ, "TORCHELASTIC_RESTART_COUNT") or 0


def mpi_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks by the variables of MPI launchers; None if unset; local."""
    sizes = (number(environ, name) for row in _OF_MPI for name in row.sizes)
    return max((size for size in sizes if size), default=None)


def mpi_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank in MPI.COMM_WORLD by an MPI launcher's variables; None if unset; local."""
    ranks = (number(environ, row.rank) for row in _OF_MPI)
    return next((rank for rank in ranks if rank is not None), None)


def usable_mpi_rank(environ: Mapping[str, str]) -> int | None:
    """Return mpi_rank(); None without MPI, or under torchrun, which inherits mpirun's variables."""
    if "TORCHELASTIC_RUN_ID" in environ or not built.read().mpis:
        return None
    return None if importlib.util.find_spec("mpi4py") is None else mpi_rank(environ)


def world_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank that a launcher gave to this process; None without one; local."""
    found = launched(environ)
    return None if found is None else found.rank


def describe(environ: Mapping[str, str]) -> str:
    """Describe what init_process_group("hsgd") would use in this environment; local."""
    if usable_mpi_rank(environ) is not None:
        return _MPI
    if "TORCHELASTIC_RUN_ID" in environ:
        here, all_ranks = environ.get("LOCAL_WORLD_SIZE"), environ.get("WORLD_SIZE")
        return _LOCAL if here == all_ranks else _LEADERS
    if (step := scheduled_step(environ)) is not None:
        return f"{_LOCAL if step.is_on_one_node else _LEADERS}, by {step.what}"
    return f"under mpirun {_MPI}; else {_LOCAL}, or on several nodes {_LEADERS}"


def refuse_alone(seen: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError if MPI sees one rank of a job that has more by its launcher; local.

    Otherwise each rank would silently work by itself, as rank 0 of 1. `seen` is the size of
    MPI.COMM_WORLD, `library` MPI's own name. Raises as launched_once, too.
    """
    if seen > 1:
        return
    found = launched_once(environ)
    if found is None or found.is_alone:
        return
    count = "this process beside others" if found.size is None else f"{found.size} ranks"
    remedy = found.launcher.remedy.format(found.size or "N")
    raise LaunchError(
        f"{found.what} started {count}, but {library} sees this one alone, so each would train by "
        f"itself; {remedy}. For a process that is alone on purpose: hsgd.Comm(MPI.COMM_SELF), or "
        "init() with that"
    )
