"""The end of a program that failed on one rank of an MPI job: the job ends, too.

Owns the hook for uncaught exceptions and the last step of a rank before MPI_Finalize, which waits
for all ranks, for ever. A failed rank says goodbye first, as every rank does (its communicators are
closed), waits for the others to come to their end as well, and aborts the job if they do not: one
that hangs never comes. mpi4py's own runner, `python -m mpi4py`, aborts at once.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from types import TracebackType
from typing import Any

__all__ = ["watch"]

_PAUSE_S = 0.02
_SURVIVAL = "OMPI_MCA_mpi_ft_enable"
_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


class _Ending:
    """What is known of this process's end."""

    def __init__(self) -> None:
        self.pid = 0  # of the process that watch() was called in: its forked children are no ranks
        self.limit_s = 0.0
        self.all_watch = False  # and so every rank of the job takes the last step
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
        if self.pid != os.getpid() or not self.limit_s or _others_survive():
            return
        if "mpi4py.run" in sys.modules or not (self.failure or self.all_watch):
            return
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        _flush()
        if not _all_end(MPI, self.limit_s) and self.failure:
            self.abort(MPI)

    def abort(self, MPI: Any) -> None:
        print(
            f"hsgd: rank {MPI.COMM_WORLD.rank} ended by {self.failure}, and {self.limit_s:g} s "
            "later other ranks had not ended: the job is aborted. HSGD_ABORT_AFTER_S sets that "
            "time; 0 waits for ever",
            file=sys.stderr,
        )
        _flush()
        if hasattr(MPI, "_set_abort_status"):  # at the very end, after other atexit functions
            MPI._set_abort_status(self.status)
        else:
            MPI.COMM_WORLD.Abort(self.status)


_ending = _Ending()
# Called after whatever is registered later, and so after hsgd.comm has closed its communicators:
# it imports this before.
atexit.register(_ending.last_step)


def watch(limit_s: float, *, all_ranks: bool) -> None:
    """Let an uncaught exception of this rank end the job; local.

    limit_s: for how long the other ranks are given time to end by themselves; 0 is for ever.
    all_ranks: whether all ranks of the job call this. Then a failed one waits no longer than it
        takes them to end.
    """
    if _ending.pid != os.getpid():
        _ending.install()
    _ending.limit_s = limit_s
    _ending.all_watch |= all_ranks


def _all_end(MPI: Any, limit_s: float) -> bool:
    """Whether all ranks take the last step within the limit."""
    deadline = time.monotonic() + limit_s
    pause_s = 1e-4
    try:
        # Nobody else uses COMM_WORLD for a collective with ranks whose program has ended.
        request = MPI.COMM_WORLD.Ibarrier()
        while not request.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)
    except MPI.Exception:
        return False
    return True


def _others_survive() -> bool:
    """Whether mpirun keeps the other ranks when one fails (--with-ft ulfm): they may go on."""
    return os.environ.get(_SURVIVAL, "0").lower() in ("1", "true", "yes", "on")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
