"""Layout of the running job, gathered over MPI; works without hsgd's native library."""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import dataclass

from hsgd.jobs.environment import launcher_variables
from hsgd.jobs.launch import launch

__all__ = ["JobTopology", "Node", "probe"]


@dataclass(frozen=True)
class Node:
    """Ranks that share memory."""

    host: str
    ranks: tuple[int, ...]
    cores: int


@dataclass(frozen=True)
class JobTopology:
    """The job as this rank sees it; `nodes` is filled on rank 0 only."""

    rank: int
    size: int
    nodes: tuple[Node, ...]
    problems: tuple[str, ...] = ()


def probe() -> JobTopology | None:
    """Gather the layout; collective, blocking. None if no MPI launcher started this process."""
    rank = launcher_variables.mpi_rank(os.environ)
    if rank is None:
        return None
    size = launcher_variables.mpi_size()
    if importlib.util.find_spec("mpi4py") is None:
        return JobTopology(
            rank, size or 1, (), ("mpi4py is not installed: the layout of the job is not known",)
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return JobTopology(rank, size or 1, (), (f"mpi4py does not load: {error}",))
    world = MPI.COMM_WORLD
    if size is not None and world.size != size:
        problem = f"the launcher started {size} ranks, mpi4py sees {world.size}: two different MPIs"
        return JobTopology(rank, size, (), (problem,))
    local = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    first = local.bcast(world.rank)
    local.Free()
    seen = world.gather((first, world.rank, socket.gethostname(), launch.cores()))
    groups: dict[int, list[tuple[int, str, int]]] = {}
    for leader, member, host, cores in seen or ():
        groups.setdefault(leader, []).append((member, host, cores))
    nodes = (Node(g[0][1], tuple(member for member, _, _ in g), g[0][2]) for g in groups.values())
    return JobTopology(world.rank, world.size, tuple(nodes))
