"""Calls of MPI that make communicators: they have no deadline of their own, and get one here.

Owns the thread that makes such a call. One that is given up stays under way there, because MPI
cannot take it back: unless it returns before, the process ends without MPI_Finalize.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.job import ending

__all__ = ["call_within"]

Made = TypeVar("Made")
Given = ParamSpec("Given")


def call_within(
    timeout_s: float,
    what: str,
    call: Callable[Given, Made],
    *values: Given.args,
    **named: Given.kwargs,
) -> Made:
    """What `call` returns for these values; blocking, as collective as the call is.

    call: one of mpi4py's that lets other threads run while it waits. It, and the values, may
        outlive this by a call that is given up.
    timeout_s: kept with MPI_THREAD_MULTIPLE, which mpi4py asks for; below that nobody else may call
        MPI meanwhile, so this waits for as long as MPI does.
    Raises CollectiveTimeout, PeerLost where MPI says that a rank ended, HsgdError for what else MPI
    fails with: none of them knows the rank. What else the call raises is raised here.
    """
    from mpi4py import MPI

    try:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return call(*values, **named)
        return _in_a_thread(timeout_s, what, lambda: call(*values, **named))
    except MPI.Exception as error:
        lost = {
            getattr(MPI, name, MPI.UNDEFINED)
            for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
        }
        if error.Get_error_class() in lost:
            raise PeerLost(f"{what}: a rank ended before all had made it ({error})") from error
        raise HsgdError(f"{what}: {error}") from error


def _in_a_thread(timeout_s: float, what: str, call: Callable[[], Made]) -> Made:
    done = threading.Event()
    returned: list[Made] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)
        done.set()

    threading.Thread(target=work, name="hsgd-mpi-call", daemon=True).start()
    try:
        in_time = done.wait(timeout_s)
    except BaseException:  # Ctrl-C
        ending.give_up(what, done.is_set)
        raise
    if not in_time:
        ending.give_up(what, done.is_set)
        raise CollectiveTimeout(
            f"{what}: not all ranks had made it within {timeout_s:g} s, though all had come to it: "
            "one has ended, was stopped or hangs since, or a link is cut; look for it on all "
            "nodes, or raise HSGD_TIMEOUT_S"
        )
    if raised:
        raise raised[0]
    return returned[0]
