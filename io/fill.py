"""Threads that fill batches: each block of the stream is read once, straight into its batches.

Owns the way from pieces of the stream (partition.py) to reads, who does them, and the order in
which finished batches come out. One thread plans the next piece while the others read the last one;
rows of a block go to their batches in the same call that reads them, without a buffer in between.
Never talks to other ranks, and never gives up a batch in silence: rows that could not be read come
with the error.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from hsgd.io.datamap import DataMap
from hsgd.io.native import Addresses
from hsgd.io.partition import EpochOrder, IntArray, Piece, Range, Share
from hsgd.io.reader import ReadStats, RowReader
from hsgd.io.ring import BufferRing, RingClosed, Slot

from hsgd.errors import DataError

__all__ = ["STARVED", "Filled", "Filler", "Plan", "Starved"]


class Starved:
    """The type of STARVED."""


STARVED = Starved()


@dataclass(frozen=True)
class Plan:
    """What one rank reads in one iteration; holds no handle.

    ranges: positions of the stream, in the order in which this rank gets them.
    """

    data: DataMap
    share: Share
    order: EpochOrder
    ranges: tuple[Range, ...]
    block_samples: int
    direct: bool

    def pieces(self) -> Iterator[Piece]:
        """All that is to be read, in order."""
        for start, count in self.ranges:
            yield from self.order.pieces(start, count)


@dataclass
class Filled:
    """A batch whose rows have arrived. bad: rows that have not, by the error that kept them."""

    slot: Slot | None  # None for an empty batch
    count: int
    bad: list[tuple[IntArray, DataError]] = field(default_factory=list)


@dataclass
class _Work:
    """A piece on its way: reads that are not done yet, and the batches that they go to."""

    first: int  # of its samples, in the share
    first_step: int
    batches: list[Filled]
    complete: int  # so many of them end with this piece
    unfinished: int = 0
    failed: list[tuple[IntArray, DataError]] = field(default_factory=list)


@dataclass(frozen=True)
class _Task:
    """Ranges of one slab, at most a block of them, and where their rows go."""

    work: _Work
    slab: int
    starts: IntArray  # from the first row of the slab
    counts: IntArray
    places: IntArray  # in the piece, -1 for rows that nobody wants
    addresses: dict[str, Addresses]


class Filler:
    """Reads a plan with `threads` threads; finished batches, or an exception, come from `get`.

    Batches come in order. Threads are daemons and end with the plan, with an error of their own, or
    after close(). stats: one ReadStats for each thread, written by it.
    """

    def __init__(self, plan: Plan, ring: BufferRing, threads: int) -> None:
        self._plan, self._ring = plan, ring
        self._pieces = plan.pieces()
        self._planned = 0  # samples of the share whose piece was planned
        self._open: dict[int, Filled] = {}  # batches that wait for rows, by step
        self._completed = 0  # batches that were given to `_ready` or belong to a piece
        self._tasks: deque[_Task] = deque()
        self._works: deque[_Work] = deque()
        self._changed = threading.Condition()
        self._planning = self._exhausted = self._closed = False
        self._starved = False  # the planner waits for a slot
        self._called = False
        self._ready: queue.SimpleQueue[Filled | BaseException | Starved | None]
        self._ready = queue.SimpleQueue()
        self.stats = [ReadStats() for _ in range(threads)]
        self.threads = [
            threading.Thread(target=self._run, args=(stats,), name="hsgd-io", daemon=True)
            for stats in self.stats
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    def get(self, timeout_s: float) -> Filled | BaseException | Starved | None:
        """The next batch, the exception that ended the threads, or None at the end.

        STARVED means that perhaps no batch can come because the loop holds all slots: see
        is_stuck(). Raises queue.Empty after timeout_s.
        """
        found = self._ready.get(timeout=timeout_s)
        if isinstance(found, Starved):
            self._called = False
            if self._starved and not self._ready.empty():
                self._call_for_slots()  # batches came after the call: ask again behind them
        return found

    def is_stuck(self) -> bool:
        """Whether nothing can come any more because the loop holds all batches."""
        return (
            self._starved and self._ready.empty() and not self._works and not self._ring.has_free()
        )

    def close(self) -> None:
        """Let the threads end as soon as they can; does not wait for them."""
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._changed.notify_all()
        self._ring.wake()
        self._ready.put(None)

    def release(self) -> None:
        """Give back the slots of batches that were not handed out; after the threads have ended."""
        left = {id(filled): filled for work in self._works for filled in work.batches}
        left |= {id(filled): filled for filled in self._open.values()}
        while not self._ready.empty():
            found = self._ready.get_nowait()
            if isinstance(found, Filled):
                left[id(found)] = found
        for filled in left.values():
            if filled.slot is not None:
                self._ring.give_back(filled.slot)

    def _run(self, stats: ReadStats) -> None:
        """Body of a thread: plan when nothing is left to read, else read."""
        try:
            with RowReader(self._plan.data, stats, direct=self._plan.direct) as reader:
                while (task := self._next_task()) is not None:
                    self._read(reader, task)
        except RingClosed:
            pass
        except BaseException as error:  # whatever it is, the training loop gets it
            with self._changed:
                self._closed = True
                self._tasks.clear()
                self._changed.notify_all()
            self._ring.wake()
            self._ready.put(error)

    def _next_task(self) -> _Task | None:
        """Something to read; plans, or waits, until there is. None at the end."""
        # One thread alone must not wait for slots while it has reads to do; several keep one read
        # per thread in stock while one of them plans.
        spare = len(self.threads) if len(self.threads) > 1 else 1
        while True:
            with self._changed:
                while True:
                    if self._closed:
                        return None
                    may_plan = not self._planning and not self._exhausted
                    if may_plan and len(self._tasks) < spare and (spare > 1 or not self._tasks):
                        self._planning = True
                        break
                    if self._tasks:
                        return self._tasks.popleft()
                    if self._exhausted and not self._planning:
                        return None
                    self._changed.wait()
            try:
                self._plan_next()
            finally:
                with self._changed:
                    self._planning = False
                    self._changed.notify_all()

    def _plan_next(self) -> None:
        """Turn the next piece into tasks. Only one thread at a time is here."""
        piece = next(self._pieces, None)
        if piece is None:
            self._finish_plan()
            return
        share, ring = self._plan.share, self._ring
        first, stop = self._planned, self._planned + piece.stream_rows
        self._planned = stop
        first_step, last_step = first // share.batch_size, (stop - 1) // share.batch_size
        for step in range(first_step, last_step + 1):
            if step not in self._open:
                self._open[step] = Filled(self._take_slot(), share.batch_count(step))
        ended = stop // share.batch_size if stop < share.count else last_step + 1
        batches = [self._open[step] for step in range(first_step, last_step + 1)]
        work = _Work(first, first_step, batches, ended - first_step)
        slots = (filled.slot for filled in batches)
        bases = np.array([slot.address for slot in slots if slot is not None], np.uint64)
        addresses = self._addresses(piece, first - first_step * share.batch_size, bases)
        tasks = list(self._cut(piece, work, addresses))
        for step in range(first_step, ended):
            del self._open[step]
        with self._changed:
            self._completed += work.complete
            work.unfinished = len(tasks)
            self._works.append(work)
            if not self._closed:
                self._tasks.extend(tasks)
            self._changed.notify_all()

    def _take_slot(self) -> Slot:
        try:
            return self._ring.take(0)
        except queue.Empty:
            self._starved = True
        try:
            self._call_for_slots()
            return self._ring.take(None)
        finally:
            self._starved = False

    def _call_for_slots(self) -> None:
        if not self._called:
            self._called = True
            self._ready.put(STARVED)

    def _addresses(self, piece: Piece, skip: int, bases: Addresses) -> dict[str, Addresses]:
        """Field -> address of every row that the piece reads. skip: rows before it in a batch."""
        places = piece.places + skip
        batch, row = np.divmod(places, self._plan.share.batch_size)
        base = bases[batch]  # an unwanted row (-1) may get that of any batch
        unwanted = piece.places < 0
        some_unwanted = bool(unwanted.any())
        rows = row.astype(np.uint64)
        found = {}
        for spec in self._plan.data.fields:
            of_field = base + rows * np.uint64(spec.row_bytes)
            of_field += np.uint64(self._ring.offsets[spec.name])
            if some_unwanted:
                of_field[unwanted] = 0
            found[spec.name] = of_field
        return found

    def _cut(
        self, piece: Piece, work: _Work, addresses: dict[str, Addresses]
    ) -> Iterator[_Task]:
        """The ranges of a piece as tasks: those of one slab together, up to a block of rows."""
        stops = self._stops()
        slabs = np.searchsorted(stops, piece.starts, side="right")
        ends = np.cumsum(piece.counts)
        portion = (ends - 1) // self._plan.block_samples
        breaks = np.flatnonzero((np.diff(slabs) != 0) | (np.diff(portion) != 0)) + 1
        edges = [0, *breaks.tolist(), len(piece.starts)]
        row = 0
        for low, high in zip(edges, edges[1:], strict=False):
            slab = int(slabs[low])
            rows = slice(row, int(ends[high - 1]))
            row = rows.stop
            yield _Task(
                work,
                slab,
                piece.starts[low:high] - self._plan.data.slabs[slab].start,
                np.ascontiguousarray(piece.counts[low:high]),
                piece.places[rows],
                {name: where[rows] for name, where in addresses.items()},
            )

    def _stops(self) -> Sequence[int]:
        return [slab.start + slab.count for slab in self._plan.data.slabs]

    def _read(self, reader: RowReader, task: _Task) -> None:
        failure = None
        try:
            for spec in self._plan.data.fields:
                reader.scatter(
                    spec.name, task.slab, task.starts, task.counts, task.addresses[spec.name]
                )
        except DataError as error:
            failure = error
        with self._changed:
            work = task.work
            if failure is not None:
                work.failed.append((task.places[task.places >= 0], failure))
            work.unfinished -= 1
            while self._works and not self._works[0].unfinished:
                self._deliver(self._works.popleft())
                self._changed.notify_all()

    def _deliver(self, work: _Work) -> None:
        """Hand out the batches that a piece completes, and note in all what it did not read."""
        batch_size = self._plan.share.batch_size
        for places, error in work.failed:
            positions = places + work.first
            steps = positions // batch_size
            for step in np.unique(steps).tolist():
                filled = work.batches[step - work.first_step]
                filled.bad.append((positions[steps == step] % batch_size, error))
        for filled in work.batches[: work.complete]:
            self._ready.put(filled)
        if self._starved and not self._works:
            self._call_for_slots()

    def _finish_plan(self) -> None:
        """After the last piece: empty batches where the share ran out early, then the end."""
        with self._changed:
            while self._works and not self._closed:
                self._changed.wait()
            self._exhausted = True
            for _ in range(self._completed, self._plan.share.steps):
                self._ready.put(Filled(None, 0))
            self._ready.put(None)
