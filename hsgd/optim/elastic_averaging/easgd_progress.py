"""Progress: stop rules of elastic averaging, for workers without a common step.

The rules are ShmCaffe's (Ahn et al., ICDCS 2018), after public descriptions.
"""

from __future__ import annotations

import os
import select
import weakref
from concurrent.futures import Future
from typing import Literal

import numpy as np

from hsgd.comm.communicator import Comm
from hsgd.onesided.parameter_box import ParameterBox
from hsgd.optim.background_thread import BackgroundThread

__all__ = ["COUNTERS", "Progress", "StopRule"]

StopRule = Literal["master", "fastest", "mean"]
COUNTERS = 2  # of the box
_STEPS, _ENDED = range(COUNTERS)


class Progress:
    """One worker's view of the progress of all, kept in counters of the box; made collectively.

    Training ends when worker 0 ("master"), any worker ("fastest") or the workers on average
    ("mean") have done `target` steps; None never ends it. If the master of this node dies,
    "fastest" applies. A thread talks to counters on other nodes, so that the worker never waits.
    """

    def __init__(self, box: ParameterBox, comm: Comm, rule: StopRule, target: int | None) -> None:
        self._box, self._rule, self._target = box, rule, target
        self._first, self._workers = comm.rank == 0, comm.size
        self._told = 0  # own steps that the counter includes
        self._over = False
        self._master = _watch_of(comm)
        self._watch_ends = weakref.finalize(self, _close_watch, self._master)
        far = target is not None and not box.counts_at_once
        self._teller = BackgroundThread("hsgd-steps") if far else None
        self._telling: Future[bool] | None = None

    def report(self, steps: int) -> bool:
        """Count this worker's steps, and return whether training is over.

        For a counter on another node this is the last known answer. Raises the box's errors.
        """
        if self._target is None or self._over:
            return self._over
        decides = self._rule == "fastest" or self._first or self._master_died()
        ends = self._rule != "mean" and decides and steps >= self._target
        if self._teller is None:
            self._over = self._tell(steps, ends)
            return self._over
        if self._telling is not None and self._telling.done():
            self._over = self._telling.result()
            self._telling = None
        if ends or (self._telling is None and not self._over):
            # One report at a time; only the last one is queued behind a running report.
            self._telling = self._teller.submit(self._tell, steps, ends)
        self._over = self._over or ends
        return self._over

    def _tell(self, steps: int, ends: bool) -> bool:
        assert self._target is not None
        if self._rule == "mean":
            new, self._told = steps - self._told, max(self._told, steps)
            before = self._box.fetch_add(_STEPS, max(0, new))
            return before + max(0, new) >= self._target * self._workers
        return self._box.fetch_add(_ENDED, int(ends)) > 0 or ends

    def _master_died(self) -> bool:
        if self._master < 0:
            return False
        ended = select.poll()
        ended.register(self._master, select.POLLIN)
        return bool(ended.poll(0))

    def close(self) -> None:
        """Finish the reports and stop watching the master; raises the box's errors."""
        if self._teller is not None:
            self._teller.shutdown()
        self._stop_watching()
        if self._telling is not None:
            self._telling.result()

    def abandon(self) -> None:
        """Stop watching the master; never waits."""
        if self._teller is not None:
            self._teller.shutdown(wait=False)
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._watch_ends()
        self._master = -1


def _close_watch(master: int) -> None:
    if master >= 0:
        os.close(master)


def _watch_of(comm: Comm) -> int:
    """Return a pidfd of rank 0, or -1 if that process is not visible from here."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    own = np.array([[os.getpid(), namespace, comm.cross_rank]], np.int64)
    master = comm.allgather(own)[0]
    if comm.rank == 0 or (master[1:] != own[0, 1:]).any():
        return -1
    try:
        return os.pidfd_open(int(master[0]))
    except OSError:
        return -1
