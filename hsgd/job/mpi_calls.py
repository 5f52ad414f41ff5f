"""Calls of MPI that make communicators: they have no deadline of their own, and get one here.

Owns the thread that makes such a call. One that is given up stays under way there, because MPI
cannot take it back: unless it returns before, the process ends without MPI_Finalize, and makes no
other such call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.job import ending

__all__ = ["call_within"]

Made = TypeVar("Made")


def call_within(
    timeout_s: float,
    what: str,
    call: Callable[[], Made],
    given_up: Callable[[], object] = lambda: None,
) -> Made:
    """What `call` returns; blocking, as collective as the call is.

    call: one of mpi4py's that lets other threads run while it waits; a functools.partial, since
        what it holds lives on where it is given up.
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
        return _in_a_thread(timeout_s, what, call, given_up)
    except MPI.Exception as error:
        if error.Get_error_class() in _deaths(MPI):
            raise PeerLost(f"{what}: a rank ended before it returned ({error})") from error
        raise HsgdError(f"{what}: {error}") from error


def _deaths(mpi: Any) -> set[int]:
    """Classes of errors that say that a rank ended; an MPI without ULFM has none."""
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    return {getattr(mpi, name, mpi.ERR_UNKNOWN) for name in names} - {mpi.ERR_UNKNOWN}


def _in_a_thread(
    timeout_s: float, what: str, call: Callable[[], Made], given_up: Callable[[], object]
) -> Made:
    done = threading.Event()
    returned: list[Made] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)
        done.set()

    thread = threading.Thread(target=work, name="hsgd-mpi-call", daemon=True)
    over = False
    try:
        try:
            thread.start()
        except RuntimeError as error:
            over = True
            raise HsgdError(f"{what}: no thread for it could be started ({error})") from error
        over = done.wait(timeout_s)
    finally:
        if not over:  # Ctrl-C, too
            ending.give_up(what, done.is_set)
            given_up()
    if not over:
        raise CollectiveTimeout(
            f"{what}: did not return within {timeout_s:g} s, though all ranks had come to it: "
            "one has ended, was stopped or hangs since, or a link is cut; look for it on all "
            "nodes, or give it more time (HSGD_TIMEOUT_S, or timeout= of the group)"
        )
    if raised:
        raise raised.pop()  # which keeps this frame, and all in it
    return returned.pop()
