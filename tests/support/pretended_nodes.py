"""Ranks of this machine that meet through a store, on nodes that a test says they are on."""

from __future__ import annotations

from typing import Any

from hsgd import Comm
from hsgd.comm.connect import own_node, tcp_meeting
from hsgd.config import Config
from hsgd.jobs.stores.board import Board
from ranks import PATIENT, Seat

__all__ = ["meet"]


def meet(
    seat: Seat, folder: str, nodes: list[int] | None, config: Config = PATIENT, **more: Any
) -> Comm:
    """A communicator over TCP; collective. nodes: the node of each rank; None finds out.
    more: arguments of Comm.over_store(), and `store` and `size` in place of the usual ones; or
    `members`, how errors call the ranks.
    """
    from torch.distributed import FileStore

    size = more.pop("size", len(nodes or "1234"))
    find = own_node.find_nodes if nodes is None else lambda *_: nodes
    tcp_meeting.find_nodes = find
    store = more.pop("store", None) or FileStore(f"{folder}/store", -1)
    if "members" in more:
        board = Board(
            store, seat.rank, **more, timeout_s=config.timeout_s, prefix="", caller="Comm"
        )
        return Comm.over_board(board, config)
    return Comm.over_store(store, seat.rank, size, config=config, **more)
