"""Refusal of nested launchers, as `srun -n2 torchrun --standalone`, that make two jobs of one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

from hsgd.errors import LaunchError
from hsgd.jobs.environment.launchers import FOR_TORCH, LAUNCHERS, Launched, launched_in, number

__all__ = ["launched_once"]

_MPIRUNS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "mpirun_rsh"}
_MOST_PARENTS = 64


def launched_once(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the innermost launcher, as launched(); local.

    Raises LaunchError if this process's job belongs to one of several tasks of an outer launcher:
    otherwise each task would silently train by itself.
    """
    every = launched_in(environ)
    named = [each for each in every if each.launcher is not FOR_TORCH]
    for inner, outer in itertools.pairwise(named):
        if _is_of_one_task(inner, environ) and _is_one_of_several(outer):
            if inner.launcher.counts_for_mpi and not _has_mpirun_above():
                continue  # `outer` started the daemons of an mpirun over all hosts
            raise LaunchError(_refusal(inner, outer, environ))
    return every[0] if every else None


def _is_of_one_task(inner: Launched, environ: Mapping[str, str]) -> bool:
    """Return whether one process started all ranks: mpirun of one rank, torchrun of one agent."""
    local = number(environ, inner.launcher.local_size)
    return inner.is_alone or (
        inner.launcher.name == "torchrun" and inner.size is not None and inner.size == local
    )


def _is_one_of_several(outer: Launched) -> bool:
    """Return whether this is certain: without a size, rank 0 may be alone."""
    return outer.size > 1 if outer.size is not None else bool(outer.rank)


def _refusal(inner: Launched, outer: Launched, environ: Mapping[str, str]) -> str:
    rows = LAUNCHERS[LAUNCHERS.index(inner.launcher) + 1 : -1]
    own = {inner.launcher.rank, *inner.launcher.sizes}
    names = [name for row in rows for name in (row.rank, *row.sizes) if name in environ]
    count = f"one of {outer.size} tasks" if outer.size else "one of several tasks"
    ranks = "1 rank" if inner.is_alone else f"all {inner.size} ranks"
    return (
        f"{inner.what} started {ranks} of this job in {count} of {outer.what}, so each task would "
        "train by itself; start one job for all tasks (torchrun --nnodes=..., or `hsgd run` or "
        "mpirun once, outside), or, if a job for each task is meant, unset "
        f"{', '.join(name for name in dict.fromkeys(names) if name not in own)}"
    )


def _has_mpirun_above() -> bool:
    """Return whether an mpirun on this host is an ancestor of this process; False if unknown."""
    pid = os.getppid()
    for _ in range(_MOST_PARENTS):
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                name, _, rest = stat.read().partition(b"(")[2].rpartition(b") ")
        except OSError:
            return False
        if name.decode(errors="replace") in _MPIRUNS:
            return True
        pid = int(rest.split()[1])
    return False
