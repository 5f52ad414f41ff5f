"""Iterations: the iterations of a loader in this process, with their memory and counters."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from .batches.batch_source import BatchSource
from .batches.buffer_ring import BufferRing
from .batches.error_policy import ErrorPolicy
from .batches.iteration import Counts, Iteration, IterationSettings, Progress
from .reading.row_reader import ReadStats

__all__ = ["Iterations"]


class Iterations:
    """The iterations in the process `pid`; a forked process makes its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._kept: list[BufferRing] = []  # not in use
        self._used: list[BufferRing] = []
        self._running: list[tuple[BatchSource, Progress]] = []
        self._all: weakref.WeakSet[Iteration] = weakref.WeakSet()
        self._read, self._seen = ReadStats(), Counts()

    def take_ring(self, slots: int, new_ring: Callable[[int], BufferRing]) -> BufferRing:
        """Return a ring that is not in use; memory is kept from one epoch to the next."""
        with self._lock:
            if self._kept:
                ring = self._kept.pop()
                ring.discard_wakes()
                ring.enlarge(slots)
            else:
                ring = new_ring(slots)
            self._used.append(ring)
        return ring

    def begin(
        self,
        source: BatchSource,
        ring: BufferRing | None,
        settings: IterationSettings,
        policy: ErrorPolicy,
    ) -> Iteration:
        """Begin an iteration that reads into `ring`, if any, which a later one uses again."""

        def finished(progress: Progress) -> None:
            self._finish(source, ring, progress)

        iteration = Iteration(source, settings, policy, finished)
        with self._lock:
            self._running.append((source, iteration.progress))
        self._all.add(iteration)
        return iteration

    def _finish(self, source: BatchSource, ring: BufferRing | None, progress: Progress) -> None:
        if ring is not None:
            ring.trim()
        with self._lock:
            _add(self._read, source.stats)
            _add(self._seen, [progress])
            self._running = [entry for entry in self._running if entry[0] is not source]
            if ring is not None:
                self._used = [other for other in self._used if other is not ring]
                self._kept = [ring]  # two iterations at once are rare: keep the memory of one

    def runs(self, progress: Progress) -> bool:
        """Return whether a loop still takes batches of the iteration with this progress."""
        with self._lock:
            return not progress.ended and any(other is progress for _, other in self._running)

    def any_run(self) -> bool:
        return bool(self._running)

    def supersede(self, anew: Callable[[], Iterator[Any]]) -> None:
        """Make iterations that gave no batch yet begin again when the next one is requested."""
        for iteration in list(self._all):
            iteration.supersede(anew)

    def close(self) -> None:
        """End all iterations, and free the memory of batches that nobody holds."""
        for iteration in list(self._all):
            iteration.close()
        with self._lock:
            self._kept.clear()

    def figures(self) -> dict[str, Any]:
        """Return the counters over all iterations, and the bytes of their memory."""
        with self._lock:
            read, seen = replace(self._read), replace(self._seen)
            for source, progress in self._running:
                _add(read, source.stats)
                _add(seen, [progress])
            rings = {id(ring): ring for ring in (*self._kept, *self._used)}
        return {
            **asdict(read),
            **asdict(seen),
            "buffer_bytes": sum(ring.nbytes for ring in rings.values()),
            "decoded_bytes": sum(each.source.decoded_bytes for each in list(self._all)),
        }


def _add(total: Any, parts: Sequence[Any]) -> None:
    """Add the counters of `parts` to `total`, a dataclass; keep the first text."""
    for part in parts:
        for field in fields(total):
            before, more = getattr(total, field.name), getattr(part, field.name)
            setattr(total, field.name, before or more if isinstance(more, str) else before + more)
