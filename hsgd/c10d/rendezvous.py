"""How the ranks of a new process group find one another, and what they communicate through.

Owns the choice: ranks that mpirun started meet over MPI, others through torch's store. Every wait
has the deadline of the group.
"""

from __future__ import annotations

import os

from hsgd.c10d.global_ranks import in_global_ranks
from hsgd.comm import Comm
from hsgd.config import Config
from hsgd.errors import HsgdError
from hsgd.job import launcher_variables
from hsgd.job.board import Board
from hsgd.job.launchers import mpi_rank
from hsgd.job.mpi_calls import communicator_of

__all__ = ["meet", "open_board"]


def open_board(store: object, rank: int, members: list[int], timeout_s: float) -> Board:
    """What the ranks of a group tell one another through; local. members: by group rank.

    A store may serve a second group of the same name, after the first was destroyed. torchrun's
    serves the workers that it starts again, too: perhaps not all before them came.
    """
    prefix = f"hsgd/{launcher_variables.restarts()}"
    return Board(store, rank, members, timeout_s, prefix=prefix, caller="init_process_group")


def meet(board: Board, config: Config) -> Comm:
    """The communicator of a new group; collective over its members, blocking.

    Raises CollectiveTimeout naming the ranks that did not join.
    """
    ranks = [rank for rank in board.exchange("rank", mpi_rank(os.environ)) if rank is not None]
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


def _over_mpi(ranks: list[int], config: Config) -> Comm:
    """All members have come; the others are not asked."""
    mpi = communicator_of(ranks, config, "the ranks of a group")
    try:
        return Comm(mpi, config)  # has a duplicate of its own
    finally:
        mpi.Free()
