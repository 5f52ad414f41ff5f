"""Calls of MPI that make communicators: they have no deadline of their own, and get one here.

Owns the thread that makes such a call. One that is given up stays under way there, because MPI
cannot take it back: unless it returns before, the process ends without MPI_Finalize, and makes no
other such call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from hsgd.config import Config
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.jobs.environment import ending, launcher_variables

__all__ = ["call_within", "communicator_of", "world"]

_LATE = (
    "though all ranks had come to it: one has ended, was stopped or hangs since, or a link is cut; "
    "look for it on all nodes, or raise HSGD_TIMEOUT_S, and timeout= of a process group"
)
Made = TypeVar("Made")


def call_within(
    timeout_s: float,
    what: str,
    call: Callable[[], Made],
    *,
    late: str = _LATE,
    given_up: Callable[[], object] = lambda: None,
) -> Made:
    """What `call` returns; blocking, as collective as the call is.

    call: one of mpi4py's that lets other threads run while it waits; a functools.partial, since
        what it holds lives on where it is given up.
    late: what a user is told of a call that did not return in time.
    given_up: called where that happens, at the deadline or by Ctrl-C.
    timeout_s: kept with MPI_THREAD_MULTIPLE, which mpi4py asks for; below that nobody else may call
        MPI meanwhile, so this waits for as long as MPI does.
    Raises CollectiveTimeout, PeerLost where MPI says that a rank ended, and HsgdError for what else
    MPI fails with, or where an earlier call was given up: none of them knows the rank. What else
    the call raises is raised here.
    """
    from mpi4py import MPI

    if stuck := ending.stuck():
        raise HsgdError(
            f"{what}: MPI makes no communicator any more, because a call was given up "
            f"({', '.join(stuck)}); end the job"
        )
    try:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return call()
        attempt = _Attempt(call)
        over = False
        try:
            over = attempt.returns_within(timeout_s)
        finally:
            over = over or attempt.is_over()
            if not over:
                ending.give_up(what, attempt.is_over)
                given_up()
        if over:
            return attempt.result()
    except MPI.Exception as error:
        if error.Get_error_class() in _deaths(MPI):
            raise PeerLost(f"{what}: a rank ended before it returned ({error})") from error
        raise HsgdError(f"{what}: {error}") from error
    raise CollectiveTimeout(f"{what}: did not return within {timeout_s:g} s, {late}")


def world() -> Any:
    """MPI.COMM_WORLD; local. Raises LaunchError where it has one rank and the launcher more."""
    from mpi4py import MPI

    vendor = " ".join(map(str, MPI.get_vendor()[:1]))
    launcher_variables.refuse_alone(MPI.COMM_WORLD.size, vendor)
    return MPI.COMM_WORLD


def communicator_of(ranks: Sequence[int], config: Config, who: str, *, late: str = _LATE) -> Any:
    """An mpi4py communicator of these ranks of MPI.COMM_WORLD, in this order; collective over them,
    blocking. who: of whom errors are. As call_within, and world().
    """
    everybody = world()
    ending.watch(config.abort_after_s)
    whole = everybody.Get_group()
    group = whole.Incl(ranks)
    whole.Free()
    kept: list[object] = []
    try:
        return call_within(
            config.timeout_s,
            f"{who}: MPI_Comm_create_group",
            partial(everybody.Create_group, group),
            late=late,
            given_up=lambda: kept.append(group),
        )
    finally:
        if not kept:  # else MPI has it still
            group.Free()


def _deaths(mpi: Any) -> set[int]:
    """Classes of errors that say that a rank ended; an MPI without ULFM has none."""
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    return {getattr(mpi, name, mpi.ERR_UNKNOWN) for name in names} - {mpi.ERR_UNKNOWN}


class _Attempt(Generic[Made]):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Made]) -> None:
        self._call = call
        self._done = threading.Event()
        self._returned: list[Made] = []
        self._raised: list[BaseException] = []

    def returns_within(self, timeout_s: float) -> bool:
        """Make it; whether it has returned."""
        try:
            threading.Thread(target=self._work, name="hsgd-mpi-call", daemon=True).start()
        except RuntimeError as error:
            self._done.set()
            raise HsgdError(f"a call of MPI: no thread could be started ({error})") from error
        return self._done.wait(timeout_s)

    def is_over(self) -> bool:
        """Whether it has returned, or was never made."""
        return self._done.is_set()

    def result(self) -> Made:
        """What it returned; raises what it raised. Once."""
        if self._raised:
            raise self._raised.pop()  # an error keeps the frame that raises it
        return self._returned.pop()

    def _work(self) -> None:
        try:
            self._returned.append(self._call())
        except BaseException as error:
            self._raised.append(error)
        self._done.set()
