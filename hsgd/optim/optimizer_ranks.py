"""OptimizerRanks: the ranks of an optimizer, and the communicators that it splits off."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from hsgd.comm.agree import agree
from hsgd.comm.communicator import Comm
from hsgd.config import Config
from hsgd.jobs.stores.board import Board

__all__ = ["OptimizerRanks", "Terms", "refusals_told", "weakly"]

_T = TypeVar("_T")
Terms = Callable[[], Mapping[str, object]]
"""What must be equal on all ranks, by name."""
_meetings = itertools.count()


class OptimizerRanks:
    """The ranks of one optimizer; made collectively over them, blocking.

    Each rank is a worker, unless divide() forms larger ones. Raises what agree() raises, and
    TypeError for other types of `given`.

    Args:
        given: a Comm, a torch.distributed process group of any backend, or None for this rank alone
            (local).
        what: the name of the optimizer, for errors.
        terms: values that must be equal on all ranks; they are compared first.

    Attributes:
        comm: all ranks.
        between: the first ranks of the workers; None on other ranks.
        count: the number of workers.
    """

    def __init__(self, given: Any, what: str, terms: Terms) -> None:
        self.comm, self._owned = _comm_of(given, what)
        self._made = [self.comm] if self._owned else []
        self._forget: weakref.finalize[[Any], Any] | None = None
        self.between: Comm | None = self.comm
        self.count = self.comm.size
        try:
            agree(self.comm, what, terms)
        except BaseException:
            self.leave()
            raise

    def split(self, color: int | None) -> Comm | None:
        """Return a communicator per color, in rank order, until leave(); collective, blocking."""
        made = self.comm.split(color, key=self.comm.rank)
        self._made += [made] if made is not None else []
        return made

    def divide(self, group_size: int | None, what: str) -> Comm:
        """Form workers and return the communicator of this rank's worker; collective, blocking.

        A worker has the ranks of a node, or `group_size` consecutive ranks. Raises ValueError, with
        a message that begins with `what`, if `group_size` does not divide the number of ranks.
        """
        if group_size is None:
            number = self.comm.cross_rank
        elif isinstance(group_size, int) and group_size >= 1 and self.comm.size % group_size == 0:
            number = self.comm.rank // group_size
        else:
            raise ValueError(f"{what} is {group_size}; give a divisor of {self.comm.size} ranks")
        members = self.split(number)
        assert members is not None
        leads = members.rank == 0
        self.count = int(self.comm.allreduce(np.array([leads], np.int64), name="workers")[0])
        self.between = self.split(0 if leads else None)
        return members

    def before_close(self, method: Callable[[], object]) -> None:
        """Call a weakly held method before the user's communicator closes, unless left before."""
        if self._owned:
            return
        call = weakly(method, None)
        self.comm.before_close(call)
        owner = method.__self__  # type: ignore[attr-defined]
        self._forget = weakref.finalize(owner, self.comm.not_before_close, call)
        self._forget.atexit = False

    def abort(self) -> None:
        """Break the communicators made here, which ends waits; local, from any thread."""
        for comm in self._made:
            if not comm.closed:
                comm.abort()

    def leave(self, abort: bool = False) -> None:
        """Close the communicators made here; with `abort`, no rank waits for this one."""
        if self._forget is not None:
            self._forget()
        with contextlib.ExitStack() as last_first:
            for comm in self._made:
                last_first.callback(comm.close)
                if abort and not comm.closed:
                    last_first.callback(comm.abort)


@contextlib.contextmanager
def refusals_told(given: Any, what: str) -> Iterator[None]:
    """Send errors of argument checks to ranks in agree(); local, collective if the block raises."""
    try:
        yield
    except Exception as error:
        refusal = error  # Python deletes `error` at the end of the block

        def refuse() -> Mapping[str, object]:
            raise refusal

        if given is not None:
            OptimizerRanks(given, what, refuse)
        raise


def _comm_of(given: Any, what: str) -> tuple[Comm, bool]:
    """Return the communicator for `given`, and whether it is new; collective."""
    if isinstance(given, Comm):
        return given, False
    if given is None:
        return Comm.local(f"@hsgd-{secrets.token_hex(16)}", 0, 1), True
    if not dist.is_available() or not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"{what}: comm is a {type(given).__name__}; give a Comm or a process group of "
            "torch.distributed"
        )
    rank, size = dist.get_rank(given), dist.get_world_size(given)
    # Ranks may have made different numbers of calls, so all use the first rank's number.
    name = [f"hsgd/{what}/{next(_meetings)}/{dist.get_process_group_ranks(given)[0]}"]
    dist.broadcast_object_list(name, src=dist.get_global_rank(given, 0), group=given)
    store = dist.distributed_c10d._get_default_store()
    config = Config.from_env()
    board = Board(store, rank, range(size), config.timeout_s, prefix=name[0], caller=what)
    return Comm.over_board(board, config), True


def weakly(method: Callable[[], _T], gone: _T) -> Callable[[], _T]:
    """Return a function that calls a method of a weakly held object, or returns `gone`; local."""
    found = weakref.WeakMethod(method)

    def call() -> _T:
        alive = found()
        return gone if alive is None else alive()

    return call
