"""How the ranks of a new process group find one another, and what they communicate through.

Owns the exchange over torch's store. Ranks that mpirun started meet over MPI; others learn who
shares a node by connecting to one another's sockets, because host names prove nothing, and meet in
shared memory, at a name and with a secret that nobody has seen before. Every wait has the deadline
of the group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterator

from hsgd.c10d.group_store import Board
from hsgd.c10d.launchers import mpi_rank
from hsgd.c10d.nodes import Nodes
from hsgd.comm import Comm
from hsgd.config import Config
from hsgd.job import launcher_variables
from hsgd.job.meeting_path import draw_meeting_path

__all__ = ["meet"]


def meet(board: Board, config: Config) -> Comm | Nodes:
    """The collectives of a new group; collective over its members, blocking.

    Raises CollectiveTimeout naming the ranks that did not come.
    """
    with _listening(len(board.members)) as name:
        path = draw_meeting_path()
        seen = board.exchange("rank", [mpi_rank(os.environ), name, path])
        ranks = [rank for rank, *_ in seen if rank is not None]
        if len(set(ranks)) == len(seen):
            return _over_mpi(ranks, config)
        names = [name for _, name, _ in seen]
        firsts = board.exchange("node", next(k for k, each in enumerate(names) if _reaches(each)))
    nodes = [
        [rank for rank, first in enumerate(firsts) if first == node] for node in sorted({*firsts})
    ]
    mine = next(node for node in nodes if board.rank in node)
    path = seen[mine[0]][2]
    local = Comm.local(path, mine.index(board.rank), len(mine), config)
    return local if len(nodes) == 1 else Nodes(local, nodes, board)


def _over_mpi(ranks: list[int], config: Config) -> Comm:
    """All members have come, so that this cannot wait for ever; the others are not asked."""
    from mpi4py import MPI

    launcher_variables.refuse_alone(MPI.COMM_WORLD.size, " ".join(map(str, MPI.get_vendor()[:1])))
    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    mpi = MPI.COMM_WORLD.Create_group(group)
    try:
        return Comm(mpi, config)  # has a duplicate of its own
    finally:
        mpi.Free()
        group.Free()


@contextlib.contextmanager
def _listening(backlog: int) -> Iterator[str]:
    """The name of a socket that the processes of this network namespace can reach, and no others:
    abstract sockets need no file.
    """
    name = f"hsgd-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen(backlog)
        yield name


def _reaches(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0{name}")
        except BlockingIOError:
            return True  # its queue is full: it is there
        except OSError:
            return False
        return _user_of(probe) in (os.geteuid(), 0)  # and not who took the same name elsewhere


def _user_of(connection: socket.socket) -> int:
    """Who listens at the other end."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    option = (socket.SOL_SOCKET, socket.SO_PEERCRED)
    return int(credentials.unpack(connection.getsockopt(*option, credentials.size))[1])
