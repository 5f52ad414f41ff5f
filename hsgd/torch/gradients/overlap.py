"""Overlap: chooses by trial whether buckets are reduced during or after backward.

A collective beside backward hides its wait, but takes processor time if a rank has no spare core,
which can cost more than it hides. Sums are bitwise the same in both cases.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hsgd.comm.communicator import Comm

__all__ = ["Overlap", "OverlapChoice"]

_WARM = (True, True)
# Steps (d)uring and (a)fter backward, in an order in which neither drift of the machine nor a
# rhythm of the script, such as a report every fourth step, favours one of the two.
_ORDER = tuple(letter == "d" for letter in "dadadaaddaadadad")
_PLAN = _WARM + _ORDER
_WORTHWHILE = 0.97  # time ratio below which "after" replaces "during"

_log = logging.getLogger("hsgd.torch")


@dataclass(frozen=True)
class OverlapChoice:
    """When an optimizer's buckets are reduced, and the result of the trial."""

    overlaps: bool
    """Whether buckets of the next step start during backward."""
    steps_left: int
    """Remaining steps of the trial; 0 if it has ended or there is none."""
    during_s: float | None = None
    """Median seconds, of the slowest rank, from a step's first complete bucket to its last result.

    With buckets reduced during backward; None without a trial.
    """
    after_s: float | None = None
    """The same with buckets reduced after backward."""


class Overlap:
    """The choice; `wanted` is "always", "never", or "auto" for a trial, equal on all ranks."""

    def __init__(self, wanted: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.wanted = wanted
        self.active = wanted != "never"
        """Whether buckets of this step start during backward."""
        self._clock = clock
        self._left = 0
        self._ready_s: float | None = None
        self._times_s: dict[bool, list[float]] = {}
        self._found_s: tuple[float, float] | None = None

    @property
    def choice(self) -> OverlapChoice:
        """The current choice; local."""
        during_s, after_s = self._found_s or (None, None)
        return OverlapChoice(self.active, self._left, during_s, after_s)

    def begin(self, buckets: int) -> None:
        """Start a trial for new buckets, unless one has ended; local, on all ranks."""
        if self.wanted != "auto" or self._found_s is not None:
            return
        self._left = len(_PLAN) if buckets > 1 else 0
        self._times_s = {True: [], False: []}
        self._ready_s = None
        self.active = _PLAN[0]

    def ready(self) -> None:
        """Note the time of the step's first complete bucket, from which the ways differ; local."""
        if self._left > 0 and self._ready_s is None:
            self._ready_s = self._clock()

    def end_step(self, comm: Comm) -> None:
        """Note the step's last result; local, at the end of a trial collective and blocking."""
        if self._ready_s is None:
            return
        passed_s, self._ready_s = self._clock() - self._ready_s, None
        if self._left <= len(_ORDER):
            self._times_s[self.active].append(passed_s)
        self._left -= 1
        if self._left > 0:
            self.active = _PLAN[-self._left]
        else:
            self._choose(comm)

    def abandon(self) -> None:
        """Stop the trial until there are new buckets; local, in the same step of all ranks."""
        self._left, self._ready_s = 0, None
        if self.wanted == "auto" and self._found_s is None:
            self.active = True

    def _choose(self, comm: Comm) -> None:
        """Choose by the slowest rank, so that all ranks choose equally."""
        medians = [statistics.median(self._times_s[way]) for way in (True, False)]
        slowest = torch.tensor(medians, dtype=torch.float64, device="cpu")
        comm.allreduce(slowest, "max", slowest, "optimizer overlap")
        during_s, after_s = slowest.tolist()
        self._found_s = during_s, after_s
        self.active = not after_s < _WORTHWHILE * during_s
        if comm.rank == 0:
            _log.info(
                "DistributedOptimizer: buckets travel %s backward: from the first complete one to "
                "the last result %.3g ms during backward, %.3g ms after it",
                "during" if self.active else "after",
                during_s * 1e3,
                after_s * 1e3,
            )
