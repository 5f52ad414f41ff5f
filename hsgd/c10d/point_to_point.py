"""send, recv and recv_anysource over torch's gloo, which connects at the first message."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hsgd.c10d import torch_versions
from hsgd.c10d.torch_versions import keep_from_dynamo
from hsgd.errors import CollectiveTimeout, PeerLost
from hsgd.jobs.stores.board import Board

__all__ = ["PointToPoint"]


@keep_from_dynamo
class _Message(dist.Work):
    """A message in flight; its errors name the other side."""

    def __init__(self, what: str, work: Any, tensors: list[torch.Tensor], limit: timedelta) -> None:
        super().__init__()
        self._what, self._work, self._tensors, self._limit = what, work, tensors, limit

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message is through; blocking. Raises PeerLost or CollectiveTimeout."""
        limit = timeout if timeout is not None and timeout > timedelta(0) else self._limit
        begin = time.monotonic()
        try:
            return bool(self._work.wait(limit))
        except RuntimeError as error:  # gloo has no other class
            late = time.monotonic() - begin >= limit.total_seconds()
            text = str(error).splitlines()[0]
            raise (CollectiveTimeout if late else PeerLost)(f"{self._what}: {text}") from None

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """Wait for the message, and return a future that is done."""
        future: Any = torch.futures.Future()
        try:
            self.wait()
            future.set_result(self._tensors)
        except (PeerLost, CollectiveTimeout) as error:
            future.set_exception(error)
        return future

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


class PointToPoint:
    """Messages between the ranks of one group; `local` if all of them share this node."""

    def __init__(self, board: Board, *, local: bool) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._limit = timedelta(seconds=board.timeout_s)
        options._devices = [torch_versions.gloo_device("127.0.0.1" if local else "")]
        store = PrefixStore(f"{board.prefix}/messages", board.store)
        self._members = board.members
        self._gloo: Any = dist.ProcessGroupGloo(store, board.rank, len(board.members), options)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Message:
        """Start sending to a group rank; not blocking."""
        work = self._gloo.send(tensors, to, tag)
        return _Message(f"send to rank {self._members[to]}", work, tensors, self._limit)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Message:
        """Start receiving from a group rank; not blocking."""
        work = self._gloo.recv(tensors, source, tag)
        return _Message(f"recv from rank {self._members[source]}", work, tensors, self._limit)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> _Message:
        """Start receiving from the first rank that sends; not blocking."""
        work = self._gloo.recv_anysource(tensors, tag)
        return _Message("recv from any rank", work, tensors, self._limit)
