"""The end of a program that failed on one rank of an MPI job: the job ends, too.

Owns the hook for uncaught exceptions and the last step of a rank before MPI_Finalize, which waits
for all ranks, for ever. A failed rank says goodbye first, as every rank does (its communicators are
closed), waits for the others to come to their end as well, and aborts the job if they do not: one
that hangs never comes. mpi4py's own runner, `python -m mpi4py`, aborts at once.
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

__all__ = ["give_up", "prepare_goodbye", "stuck", "watch"]

_PAUSE_S = 0.02
_SURVIVAL = "OMPI_MCA_mpi_ft_enable"
_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


class _Ending:
    """What is known of this process's end."""

    def __init__(self) -> None:
        self.pid = 0  # of the process that watch() was called in: its forked children are no ranks
        self.limit_s = 0.0
        # Of all ranks of the job, and used for the last step alone: on the program's communicators
        # that step would complete a nonblocking collective of a rank that has not come to its end.
        # Where it is None, nobody knows whether the others take the last step.
        self.goodbye: Any = None
        self.preparing = threading.Lock()
        self.unfinished: list[Any] = []  # MPI may write there still
        # Calls of MPI that may never return, and whether they have: while a thread is in one, there
        # can be no MPI_Finalize.
        self.given_up: list[tuple[str, Callable[[], bool]]] = []
        self.failure = ""  # name of the exception that ends the program
        self.status = 1

    def install(self) -> None:
        previous = sys.excepthook

        def note(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if not (hasattr(sys, "ps1") or sys.flags.interactive):  # there the program goes on
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
        except KeyboardInterrupt:  # whoever sends it again does not want to wait
            self.failure, self.status = self.failure or "KeyboardInterrupt", _INTERRUPTED
            self.abort(MPI, "was interrupted while it waited for other ranks to end")

    def stuck(self) -> list[str]:
        """Calls of MPI that were given up and have not returned."""
        return [what for what, is_over in self.given_up if not is_over()]

    def end_beside(self, MPI: Any, stuck: list[str]) -> None:
        """Without MPI_Finalize; where other ranks go on, it does not return."""
        if _others_survive():
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()  # what else was to run at the end is left out
            os._exit(self.status)
        self.abort(MPI, f"MPI is in a call that was given up ({', '.join(stuck)})", "")

    def all_end(self, MPI: Any) -> bool:
        """Whether all ranks take the last step within the limit."""
        try:
            if self.goodbye is not None:
                return _await(self.goodbye.Ibarrier().Test, self.limit_s)
            # Nothing to wait for but the limit. Meanwhile MPI goes on, which others may need.
            return _await(lambda: MPI.COMM_WORLD.Iprobe() and False, self.limit_s)
        except MPI.Exception:
            return False

    def abort(
        self,
        MPI: Any,
        reason: str,
        advice: str = ". HSGD_ABORT_AFTER_S sets how long it waits; 0 never aborts",
    ) -> None:
        """What follows is for the user's eyes, and must not keep this from being done."""
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
# Called after whatever is registered later, and so after communicators are closed: communicator.py
# imports this before.
atexit.register(_ending.last_step)


def watch(limit_s: float) -> None:
    """Let an uncaught exception of this rank end the job; local.

    limit_s: for how long the other ranks are given time to end by themselves; 0 is for ever.
    """
    if _ending.pid != os.getpid():
        _ending.install()
    _ending.limit_s = limit_s


def give_up(what: str, is_over: Callable[[], bool]) -> None:
    """Say that a thread of this process is in a call of MPI that may never return; local.

    is_over: whether it has returned. Where it has not at the end of the program, this rank aborts
        the job, or, where others may survive, ends alone: MPI_Finalize would wait for that thread,
        or end the process by SIGSEGV.
    """
    if _ending.pid != os.getpid():
        _ending.install()
    _ending.given_up.append((what, is_over))


def stuck() -> list[str]:
    """Calls of MPI that were given up and have not returned; local."""
    return _ending.stuck()


def prepare_goodbye(comm: Any, timeout_s: float) -> None:
    """Let a failed rank know when all others have ended, too: then it waits for no limit;
    collective.

    comm: an mpi4py communicator of all ranks of the job, whose ranks have all just met there. The
        first one is duplicated, once in a process.
    timeout_s: until this rank goes on without.
    """
    from mpi4py import MPI

    # Several threads may come here at once, each with a communicator, and in another order on
    # another rank: a duplicate is made of one that comes first on all ranks.
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
    """Whether done() is true within the limit; local, blocking. MPI goes on in done() alone, and
    what takes several rounds of messages shall not wait for a long pause in each of them.
    """
    begin = now = time.monotonic()
    while not done():
        if now - begin > limit_s:
            return False
        time.sleep(min(_PAUSE_S, max(1e-4, (now - begin) / 8)))
        now = time.monotonic()
    return True


def _others_survive() -> bool:
    """Whether mpirun keeps the other ranks when one fails (--with-ft ulfm): they may go on."""
    return os.environ.get(_SURVIVAL, "0").lower() in ("1", "true", "yes", "on")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it; it is closed
                stream.flush()
