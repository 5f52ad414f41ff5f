"""Set-up of a process group: over MPI for ranks of mpirun, else over torch's store."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Mapping, Sequence

from torch import distributed

from hsgd.comm.communicator import Comm, equal_settings
from hsgd.comm.connect.meeting_path import draw_meeting_path
from hsgd.comm.connect.mpi_calls import communicator_of, may_join, world_size
from hsgd.config import Config
from hsgd.errors import LaunchError
from hsgd.jobs.environment import launcher_variables
from hsgd.jobs.environment.launched_once import launched_once
from hsgd.jobs.environment.scheduled_step import scheduled_step
from hsgd.jobs.stores.board import Board

__all__ = ["meet", "open_board"]

# The ranks of open communicators of groups, and a token that no other communicator has: groups of
# two jobs, or with another order on each rank, have equal numbers.
_open: weakref.WeakKeyDictionary[Comm, tuple[list[int], str]] = weakref.WeakKeyDictionary()


def open_board(store: object, name: str, rank: int, members: list[int], timeout_s: float) -> Board:
    """Return the board on which the ranks of a group exchange values; local.

    The keys have the name of the group: torch's PrefixStore hides its prefix, and a sealed value
    that is copied to another group's key must not open there. A store may serve a second group of
    the same name after the first was destroyed. torchrun's store also serves restarted workers,
    perhaps before all earlier ones have connected.
    """
    prefix = f"hsgd/{launcher_variables.restarts()}/{name}"
    return Board(store, rank, members, timeout_s, prefix=prefix, caller="init_process_group")


def meet(board: Board, config: Config) -> Comm:
    """Make the communicator of a new group; collective over its members, blocking.

    Its errors call the ranks by their numbers in the job. If an earlier group shows that the ranks
    share a node, they meet there at once; a second group of the same ranks measures nothing.

    Raises:
        CollectiveTimeout: names the ranks that did not join.
        LaunchError: torch's variables make each rank of a launched job a job of its own.
    """
    size = os.environ.get("WORLD_SIZE")  # trust arguments, not an image's variables
    if size == str(len(board.members)) and not distributed.is_initialized():
        _refuse_alone(os.environ)
    settings = equal_settings(config)
    path = draw_meeting_path() if board.rank == 0 else ""
    near, (measured, known) = _on_node(board.members), _measured(board.members, config)
    rows = board.exchange("rank", [_mpi_rank(), near, measured, settings, path])
    ranks = [row[0] for row in rows if row[0] is not None]
    known = known if all(row[2] == measured for row in rows) else {}
    if len(set(ranks)) == len(board.members):
        comm = _over_mpi(ranks, config, board.members, known)
    elif near and all(row[1] == near and row[3] == settings for row in rows):
        comm = Comm.on_node(rows[0][4], board, config, known)
    else:
        comm = Comm.over_board(board, config, known)
    _open[comm] = list(board.members), hashlib.sha256(rows[0][4].encode()).hexdigest()
    return comm


def _on_node(members: Sequence[int]) -> str:
    """Return the token of a communicator in which these ranks share this node, or ""; local."""
    wanted = set(members)
    for comm, (ranks, token) in list(_open.items()):
        if not comm.closed and wanted.issubset(ranks):
            node_of = dict(zip(ranks, comm.nodes, strict=True))
            return token if len({node_of[rank] for rank in members}) == 1 else ""
    return ""


def _measured(members: Sequence[int], config: Config) -> tuple[str, dict[str, int]]:
    """Return token and measurements of a communicator of the same ranks, if there is one; local."""
    for comm, (ranks, token) in list(_open.items()):
        if not comm.closed and ranks == list(members) and (found := comm.measured(config)):
            return token, found
    return "", {}


def _mpi_rank() -> int | None:
    """Return the rank in MPI.COMM_WORLD, or None if MPI cannot connect the ranks; local."""
    step = scheduled_step()
    if step is None or (may_join(step) and world_size() > 1):
        return launcher_variables.usable_mpi_rank(os.environ)
    return None


def _refuse_alone(environ: Mapping[str, str]) -> None:
    """Refuse a group of one rank if a launcher started several; an image may set the variables."""
    found = launched_once(environ)
    if environ.get("WORLD_SIZE") != "1" or found is None or found.is_alone:
        return
    raise LaunchError(
        f'init_process_group("hsgd"): RANK={environ.get("RANK")} and WORLD_SIZE=1 make a job of '
        f"this process alone, but {found.what} started it beside others, so each would train by "
        "itself; set RANK and WORLD_SIZE of each rank from its launcher's variables, or start with "
        "`hsgd run`, which does"
    )


def _over_mpi(
    ranks: list[int], config: Config, members: Sequence[int], known: Mapping[str, int]
) -> Comm:
    """Make it over MPI; all members are there, and other ranks take no part."""
    mpi = communicator_of(ranks, config, "the ranks of a group")
    try:
        return Comm.over_mpi(mpi, config, members, known)  # duplicates it
    finally:
        mpi.Free()
