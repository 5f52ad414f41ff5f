"""send, recv and recv_anysource over torch's gloo, which connects at the first message.

A gloo takes four descriptors and some threads, so a group uses that of an earlier group which has
all of its ranks, if there is one. The tags of its messages are moved behind those of that group.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hsgd.c10d import NAME, torch_versions
from hsgd.c10d.torch_versions import keep_from_dynamo
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.jobs.stores.board import Board

__all__ = ["PointToPoint", "draw_seat"]

# gloo has tags below 2**31: half of them belong to its own group, the others to 2,048 groups.
_OWN_TAGS = 1 << 30
_NUMBERS = 1 << 11
_TAGS = _OWN_TAGS // _NUMBERS

Seat = tuple[str, int]  # a key of _wholes, and the number of the group there; 0: in none

# Those with a gloo of their own, by the prefix of their keys.
_wholes: weakref.WeakValueDictionary[str, PointToPoint] = weakref.WeakValueDictionary()


@keep_from_dynamo
class _Message(dist.Work):
    """A message in flight; its errors name the other side."""

    def __init__(
        self,
        what: str,
        work: Any,
        tensors: list[torch.Tensor],
        limit: timedelta,
        ranks: Sequence[int],
    ) -> None:
        super().__init__()
        self._what, self._work, self._tensors = what, work, tensors
        self._limit, self._ranks = limit, ranks

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
        return self._ranks.index(int(self._work._source_rank()))


class PointToPoint:
    """Messages between the ranks of one group; `local` if all of them share this node.

    `seat` is what draw_seat() gave rank 0 of the group.
    """

    def __init__(self, board: Board, seat: Seat, *, local: bool) -> None:
        self._board, self._members = board, board.members
        self._limit = timedelta(seconds=board.timeout_s)
        self._ids: dict[int, int] = {}  # of tags that are not sent as they are
        self._lock = threading.Lock()
        self._whole: PointToPoint | None = None  # whose gloo this is, and ends with it
        where, self._number = seat
        if self._number:
            self._whole = _wholes.get(where)
            if self._whole is None:
                raise HsgdError(f"{NAME}: another rank has a group that this one destroyed")
            self._gloo: Any = self._whole._gloo
            self._ranks = [self._whole._members.index(member) for member in board.members]
            return
        self._ranks = list(range(len(board.members)))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._limit
        options._devices = [torch_versions.gloo_device("127.0.0.1" if local else "")]
        store = PrefixStore(f"{board.prefix}/messages", board.store)
        self._gloo = dist.ProcessGroupGloo(store, board.rank, len(self._ranks), options)
        _wholes[board.prefix] = self

    def close(self) -> None:
        """Lend the gloo to no other group; local."""
        _wholes.pop(self._board.prefix, None)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Message:
        """Start sending to a group rank; not blocking."""
        work = self._gloo.send(tensors, self._ranks[to], self._tag(tag))
        return self._message(f"send to rank {self._members[to]}", work, tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Message:
        """Start receiving from a group rank; not blocking."""
        work = self._gloo.recv(tensors, self._ranks[source], self._tag(tag))
        return self._message(f"recv from rank {self._members[source]}", work, tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> _Message:
        """Start receiving from the first rank that sends; not blocking."""
        work = self._gloo.recv_anysource(tensors, self._tag(tag))
        return self._message("recv from any rank", work, tensors)

    def _message(self, what: str, work: Any, tensors: list[torch.Tensor]) -> _Message:
        return _Message(what, work, tensors, self._limit, self._ranks)

    def _tag(self, tag: int) -> int:
        """Return the tag in the gloo, where those of two groups never meet."""
        if tag < 0:
            raise ValueError(f"tag {tag} is negative; use one from 0 to {2 * _OWN_TAGS - 1}")
        begin = _OWN_TAGS + self._number * _TAGS
        if self._number == 0:
            return tag if tag < _OWN_TAGS else begin + self._id(tag, _TAGS)
        direct = _TAGS // 2
        return begin + (tag if tag < direct else direct + self._id(tag, direct))

    def _id(self, tag: int, most: int) -> int:
        """Return a number below `most` for a large tag, equal on all ranks."""
        with self._lock:
            if tag not in self._ids:
                if self._board.count(f"tag/{tag}") == 1:  # the first rank of the group
                    self._board.publish(f"tag/{tag}/id", self._board.count("tags") - 1)
                self._ids[tag] = int(self._board.read(f"tag/{tag}/id"))
            if self._ids[tag] >= most:
                raise ValueError(
                    f"tag {tag}: more than {most} different tags from {_TAGS // 2} on in one "
                    "group; use smaller tags, or the same ones again"
                )
            return self._ids[tag]


def draw_seat(members: Sequence[int]) -> Seat:
    """Return where a group can send its messages: in a gloo that has all these ranks; local."""
    wanted = set(members)
    for where, whole in list(_wholes.items()) if torch_versions.gloo_is_lazy() else ():
        if wanted.issubset(whole._members):
            number = whole._board.count("numbers")
            return where, number if number < _NUMBERS else 0
    return "", 0
