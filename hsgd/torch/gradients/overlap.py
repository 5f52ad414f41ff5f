"""Overlap: whether buckets travel while backward runs or after it, found out by trying both.

Owns the trial over the first steps, and what came out of it. A collective beside backward hides its
waiting, but takes processor time where a rank has no core to spare, and can then cost more than it
hides. Never changes what is computed: sums are the same, bit for bit, whenever they are made.
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
# Steps (d)uring and (a)fter backward, so that neither a drift of the machine nor a rhythm of the
# script, such as a report every fourth step, favours one of the two.
_ORDER = tuple(letter == "d" for letter in "dadadaaddaadadad")
_PLAN = _WARM + _ORDER
_WORTHWHILE = 0.97  # of the time, to leave the usual way

_log = logging.getLogger("hsgd.torch")


@dataclass(frozen=True)
class OverlapChoice:
    """When the buckets of an optimizer travel, and how that was found out."""

    overlaps: bool
    """Whether those of the next step start while backward runs."""
    steps_left: int
    """Steps of the trial that are to come; 0 when it has ended, or there is none."""
    during_s: float | None = None
    """Seconds from the first complete bucket of a step to its last result, where buckets travel
    during backward: the median of the slowest rank. None without a trial.
    """
    after_s: float | None = None
    """The same where they travel after it."""


class Overlap:
    """wanted: "always", "never", or "auto" to try both; equal on all ranks. clock: seconds."""

    def __init__(self, wanted: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.wanted = wanted
        self.active = wanted != "never"
        """Whether buckets of this step start in backward."""
        self._clock = clock
        self._left = 0
        self._ready_s: float | None = None
        self._times_s: dict[bool, list[float]] = {}
        self._found_s: tuple[float, float] | None = None

    @property
    def choice(self) -> OverlapChoice:
        """What is known now; local."""
        during_s, after_s = self._found_s or (None, None)
        return OverlapChoice(self.active, self._left, during_s, after_s)

    def begin(self, buckets: int) -> None:
        """Start a trial, or start it anew, since there are new buckets, unless one has ended
        before, or there is nothing to try; local, in the same step of all ranks.
        """
        if self.wanted != "auto" or self._found_s is not None:
            return
        self._left = len(_PLAN) if buckets > 1 else 0
        self._times_s = {True: [], False: []}
        self._ready_s = None
        self.active = _PLAN[0]

    def ready(self) -> None:
        """Note that the first bucket of the step is complete; local.

        From here on the two ways differ. Later calls in a step do nothing.
        """
        if self._left > 0 and self._ready_s is None:
            self._ready_s = self._clock()

    def end_step(self, comm: Comm) -> None:
        """Note that the step has its last result; blocking and collective after the last one of a
        trial, else local.
        """
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
        """Try no more until there are new buckets; local, in the same step of all ranks."""
        self._left, self._ready_s = 0, None
        if self.wanted == "auto" and self._found_s is None:
            self.active = True

    def _choose(self, comm: Comm) -> None:
        """By the slowest rank, so that all choose alike."""
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
