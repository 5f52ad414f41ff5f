"""The end of a program that failed on one rank of an MPI job: the job ends, too.

MPI_Finalize waits for all ranks, forever. So a failed rank first closes its communicators and says
goodbye, as every rank does, then waits for the other ranks to end, and aborts the job if they do
not: a rank that hangs never ends. mpi4py's own runner, `python -m mpi4py`, aborts at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["give_up", "never_abort", "prepare_goodbye", "stuck", "watch"]

_PAUSE_S = 0.02
_SURVIVAL = "OMPI_MCA_mpi_ft_enable"
_INTERRUPTED = 130  # exit code of shells for a program that Ctrl-C ended


class _Ending:
    """State of this process's end."""

    def __init__(self) -> None:
        self.pid = 0  # of the process that called watch(): its forked children are no ranks
        self.limit_s = 0.0
        self.never_aborts = False
        # Over all ranks of the job, only for the last step: on the program's communicators that
        # step would complete a nonblocking collective of a rank that has not reached its end. None:
        # it is unknown whether the other ranks take the last step.
        self.goodbye: Any = None
        self.preparing = threading.Lock()
        self.unfinished: list[Any] = []  # MPI may still write there
        # MPI calls that may never return, and functions that say whether they have: while a thread
        # is in one, MPI_Finalize is impossible.
        self.given_up: list[tuple[str, Callable[[], bool]]] = []
        self.failure = ""  # class name of the exception that ends the program
        self.status = 1

    def install(self) -> None:
        previous = sys.excepthook

        def note(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if not (hasattr(sys, "ps1") or sys.flags.interactive):  # there the program continues
                self.failure = kind.__name__
                self.status = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
            previous(kind, error, trace)

        sys.excepthook = note
        self.pid = os.getpid()

    def last_step(self) -> None:
        is_ours = "mpi4py.run" not in sys.modules and not _others_survive()
        waits = is_ours and self.limit_s > 0 and bool(self.failure or self.goodbye)
        if self.pid != os.getpid() or not (waits or self.stuck()):
            return
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        try:
            _flush()
            if waits and not self.all_end(MPI) and self.failure:
                self.abort(MPI, f"{self.limit_s:g} s later other ranks had not ended")
            elif stuck := self.stuck():
                self.end_beside(MPI, stuck)
        except KeyboardInterrupt:  # a second Ctrl-C: the user does not want to wait
            self.failure, self.status = self.failure or "KeyboardInterrupt", _INTERRUPTED
            self.abort(MPI, "was interrupted while it waited for other ranks to end")

    def stuck(self) -> list[str]:
        """Return the MPI calls that were given up and have not returned."""
        return [what for what, is_over in self.given_up if not is_over()]

    def end_beside(self, MPI: Any, stuck: list[str]) -> None:
        """End without MPI_Finalize; does not return if other ranks survive."""
        if _others_survive():
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()  # os._exit skips the other functions for the end
            os._exit(self.status)
        self.abort(MPI, f"MPI is in a call that was given up ({', '.join(stuck)})", "")

    def all_end(self, MPI: Any) -> bool:
        """Return whether all ranks take the last step within the limit."""
        try:
            if self.goodbye is not None:
                return _await(self.goodbye.Ibarrier().Test, self.limit_s)
            # Only the limit ends this wait. Iprobe makes MPI progress, which others may need.
            return _await(lambda: MPI.COMM_WORLD.Iprobe() and False, self.limit_s)
        except MPI.Exception:
            return False

    def abort(
        self,
        MPI: Any,
        reason: str,
        advice: str = ". HSGD_ABORT_AFTER_S sets how long it waits; 0 never aborts",
    ) -> None:
        """Abort the job, even if the message to the user cannot be printed."""
        late = hasattr(MPI, "_set_abort_status")
        if late:  # at the very end, after other atexit functions
            MPI._set_abort_status(self.status)
        try:
            with contextlib.suppress(OSError, ValueError):
                by = f" by {self.failure}" if self.failure else ""
                print(
                    f"hsgd: rank {MPI.COMM_WORLD.rank} ended{by}, and {reason}: the job is "
                    f"aborted{advice}",
                    file=sys.stderr,
                )
            _flush()
        finally:
            if not late:
                MPI.COMM_WORLD.Abort(self.status)


_ending = _Ending()
# Runs after functions that are registered later, so after communicators are closed: communicator.py
# imports this module first.
atexit.register(_ending.last_step)


def watch(limit_s: float) -> None:
    """Let an uncaught exception of this rank end the job after `limit_s`, if not 0; local."""
    if _ending.pid != os.getpid():
        _ending.install()
    _ending.limit_s = 0.0 if _ending.never_aborts else limit_s


def never_abort() -> None:
    """Let this rank wait for the others without a limit from now on, if it fails; local."""
    _ending.never_aborts, _ending.limit_s = True, 0.0


def give_up(what: str, is_over: Callable[[], bool]) -> None:
    """Record that a thread of this process is in an MPI call that may never return; local.

    `is_over` says whether it has returned. If it has not at the end of the program, this rank
    aborts the job, or, if others may survive, ends alone: MPI_Finalize would wait for that thread,
    or end the process by SIGSEGV.
    """
    if _ending.pid != os.getpid():
        _ending.install()
    _ending.given_up.append((what, is_over))


def stuck() -> list[str]:
    """Return the MPI calls that were given up and have not returned; local."""
    return _ending.stuck()


def prepare_goodbye(comm: Any, timeout_s: float) -> None:
    """Prepare a communicator by which a failed rank notices that all others have ended; collective.

    Args:
        comm: an mpi4py communicator of all ranks of the job, which all have just synchronized on
            it. The first one is duplicated, once in a process.
        timeout_s: seconds after which this rank continues without it.
    """
    from mpi4py import MPI

    # Several threads may do this at the same time, each with a communicator, and in another order
    # on another rank: only a communicator that is first on all ranks is duplicated.
    first = _ending.preparing.acquire(blocking=False)
    try:
        on_all = array("i", [first and _ending.goodbye is None])
        agreed = comm.Iallreduce(MPI.IN_PLACE, on_all, MPI.MIN)
        if not _await(agreed.Test, timeout_s):
            _ending.unfinished.append(agreed)
        elif on_all[0]:
            duplicate, request = comm.Idup()
            if _await(request.Test, timeout_s):
                _ending.goodbye = duplicate
            else:
                _ending.unfinished += [duplicate, request]
    except MPI.Exception:
        pass  # then a failed rank waits for the limit
    finally:
        if first:
            _ending.preparing.release()


def _await(done: Callable[[], bool], limit_s: float) -> bool:
    """Return whether done() is true within the limit; local, blocking.

    MPI progresses only in done(), so pauses start short: several rounds of messages should not each
    wait for a long one.
    """
    begin = now = time.monotonic()
    while not done():
        if now - begin > limit_s:
            return False
        time.sleep(min(_PAUSE_S, max(1e-4, (now - begin) / 8)))
        now = time.monotonic()
    return True


def _others_survive() -> bool:
    """Return whether mpirun keeps the other ranks if one fails (--with-ft ulfm)."""
    return os.environ.get(_SURVIVAL, "0").lower() in ("1", "true", "yes", "on")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # its reader is gone; it is closed
                stream.flush()
