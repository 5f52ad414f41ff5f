"""The iterations of a loader in this process: the memory that they share, and what they counted."""

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
    """Of one process: a forked one makes its own. pid: of the process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._kept: list[BufferRing] = []  # that no iteration uses
        self._used: list[BufferRing] = []
        self._running: list[tuple[BatchSource, Progress]] = []
        self._all: weakref.WeakSet[Iteration] = weakref.WeakSet()
        self._read, self._seen = ReadStats(), Counts()

    def take_ring(self, slots: int, new_ring: Callable[[int], BufferRing]) -> BufferRing:
        """Return a ring that no iteration uses; memory is kept from one epoch to the next."""
        with self._lock:
            fitting = [ring for ring in self._kept if ring.base_slots >= slots]
            if fitting:
                ring = fitting[0]
                self._kept.remove(ring)
                ring.discard_wakes()
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
        """Begin an iteration. ring: what its batches are read into, to be kept when it ends."""

        def finished(progress: Progress) -> None:
            self._finish(source, ring, progress)

        iteration = Iteration(source, settings, policy, finished)
        with self._lock:
            self._running.append((source, iteration.progress))
        self._all.add(iteration)
        return iteration

    def _finish(self, source: BatchSource, ring: BufferRing | None, progress: Progress) -> None:
        """Keep the ring of an iteration that has ended for the next, and its figures."""
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
        """Return whether some iteration has not ended."""
        return bool(self._running)

    def supersede(self, anew: Callable[[], Iterator[Any]]) -> None:
        """Let iterations that have given nothing yet begin anew when they are asked for it."""
        for iteration in list(self._all):
            iteration.supersede(anew)

    def close(self) -> None:
        """End all, and give back the memory of batches that nobody has."""
        for iteration in list(self._all):
            iteration.close()
        with self._lock:
            self._kept.clear()

    def figures(self) -> dict[str, Any]:
        """Return what was read, and handed out, over all iterations; and their memory."""
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
    """Add the figures of `parts` to those of `total`, a dataclass; keep the first text."""
    for part in parts:
        for field in fields(total):
            before, more = getattr(total, field.name), getattr(part, field.name)
            setattr(total, field.name, before or more if isinstance(more, str) else before + more)
