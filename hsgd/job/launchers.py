"""Which way the ranks of a torch.distributed job will meet, read from the environment.

Owns the reading of the variables of mpirun and torchrun. Never loads MPI or torch: `hsgd info`
asks too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from hsgd import built

__all__ = ["describe", "mpi_rank"]

_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_LOCAL = "shared memory of this node, without MPI"
_LEADERS = "shared memory inside nodes, TCP between their leaders, without MPI"
_MPI = "two-level collectives over MPI"


def mpi_rank(environ: Mapping[str, str]) -> int | None:
    """The rank that mpirun gave this process; None where MPI cannot be used; local.

    A worker of torchrun inherits the variables of an mpirun that started torchrun itself: they are
    not its own.
    """
    if "TORCHELASTIC_RUN_ID" in environ or not built.read().mpis:
        return None
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return next((int(environ[name]) for name in _MPI_RANKS if environ.get(name)), None)


def describe(environ: Mapping[str, str]) -> str:
    """In words: what init_process_group("hsgd") would use in this environment; local."""
    if mpi_rank(environ) is not None:
        return _MPI
    if "TORCHELASTIC_RUN_ID" in environ:
        here, all_ranks = environ.get("LOCAL_WORLD_SIZE"), environ.get("WORLD_SIZE")
        return _LOCAL if here == all_ranks else _LEADERS
    return f"under mpirun {_MPI}; else {_LOCAL}, or on several nodes {_LEADERS}"
