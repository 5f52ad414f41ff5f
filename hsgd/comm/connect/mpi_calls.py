"""MPI calls that make communicators, with a deadline, which MPI itself does not offer.

MPI cannot cancel such a call. If one is given up, its thread keeps running it: unless it returns,
the process ends without MPI_Finalize and makes no other such call.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, TypeVar

from hsgd.base import built
from hsgd.base.call_in_thread import call_in_thread
from hsgd.config import Config
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.jobs.environment import ending, launcher_variables
from hsgd.jobs.environment.scheduled_step import ScheduledStep, pmi_variables

__all__ = ["call_within", "communicator_of", "may_join", "world", "world_size"]

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
    """Call `call` and return its result; blocking, and collective as `call` is.

    Args:
        timeout_s: deadline with MPI_THREAD_MULTIPLE, which mpi4py requests. Below that level no
            other thread may call MPI meanwhile, so this waits as long as MPI does.
        what: first word of errors.
        call: a call of mpi4py that releases the GIL while it waits; a functools.partial, because
            its arguments must live on if it is given up. Its other errors are raised here.
        late: words of the error about a call that did not return in time.
        given_up: called if the call is given up, at the deadline or by Ctrl-C.

    Raises:
        CollectiveTimeout: the call did not return in time.
        PeerLost: MPI reports that a rank ended.
        HsgdError: MPI failed otherwise, or an earlier call was given up. No error names the rank.
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
        try:
            attempt = call_in_thread("hsgd-mpi-call", call)
        except RuntimeError as error:
            raise HsgdError(f"{what}: no thread could be started ({error})") from error
        try:
            wait([attempt], timeout_s)
        finally:
            over = attempt.done()
            if not over:
                ending.give_up(what, attempt.done)
                given_up()
        if over:
            try:
                return attempt.result()
            finally:
                del attempt  # an error keeps the frame that raises it
    except MPI.Exception as error:
        if error.Get_error_class() in _deaths(MPI):
            raise PeerLost(f"{what}: a rank ended before it returned ({error})") from error
        raise HsgdError(f"{what}: {error}") from error
    raise CollectiveTimeout(f"{what}: did not return within {timeout_s:g} s, {late}")


def may_join(step: ScheduledStep) -> bool:
    """Return whether MPI may know the ranks of `step`; equal on all of them, local.

    An MPI that the scheduler did not prepare sees each rank alone, or ends the process.
    """
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            return bool(MPI.COMM_WORLD.size == step.size)
    has_mpi = bool(built.read().mpis) and importlib.util.find_spec("mpi4py") is not None
    return has_mpi and bool(pmi_variables())


def world_size() -> int:
    """Return the size of MPI.COMM_WORLD, which initializes MPI; local."""
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.size)


def world() -> Any:
    """Return MPI.COMM_WORLD; local. LaunchError if MPI sees one rank of several."""
    from mpi4py import MPI

    vendor = " ".join(map(str, MPI.get_vendor()[:1]))
    launcher_variables.refuse_alone(MPI.COMM_WORLD.size, vendor)
    return MPI.COMM_WORLD


def communicator_of(ranks: Sequence[int], config: Config, who: str, *, late: str = _LATE) -> Any:
    """Make an mpi4py communicator of ranks of MPI.COMM_WORLD, in this order; as call_within()."""
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
        if not kept:  # else MPI still uses it
            group.Free()


def _deaths(mpi: Any) -> set[int]:
    """Return the MPI error classes that report an ended rank; an MPI without ULFM has none."""
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    return {getattr(mpi, name, mpi.ERR_UNKNOWN) for name in names} - {mpi.ERR_UNKNOWN}
