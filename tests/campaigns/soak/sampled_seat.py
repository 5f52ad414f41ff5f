"""SampledSeat: a rank that does the same for long, and says again and again what it holds."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from campaigns.seat import Seat
from campaigns.soak.flatness import tenths
from campaigns.soak.footprint import MEASURES, footprint
from hsgd import Comm

__all__ = ["SampledSeat"]

_KEEP, _SAMPLE, _END = range(3)


class SampledSeat(Seat):
    """The seat of a rank of a soak.

    count: operations to make; 0: `seconds` are to pass. width: things to have open at once. done:
    operations up to the last sample. notes: figures for the report.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        super().__init__(order)
        self.count: int = order["count"]
        self.seconds: float = order["seconds"]
        self.width: int = order["width"]
        self.notes: dict[str, float] = {}
        self._samples: int = order["samples"]
        self._taken = 0
        self._filling: Any = None
        self.done = 0
        self._begin = time.monotonic()

    def operations(self) -> Iterator[int]:
        """Yield the number of each operation to make, and take samples in between."""
        done = 0
        for todo in self.blocks():
            yield from range(done, done + todo)
            done += todo

    def blocks(self) -> Iterator[int]:
        """Yield how many operations to make next; after each such block take a sample."""
        for number in range(self._samples):
            bounds = [(number + k) * self.count // self._samples for k in (0, 1)]
            todo = bounds[1] - bounds[0]
            yield todo
            self.done += todo
            self._sample()

    def steps_in_time(self, comm: Comm) -> Iterator[int]:
        """Yield numbers of steps until the time is up; collective: one small broadcast each."""
        step = 0
        while True:
            yield step
            step += 1
            passed = (time.monotonic() - self._begin) / self.seconds
            is_last = self._taken + 1 == self._samples
            is_due = passed * self._samples > self._taken + 1
            word = (_END if is_last else _SAMPLE) if is_due else _KEEP
            word = int(comm.broadcast(np.array([word], np.int32))[0])
            if word != _KEEP:
                self.done = step
                self._sample()
            if word == _END:
                return

    def _sample(self) -> None:
        gc.collect()  # cycles are the interpreter's business
        if self._taken == 0:
            gc.freeze()  # what is loaded by now stays: no look at it takes time again
            _settle_names()
        if self._taken + 1 == tenths(self._samples)[0].start:
            self._filling = _fill_arenas()
        self._taken += 1
        self.say("sample", done=self.done, row=footprint())

    def report(self) -> dict[str, Any]:
        """Say how long the program ran, and what it noted."""
        return {"seconds": time.monotonic() - self._begin, "notes": self.notes}


def _settle_names() -> None:
    """The interpreter's table of names is made anew, and larger, when many have come and gone, as
    parts of paths do: here, and not in the middle of the samples.
    """
    for number in range(200_000):
        sys.intern(f"soak {number}")


def _fill_arenas() -> Any:
    """Fill what the interpreter's allocator has mapped, until it maps another arena, whole, which
    is 1 MiB: the objects that it may need in the midst of the samples then have room in it.
    """
    filling: Any = None
    mapped = footprint()[MEASURES.index("mapped")]
    for _ in range(1000):
        for _ in range(200):
            filling = (filling, *(None,) * 50)  # small objects alone, which come from arenas
        if footprint()[MEASURES.index("mapped")] != mapped:
            break
    return filling
