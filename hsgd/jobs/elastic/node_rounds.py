"""Rounds of nodes for the next world, by torch's rendezvous between the agents of all nodes.

torch's handler knows which nodes are left (keep-alives) and which wait to join, and lets a round
begin only after all have left the old one, which takes seconds. So if no node joins, the nodes left
of the last round form the next one without it. A job that can only have one node needs none of it.
"""

from __future__ import annotations

import json
import time
from typing import Any

from hsgd.errors import HsgdError
from hsgd.jobs.elastic.job_events import JobEvents
from hsgd.jobs.elastic.world_order import NodeRow, row_from, row_to
from hsgd.jobs.stores.board import Board
from hsgd.jobs.stores.sealed_store import ForeignValue, sealed

__all__ = ["NodeRounds", "OneNode", "Rounds"]

_KEEP_ALIVES = 4  # keep-alives that a node may miss
_JOIN_S = 10**7  # until the others reach a commit
_LAST_CALL_S = 1  # for nodes that come a little later
_ROWS_S = 5.0  # to write a row; a node that does not is lost
_AGAIN_S = 2.0  # for the nodes of the last round to return
_LOOK_S = 0.05
_ANEW = "anew"
_ROUNDS = "hsgd/agent/rounds"


class OneNode:
    """Rounds of this node alone."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, row: NodeRow) -> tuple[int, list[NodeRow], int]:
        """Return number (from 1), rows and own index of the next round; collective, blocking."""
        self._count += 1
        return self._count, [row], 0

    def others_wait(self) -> bool:
        """Return whether nodes wait to join; local."""
        return False


class NodeRounds:
    """Rounds over torch.distributed's c10d rendezvous.

    Args:
        store: a TCPStore of this object alone.
        job: name of the job.
        keep_alive_s: whole seconds between keep-alives of a node; each writes the names of all.
    """

    def __init__(self, store: Any, job: str, host: str, keep_alive_s: int) -> None:
        from torch.distributed import DistStoreError
        from torch.distributed.elastic.rendezvous import (
            RendezvousError,
            RendezvousParameters,
            RendezvousTimeoutError,
        )
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
            join_timeout=_JOIN_S,
            last_call_timeout=_LAST_CALL_S,
            keep_alive_interval=keep_alive_s,
            keep_alive_max_attempt=_KEEP_ALIVES,
        )
        self._late = (DistStoreError, RendezvousTimeoutError, KeyError)
        self._error: type[Exception] = RendezvousError
        # torch unpickles values from there: the seal proves that an agent of this job wrote them.
        own = self._numbers = self._store = sealed(store)
        self._events = JobEvents(own)
        self._members: list[str] = []
        self._number = 0
        try:
            backend = C10dRendezvousBackend(own, job)
        except RendezvousError as error:
            raise _in_one_line(error) from None
        self._handler = create_handler(store, backend, parameters)

    def next(self, row: NodeRow) -> tuple[int, list[NodeRow], int]:
        found = self._again(row)
        # A node that was stopped may read a round that the others formed without it.
        while found is None or all(other.node != row.node for other in found[1]):
            found = self._anew(row)
        number, rows = found
        self._members, self._number = [other.node for other in rows], number
        return number, rows, self._members.index(row.node)

    def others_wait(self) -> bool:
        try:
            return bool(self._handler.num_nodes_waiting())
        except self._error as error:
            raise _in_one_line(error) from None

    def _anew(self, row: NodeRow) -> tuple[int, list[NodeRow]] | None:
        """Form a round by torch's rendezvous; None, on all agents left, if a node was lost."""
        try:
            info = self._handler.next_rendezvous()
        except self._late:
            return None
        except self._error as error:
            raise _in_one_line(error) from None
        self._store = sealed(info.store)
        if info.rank == 0:
            _repeat_address(info)
        members = range(info.world_size)
        number = self._numbers.add(_ROUNDS, 1) if info.rank == 0 else 0
        try:
            board = Board(info.store, info.rank, members, _ROWS_S, prefix="hsgd", caller="agent")
            numbers = board.exchange("round", number)
            rows = board.exchange("rows", row_to(row))
        except (HsgdError, ValueError):  # ValueError: nodes saw different numbers of nodes
            return None
        return numbers[0], [row_from(found) for found in rows]

    def _again(self, row: NodeRow) -> tuple[int, list[NodeRow]] | None:
        """Form a round of the nodes left of the last one, without the seconds of a rendezvous.

        This works if all come soon and no node waits to join. All read one decision: the round, or
        "anew". The first agent that can decide writes it.
        """
        if not self._members:
            return None
        decision = f"again/{self._number}"
        self._store.set(f"{decision}/{row.node}", json.dumps(row_to(row)))
        end = time.monotonic() + _AGAIN_S
        while not self._store.check([decision]):
            ended = self._events.ended()
            left = [node for node in self._members if node not in ended]
            if time.monotonic() > end:
                self._store.compare_set(decision, "", _ANEW)
            elif left[0] == row.node:
                self._decide(decision, [f"{decision}/{node}" for node in left])
            time.sleep(_LOOK_S)
        told = self._store.get(decision).decode()
        if told == _ANEW:
            return None
        number, rows = json.loads(told)
        return number, [row_from(found) for found in rows]

    def _decide(self, decision: str, keys: list[str]) -> None:
        """Write the decision, if possible; called by the first node that is left."""
        if self.others_wait():
            self._store.compare_set(decision, "", _ANEW)
        elif self._store.check(keys):
            rows = [json.loads(self._store.get(key)) for key in keys]
            told = json.dumps([self._numbers.add(_ROUNDS, 1), rows])
            self._store.compare_set(decision, "", told)


Rounds = OneNode | NodeRounds


def _in_one_line(error: Exception) -> RuntimeError:
    """Return the cause of an error in torch's rendezvous."""
    cause = error.__cause__
    return cause if isinstance(cause, ForeignValue) else RuntimeError(str(error))


def _repeat_address(info: Any) -> None:
    """Publish the address for new nodes, as torch's handler does only in its first round."""
    address = getattr(info, "bootstrap_store_info", None)
    if address is not None:
        info.store.set(address.MASTER_ADDR_KEY, address.master_addr)
        info.store.set(address.MASTER_PORT_KEY, str(address.master_port))
