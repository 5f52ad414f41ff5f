"""Stop rules of elastic averaging: how workers without a common step learn that training is over.

Owns two counters of the box and their meaning. Never blocks. The rules are ShmCaffe's (Ahn et al.,
ICDCS 2018), after public descriptions.
"""

from __future__ import annotations

import os
import select

import numpy as np

from hsgd.box import ParameterBox
from hsgd.comm import Comm

__all__ = ["COUNTERS", "RULES", "Progress"]

RULES = ("master", "fastest", "mean")
COUNTERS = 2  # of the box
_STEPS, _ENDED = range(COUNTERS)


class Progress:
    """One worker's view of how far all are; made collectively.

    rule: training ends when worker 0 has done `target` steps ("master"), when any has ("fastest"),
    or when the workers have on average ("mean"). When the master of this node dies, the others end
    as with "fastest". target: None never ends.
    """

    def __init__(self, box: ParameterBox, comm: Comm, rule: str, target: int | None) -> None:
        self._box, self._rule, self._target = box, rule, target
        self._first, self._workers = comm.rank == 0, comm.size
        self._told = 0  # own steps that are in the counter
        self._master = _watch_of(comm)

    def report(self, steps: int) -> bool:
        """Tell how many steps this worker has done; whether training is over."""
        if self._target is None:
            return False
        if steps > self._told:
            self._box.fetch_add(_STEPS, steps - self._told)
            self._told = steps
        if self._rule == "mean":
            return self._box.counter(_STEPS) >= self._target * self._workers
        decides = self._rule == "fastest" or self._first or self._master_died()
        if steps >= self._target and decides:
            self._box.fetch_add(_ENDED)
        return self._box.counter(_ENDED) > 0

    def _master_died(self) -> bool:
        if self._master < 0:
            return False
        ended = select.poll()
        ended.register(self._master, select.POLLIN)
        return bool(ended.poll(0))

    def close(self) -> None:
        """Stop watching the master."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1


def _watch_of(comm: Comm) -> int:
    """A pidfd of rank 0 where it can be seen from here, else -1."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    own = np.array([[os.getpid(), namespace, comm.cross_rank]], np.int64)
    master = comm.allgather(own)[0]
    if comm.rank == 0 or (master[1:] != own[0, 1:]).any():
        return -1
    try:
        return os.pidfd_open(int(master[0]))
    except OSError:
        return -1
