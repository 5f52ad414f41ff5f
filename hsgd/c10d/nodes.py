"""Nodes: the collectives of several nodes without MPI, shared memory inside and gloo between the
first ranks of the nodes.

Owns the order of the two levels. Takes flat torch tensors of equal size on all ranks. After an
error it is broken: the leader's end of gloo is closed, so that the other nodes notice, and the
reason is left in the store for them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
)

from hsgd.c10d.group_store import Board, in_global_ranks
from hsgd.comm import Comm, Op
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost

__all__ = ["Nodes"]

_REASON_S = 3.0  # for the node where a rank died to see it, and to say so
_TEXT_BYTES = 512
_GLOO_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}


class Nodes:
    """Collectives like those of Comm; each is collective and blocking.

    local: the ranks of this node. nodes: group ranks of each node, ascending; the first leads.
    """

    def __init__(self, local: Comm, nodes: list[list[int]], board: Board) -> None:
        self._local, self._nodes, self._board = local, nodes, board
        self._node = next(k for k, node in enumerate(nodes) if board.rank in node)
        self._gloo: Any = None
        self._reason = ""
        self.rank, self.size = board.rank, len(board.members)
        if local.rank == 0:
            store = PrefixStore(f"{board.prefix}/leaders", board.store)
            limit = timedelta(seconds=board.timeout_s)
            self._gloo = dist.ProcessGroupGloo(store, self._node, len(nodes), limit)
            leave = weakref.WeakMethod(self._leave)  # a dropped group closes at once
            local.before_close(lambda: (method := leave()) and method())

    def before_close(self, function: Callable[[], object]) -> None:
        """See Comm.before_close."""
        self._local.before_close(function)

    def close(self) -> None:
        """Give everything back; local. A second call does nothing."""
        self._local.close()

    def _leave(self) -> None:
        """The other nodes see that gloo's connections end: leave word why."""
        if not self._reason:
            rank = self._board.members[self.rank]
            self._board.break_off(f"rank {rank} closed its communicator")
        self._gloo = None

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Let errors name ranks of the job, and the other nodes hear of them."""
        if self._reason:
            raise HsgdError(f"the process group is broken by an earlier error: {self._reason}")
        try:
            yield
        except HsgdError as error:
            members = self._board.members
            own = [members[rank] for rank in self._nodes[self._node]]
            raised = error if self._reason else in_global_ranks(error, own)
            self._reason = str(raised)
            self._board.break_off(self._reason)
            self._gloo = None
            raise raised from None

    def _between(self, what: str, call: Callable[[Any], Any]) -> None:
        """The leader's part, `call(gloo)`; all ranks of the node learn how it ended."""
        text = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        if self._gloo is not None:
            try:
                call(self._gloo).wait()
            except RuntimeError as error:
                cause = self._board.broken(_REASON_S) or str(error).splitlines()[0]
                encoded = f"{what} between nodes: {cause}".encode()[:_TEXT_BYTES]
                text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        self._local.broadcast(text)
        reason = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
        if reason:
            self._reason = reason
            late = "imed out" in reason or "did not" in reason
            raise (CollectiveTimeout if late else PeerLost)(reason)

    def allreduce(self, array: torch.Tensor, op: Op, out: torch.Tensor) -> None:
        """See Comm.allreduce; "mean" divides the sum once."""
        options = AllreduceOptions()
        options.reduceOp = _GLOO_OPS[op]
        with self._breaking():
            self._local.allreduce(array, "sum" if op == "mean" else op, out)
            self._between("allreduce", lambda gloo: gloo.allreduce([out], options))
            if op == "mean":
                out.div_(self.size)
            self._local.broadcast(out)

    def broadcast(self, array: torch.Tensor, root: int) -> None:
        """See Comm.broadcast."""
        node = next(k for k, members in enumerate(self._nodes) if root in members)
        options = BroadcastOptions()
        options.rootRank = node
        with self._breaking():
            if node == self._node:
                self._local.broadcast(array, self._nodes[node].index(root))
            self._between("broadcast", lambda gloo: gloo.broadcast([array], options))
            if node != self._node:
                self._local.broadcast(array)

    def allgather(self, array: torch.Tensor, out: torch.Tensor) -> None:
        """See Comm.allgather; the size is equal on all ranks."""
        rows, most = len(array), max(map(len, self._nodes))
        block = array.new_empty(most * rows)  # gloo takes equal blocks: small nodes fill theirs
        blocks = array.new_empty(len(self._nodes) * most * rows)
        with self._breaking():
            self._local.allgather(array, block[: self._local.size * rows])
            self._between("allgather", lambda gloo: gloo._allgather_base(blocks, block))
            self._local.broadcast(blocks)
        by_place = blocks.view(len(self._nodes), most, rows)
        by_rank = out.view(self.size, rows)
        for k, members in enumerate(self._nodes):
            by_rank[members] = by_place[k, : len(members)]

    def reduce_scatter(self, array: torch.Tensor, op: Op, out: torch.Tensor) -> None:
        """See Comm.reduce_scatter; each rank keeps the same number of rows."""
        total = torch.empty_like(array)
        self.allreduce(array, op, total)
        out.copy_(total[self.rank * len(out) : (self.rank + 1) * len(out)])

    def alltoall(self, array: torch.Tensor, send_counts: Sequence[int], out: torch.Tensor) -> None:
        """See Comm.alltoall: all goes over the leaders."""
        counts = torch.empty(self.size * self.size, dtype=torch.int64)
        self.allgather(torch.tensor(send_counts, dtype=torch.int64), counts)
        sent = counts.view(self.size, self.size).tolist()
        mine, spare = self._nodes[self._node], [0] * (self._local.size - 1)
        with self._breaking():
            gathered, _ = self._local.alltoall(array, [len(array), *spare])
            to_nodes = [sum(sent[a][b] for a in mine for b in node) for node in self._nodes]
            from_nodes = [sum(sent[a][b] for a in node for b in mine) for node in self._nodes]
            packed = received = array.new_empty(sum(from_nodes))
            if self._gloo is not None:
                keys = [(a, b) for a in mine for b in range(self.size)]
                pieces = _cut(gathered, keys, sent)
                packed = torch.cat(
                    [pieces[a, b] for node in self._nodes for a in mine for b in node]
                )
            self._between(
                "alltoall",
                lambda gloo: gloo.alltoall_base(received, packed, from_nodes, to_nodes),
            )
            to_local = [0] * self._local.size
            if self._gloo is not None:
                keys = [(a, b) for node in self._nodes for a in node for b in mine]
                pieces = _cut(received, keys, sent)
                packed = torch.cat([pieces[a, b] for b in mine for a in range(self.size)])
                to_local = [sum(sent[a][b] for a in range(self.size)) for b in mine]
            else:
                packed = packed[:0]
            self._local.alltoall(packed, to_local, out)

    def barrier(self) -> None:
        """See Comm.barrier."""
        with self._breaking():
            self._local.barrier()
            self._between("barrier", lambda gloo: gloo.barrier())
            # what tells the ranks how it ended also holds them until it has


def _cut(
    packed: torch.Tensor, keys: list[tuple[int, int]], sent: list[list[int]]
) -> dict[tuple[int, int], torch.Tensor]:
    """The parts of `packed`, one for each (source, destination), in the order of `keys`."""
    ends = accumulate(sent[a][b] for a, b in keys)
    return {(a, b): packed[end - sent[a][b] : end] for (a, b), end in zip(keys, ends, strict=True)}
