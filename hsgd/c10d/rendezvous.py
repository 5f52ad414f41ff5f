"""How the ranks of a new process group find one another, and what they communicate through.

Owns the choice: ranks that mpirun started meet over MPI, others through torch's store. Every wait
has the deadline of the group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hsgd.c10d.global_ranks import in_global_ranks
from hsgd.comm.communicator import Comm
from hsgd.comm.connect.mpi_calls import communicator_of
from hsgd.config import Config
from hsgd.errors import HsgdError, LaunchError
from hsgd.jobs.environment import launcher_variables
from hsgd.jobs.environment.launched_once import launched_once
from hsgd.jobs.stores.board import Board
from torch import distributed

__all__ = ["meet", "open_board"]


def open_board(store: object, name: str, rank: int, members: list[int], timeout_s: float) -> Board:
    """What the ranks of a group tell one another through; local. members: by group rank.

    The keys have the name of the group: torch's PrefixStore hides its prefix, and a sealed value
    that somebody copies to another group's key must not open there.
    A store may serve a second group of the same name, after the first was destroyed. torchrun's
    serves the workers that it starts again, too: perhaps not all before them came.
    """
    prefix = f"hsgd/{launcher_variables.restarts()}/{name}"
    return Board(store, rank, members, timeout_s, prefix=prefix, caller="init_process_group")


def meet(board: Board, config: Config) -> Comm:
    """The communicator of a new group; collective over its members, blocking.

    Raises CollectiveTimeout naming the ranks that did not join, and LaunchError where the variables
    of torch make a job of each rank that a launcher started.
    """
    size = os.environ.get("WORLD_SIZE")  # arguments are believed, an image's variables are not
    if size == str(len(board.members)) and not distributed.is_initialized():
        _refuse_alone(os.environ)
    ranks = [
        rank
        for rank in board.exchange("rank", launcher_variables.usable_mpi_rank(os.environ))
        if rank is not None
    ]
    if len(set(ranks)) == len(board.members):
        return _over_mpi(ranks, config)
    try:
        return Comm.over_store(
            board.store,
            board.rank,
            len(board.members),
            prefix=f"{board.prefix}/comm",
            config=config,
        )
    except HsgdError as error:
        raise in_global_ranks(error, board.members) from None


def _refuse_alone(environ: Mapping[str, str]) -> None:
    """An image may set these for a process alone, and mpirun start many."""
    found = launched_once(environ)
    if environ.get("WORLD_SIZE") != "1" or found is None or found.is_alone:
        return
    raise LaunchError(
        f'init_process_group("hsgd"): RANK={environ.get("RANK")} and WORLD_SIZE=1 make a job of '
        f"this process alone, but {found.what} started it beside others, so each would train by "
        "itself; set RANK and WORLD_SIZE of each rank from its launcher's variables, or start with "
        "`hsgd run`, which does"
    )


def _over_mpi(ranks: list[int], config: Config) -> Comm:
    """All members have come; the others are not asked."""
    mpi = communicator_of(ranks, config, "the ranks of a group")
    try:
        return Comm(mpi, config)  # has a duplicate of its own
    finally:
        mpi.Free()
