"""Which nodes form the next world: torch's rendezvous, in which each node's agent takes part once.

Owns the choice of the engine, its times, and the rows that agents exchange. torch's handler knows
who is left (keep-alives), who waits to join, and that all left the old round before a new one
begins. Never knows of ranks. A job that can only ever have one node needs none of it.
"""

from __future__ import annotations

from typing import Any, Protocol

from hsgd.agent.world_order import NodeRow, row_from, row_to
from hsgd.errors import HsgdError
from hsgd.job.board import Board

__all__ = ["NodeRounds", "OneNode", "Rounds"]

_KEEP_ALIVE_S = 1
_KEEP_ALIVES = 4  # that a node may miss: it is out after as many seconds
_LAST_CALL_S = 1  # for nodes that come a little later
_ROWS_S = 5.0  # to write a row; a node that does not was lost just then
_ROUNDS = "hsgd/agent/rounds"


class Rounds(Protocol):
    """What forms rounds of nodes."""

    def next(self, row: NodeRow) -> tuple[int, list[NodeRow], int]:
        """The number of the new round, from 1, the rows of its nodes and the index of the own one;
        collective over the agents that are left, blocking."""

    def others_wait(self) -> bool:
        """Whether nodes wait to join; local."""


class OneNode:
    """Rounds of this node alone."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, row: NodeRow) -> tuple[int, list[NodeRow], int]:
        self._count += 1
        return self._count, [row], 0

    def others_wait(self) -> bool:
        return False


class NodeRounds:
    """Rounds over torch.distributed's c10d rendezvous.

    store: a TCPStore of this object alone. job: names the job. limit_s: how long a round may wait
    for nodes.
    """

    def __init__(self, store: Any, job: str, host: str, limit_s: float) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
            C10dRendezvousBackend,
        )
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        parameters = RendezvousParameters(
            "c10d",
            "",
            job,
            min_nodes=1,
            max_nodes=1 << 16,
            local_addr=host,
            join_timeout=int(limit_s),
            last_call_timeout=_LAST_CALL_S,
            keep_alive_interval=_KEEP_ALIVE_S,
            keep_alive_max_attempt=_KEEP_ALIVES,
        )
        self._store = store
        self._handler = create_handler(store, C10dRendezvousBackend(store, job), parameters)

    def next(self, row: NodeRow) -> tuple[int, list[NodeRow], int]:
        while True:
            info = self._handler.next_rendezvous()
            found = self._exchange(info.store, info.rank, info.world_size, row)
            if found is not None:
                return found[0], found[1], info.rank

    def others_wait(self) -> bool:
        return bool(self._handler.num_nodes_waiting())

    def _exchange(
        self, store: Any, index: int, count: int, row: NodeRow
    ) -> tuple[int, list[NodeRow]] | None:
        """None where a node was lost meanwhile, on all that are left alike: rank 0 tells."""
        board = Board(store, index, range(count), _ROWS_S, prefix="hsgd", caller="agent")
        number = self._store.add(_ROUNDS, 1) if index == 0 else 0
        try:
            numbers = board.exchange("round", number)
            rows = board.exchange("rows", row_to(row))
        except HsgdError:
            return None
        return numbers[0], [row_from(found) for found in rows]
