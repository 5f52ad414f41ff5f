"""The job that a launcher started this process for, as the launcher's variables tell it.

Owns the names of those variables that give the number of ranks, or a rank. Never loads MPI or
torch: `hsgd info` asks too. What MPI itself sees is the caller's to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hsgd.errors import LaunchError

__all__ = [
    "AGENT_ROUND",
    "Torchrun",
    "agent_round",
    "mpi_size",
    "refuse_alone",
    "restarts",
    "torchrun",
    "world_rank",
]

AGENT_ROUND = "HSGD_AGENT_ROUND"

# Launchers that start each rank of an MPI job themselves.
_MPI_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an mpiexec of MPICH or Intel MPI",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's launcher",
}
# And the rank, the innermost launcher first.
_WORLD_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Torchrun:
    """A worker of torchrun: its rank, how many there are, and how many of them on this node."""

    rank: int
    size: int
    local_size: int


@dataclass(frozen=True)
class _Launched:
    """Who says that there are how many ranks, and how to start them instead."""

    what: str
    size: int
    remedy: str


def torchrun(environ: Mapping[str, str] = os.environ) -> Torchrun | None:
    """What torchrun told this worker; None where this process is none of its workers; local.

    One that inherits the variables of an mpirun that started torchrun itself is a worker too.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    size = _number(environ, "WORLD_SIZE") or 1
    return Torchrun(
        _number(environ, "RANK") or 0, size, _number(environ, "LOCAL_WORLD_SIZE") or size
    )


def agent_round(environ: Mapping[str, str] = os.environ) -> int | None:
    """The world of a worker of `hsgd run --min-np`, counted from 1; None elsewhere; local."""
    return _number(environ, AGENT_ROUND)


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started this job's workers again; 0 without torchrun; local.

    For keys in torchrun's store: it outlives the workers, and a worker that was started again must
    not find what a dead one left. Each node's agent counts its own restarts only, so that this is
    0 where there are several nodes: a number that differs between ranks would be worse than none.
    """
    world = agent_round(environ)
    if world is not None:  # of which all nodes know
        return world
    worker = torchrun(environ)
    if worker is None or worker.local_size != worker.size:
        return 0
    return _number(environ, "TORCHELASTIC_RESTART_COUNT") or 0


def mpi_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Ranks that an MPI launcher says it started; None where none says it; local."""
    return max((size for name in _MPI_SIZES if (size := _number(environ, name))), default=None)


def refuse_alone(seen: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError where MPI sees one rank of a job that its launcher says has more; local.

    Without this each rank would work by itself, as rank 0 of 1, and nobody would notice.

    seen: the size of MPI.COMM_WORLD. library: what MPI calls itself.
    """
    launched = _launched(environ)
    if seen > 1 or launched is None or launched.size <= 1:
        return
    raise LaunchError(
        f"{launched.what} started {launched.size} ranks, but {library} sees this one alone, so "
        f"each would train by itself; {launched.remedy}. For a process that is alone on purpose: "
        "hsgd.Comm(MPI.COMM_SELF), or init() with that"
    )


def world_rank(environ: Mapping[str, str]) -> int | None:
    """The rank that a launcher gave to a process; None where none did; local."""
    ranks = (_number(environ, name) for name in _WORLD_RANKS)
    return next((rank for rank in ranks if rank is not None), None)


def _launched(environ: Mapping[str, str]) -> _Launched | None:
    """The innermost launcher that gives a number of ranks.

    An allocation is no launch: the variables of Slurm count only in a step that srun made, which
    has SLURM_STEP_NUM_TASKS beside SLURM_STEP_ID. A batch script, the shell of salloc, and what
    these start by themselves are one process each, whatever SLURM_NTASKS says. An mpirun inside
    of a step counts before the step, which may be the one of its own daemons.
    """
    worker = torchrun(environ)
    if worker is not None:
        return _Launched(
            "torchrun", worker.size, "leave the communicator out: hsgd.Comm(), hsgd.init()"
        )
    start = "start with `hsgd run -np {}`, or the mpirun of that MPI"
    for name, what in _MPI_SIZES.items():
        size = _number(environ, name) or 0
        if size and size == mpi_size(environ):
            return _Launched(f"{what} ({name}={size})", size, start.format(size))
    if size := _number(environ, "HOROVOD_SIZE") or 0:  # horovodrun --gloo
        remedy = f"use `horovodrun --mpi`, or `hsgd run -np {size}`"
        return _Launched(f"horovodrun without MPI (HOROVOD_SIZE={size})", size, remedy)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        size = _number(environ, "SLURM_STEP_NUM_TASKS") or 0
        remedy = f"name this MPI's interface (`srun --mpi=list`), or {start.format(size)}"
        return _Launched(f"srun (SLURM_STEP_NUM_TASKS={size})", size, remedy)
    if "RANK" in environ and (size := _number(environ, "WORLD_SIZE") or 0):
        what = f"a launcher that sets RANK={environ['RANK']} and WORLD_SIZE={size}"
        return _Launched(what, size, f"start with torchrun, mpirun or `hsgd run -np {size}`")
    return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
