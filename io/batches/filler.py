"""Filler: threads that read each piece of the stream once, straight into its batches.

One thread plans the next piece (scheduler.py) while the others read the last one. They take its
reads one by one inside libhsgd_io, without the GIL, so a busy training loop does not delay them.
Rows that could not be read come with their error.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from hsgd.errors import DataError

from ..format.ragged import Block
from ..order.epoch_order import IntArray
from ..reading import row_copies
from ..reading.claimed_memory import claimed_memory
from ..reading.row_reader import ReadStats, RowReader
from ..reading.slab_files import SlabFiles
from ..remote.object_reader import ObjectReader, RemoteAccess
from .batch_source import BatchSource, Filled
from .buffer_ring import BufferRing, RingClosed, Slot
from .scheduler import PieceReads, ReadPlan, Scheduler, SlowRead
from .segment_finder import CU_SEQLENS, SegmentFinder, cumulative

__all__ = ["RELEASE_S", "Filler", "Starved"]

# Reads wait for a disk if 1 of 8 tasks does: small fields come with the readahead of a large one.
_SLEEPS = 8
# A thread that waits for many slots is not woken for each: a wake takes the GIL from the training
# loop.
_MANY_SLOTS = 32
_GATHER_S = 0.001
RELEASE_S = 10.0  # for another thread of the program to drop batches when memory has run out


class Starved:
    """Marker from the threads: perhaps no batch can come because the loop holds all slots."""


@dataclass
class _Work:
    """A piece being read: its reads, and the batches that they fill."""

    first: int  # sample, in the share
    first_step: int
    batches: list[Filled]
    complete: int  # number of batches that end with this piece
    reads: PieceReads
    unfinished: int

    def has_reads(self) -> bool:
        return self.reads.batch.has_work() or bool(self.reads.slow)


class Filler(BatchSource):
    """Source of batches that reads a plan with `threads` threads, which it starts.

    The threads are daemons, so a forgotten iterator never keeps the interpreter from ending. They
    end with the plan, after an error of their own, or after close(). `stats` has one ReadStats for
    each thread, written by it, and one for planning. If `needs_room`, the next get() frees or adds
    slots.
    """

    def __init__(self, plan: ReadPlan, ring: BufferRing, threads: int) -> None:
        self.plan, self._ring = plan, ring
        self.needs_room = False
        self._files = SlabFiles(plan.data, direct=plan.direct)
        self._objects = ObjectReader(plan.data.access or RemoteAccess())
        planning = ReadStats()  # one thread at a time plans
        self._scheduler = Scheduler(plan, ring.offsets, self._files, self._objects, planning)
        self._segments: SegmentFinder | None = None
        if plan.data.windows is not None:
            self._segments = SegmentFinder(
                plan.data.windows, plan.share.batch_size, self._objects, planning
            )
        self._pieces = plan.pieces()
        self._planned = 0  # samples of the share in planned pieces
        self._open: dict[int, Filled] = {}  # batches that wait for another piece, by step
        self._completed = 0  # batches that end in a planned piece
        self._works: deque[_Work] = deque()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._wanted_changed = threading.Condition(lock)  # for threads that do not help
        self._planning = self._exhausted = self._closed = False
        self._starved = False  # the planner waits for a slot
        self._called = False
        self._cores = max(2, len(os.sched_getaffinity(0)))  # one plans, one reads
        self._wanted = threads  # threads that read; fewer if reads do not wait for a disk
        self._ready: queue.SimpleQueue[Filled | BaseException | Starved | None]
        self._ready = queue.SimpleQueue()
        of_threads = [ReadStats() for _ in range(threads)]
        self.stats = [*of_threads, planning]
        self.threads = [
            threading.Thread(target=self._run, args=(number, stats), name="hsgd-io", daemon=True)
            for number, stats in enumerate(of_threads)
        ]
        for thread in self.threads:
            thread.start()

    def get(self, timeout_s: float) -> Filled | BaseException | None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self.needs_room:
                self.needs_room = False
                self._make_room(timeout_s)
            found = self._next(max(0.0, deadline - time.monotonic()))
            if not isinstance(found, Starved):
                return found
            self.needs_room = True

    def get_ready(self) -> Filled | BaseException | Starved | None:
        """Return what is there, like get(), or Starved if get() must make room; never waits."""
        found = self._next(0)
        self.needs_room = isinstance(found, Starved)
        return found

    def _next(self, timeout_s: float) -> Filled | BaseException | Starved | None:
        found = self._ready.get(timeout=timeout_s)
        if isinstance(found, Starved):
            self._called = False
            if self._starved and not self._ready.empty():
                self._call_for_slots()  # batches came after the call: ask again behind them
        return found

    def _make_room(self, timeout_s: float) -> None:
        """Add slots if the loop holds so many batches that none is left to read into."""
        if not self._is_stuck():
            return
        if self._ring.can_grow():
            self._ring.grow(max(1, self._ring.base_slots // 2))
            return
        deadline = time.monotonic() + min(RELEASE_S, timeout_s)
        while self._is_stuck():
            if time.monotonic() > deadline:
                raise MemoryError(
                    f"{self.plan.source}: the program keeps batches of "
                    f"{self._ring.nbytes >> 20} MiB, all that memory_limit allows; drop them "
                    "before asking for more, or raise memory_limit"
                )
            time.sleep(0.01)  # destructors in other threads wake nobody

    def arrays(self, filled: Filled) -> dict[str, Block]:
        slot, ring, windows = filled.memory, self._ring, self.plan.data.windows
        found = ring.empty() if slot is None else ring.arrays(slot, filled.count)
        if windows is not None:
            found[CU_SEQLENS] = cumulative(filled.segments, filled.count * windows.length)
        return found

    def has_ready(self) -> bool:
        """Return whether an item is there, even if only Starved."""
        return not self._ready.empty()

    def _is_stuck(self) -> bool:
        """Return whether no batch can come because the loop holds all slots."""
        return (
            self._starved and self._ready.empty() and not self._works and not self._ring.has_free()
        )

    def close(self) -> None:
        self._end()
        self._ready.put(None)

    def release(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for thread in self.threads:
            if thread is not threading.current_thread():  # the garbage collector may run anywhere
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self.threads):
            return False
        self._files.close()
        self._scheduler.close()
        if self._segments is not None:
            self._segments.close()
        left = {id(filled): filled for work in self._works for filled in work.batches}
        left |= {id(filled): filled for filled in self._open.values()}
        while not self._ready.empty():
            found = self._ready.get_nowait()
            if isinstance(found, Filled):
                left[id(found)] = found
        for filled in left.values():
            if filled.memory is not None:
                self._ring.give_back(filled.memory)
        return True

    def _end(self) -> None:
        self._objects.stop()
        with self._changed:
            self._closed = True
            for work in self._works:
                work.reads.batch.cancel()
                work.reads.slow.clear()
            self._changed.notify_all()
            self._wanted_changed.notify_all()
        self._ring.wake()

    def _run(self, number: int, stats: ReadStats) -> None:
        try:
            nbytes = self._scheduler.staging_bytes
            what = "its largest chunk or checksum block"
            with claimed_memory(self.plan.data.path, what, nbytes):
                staging = row_copies.Staging(nbytes)
            with RowReader(self.plan.data, stats, self._objects) as reader:
                while (work := self._next_work(number)) is not None:
                    self._help(work, reader, staging, stats)
        except RingClosed:
            pass
        except BaseException as error:  # the training loop gets all errors
            self._end()
            self._ready.put(error)

    def _next_work(self, number: int) -> _Work | None:
        """Return a piece with reads to do; plan or wait until there is one. None at the end."""
        ahead = 1 if len(self.threads) > 1 else 0
        while True:
            with self._changed:
                while True:
                    if self._closed:
                        return None
                    if number >= self._wanted and not (self._exhausted and not self._works):
                        self._wanted_changed.wait()
                        continue
                    pending = [work for work in self._works if work.has_reads()]
                    if not self._planning and not self._exhausted and len(pending) <= ahead:
                        self._planning = True
                        break
                    if pending:
                        return pending[0]
                    if self._exhausted and not self._planning:
                        return None
                    self._changed.wait()
            handed_over = False
            try:
                handed_over = self._plan_next()
            finally:
                if not handed_over:
                    with self._changed:
                        self._planning = False
                        self._changed.notify_all()

    def _plan_next(self) -> bool:
        """Turn the next piece into reads, in one thread at a time; True if another may plan."""
        piece = next(self._pieces, None)
        if piece is None:
            self._finish_plan()
            return False
        share = self.plan.share
        first, stop = self._planned, self._planned + piece.stream_rows
        self._planned = stop
        first_step, last_step = first // share.batch_size, (stop - 1) // share.batch_size
        new = [step for step in range(first_step, last_step + 1) if step not in self._open]
        for number, step in enumerate(new):
            slot = self._take_slot(len(new) - number)
            self._open[step] = Filled(slot, share.batch_count(step))
        ended = stop // share.batch_size if stop < share.count else last_step + 1
        batches = [self._open[step] for step in range(first_step, last_step + 1)]
        slots = (filled.memory for filled in batches)
        bases = np.array([slot.address for slot in slots if slot is not None], np.uint64)
        skip = first - first_step * share.batch_size
        reads = self._scheduler.reads(piece, skip, bases)
        if self._segments is not None:
            segments, failed = self._segments.find(piece, skip, len(batches))
            for filled, starts in zip(batches, segments, strict=True):
                filled.segments.append(starts)
            reads.failed.extend(failed)
        if self.plan.numbered:
            edges = np.arange(share.batch_size - skip, piece.stream_rows, share.batch_size)
            for filled, part in zip(batches, np.split(piece.samples(), edges), strict=True):
                filled.samples.append(part)
        unfinished = (len(reads.batch.tasks) > 0) + len(reads.slow)
        work = _Work(first, first_step, batches, ended - first_step, reads, unfinished)
        for step in range(first_step, ended):
            del self._open[step]
        with self._changed:
            self._completed += work.complete
            self._works.append(work)
            if self._closed:
                reads.batch.cancel()
                reads.slow.clear()
            self._planning = False
            self._deliver_finished()
            self._changed.notify_all()
        return True

    def _take_slot(self, needed: int) -> Slot:
        """Return a free slot; `needed` is the number that will be taken, this one included."""
        try:
            return self._ring.take(0)
        except queue.Empty:
            self._starved = True
        try:
            self._call_for_slots()
            slot = self._ring.take(None)
        finally:
            self._starved = False
        if needed > _MANY_SLOTS:
            time.sleep(_GATHER_S)
        return slot

    def _call_for_slots(self) -> None:
        if not self._called:
            self._called = True
            self._ready.put(Starved())

    def _help(
        self, work: _Work, reader: RowReader, staging: row_copies.Staging, stats: ReadStats
    ) -> None:
        batch = work.reads.batch
        if batch.has_work():
            began = time.perf_counter()
            was_last = batch.work(staging)
            stats.read_s += time.perf_counter() - began
            if was_last:
                failed = self._examine(work.reads, staging, stats)
                sleeps = _SLEEPS * batch.tasks["slept"].sum() >= len(batch.tasks)
                self._want_threads(waits=work.reads.reads_slowly or bool(sleeps))
                self._done(work, failed)
            return
        try:
            read = work.reads.slow.popleft()
        except IndexError:
            return
        self._done(work, _read_slowly(reader, read, verify=self.plan.verify))

    def _examine(
        self, reads: PieceReads, staging: row_copies.Staging, stats: ReadStats
    ) -> list[tuple[IntArray, DataError]]:
        """Count what was read and return failures; repeat refused direct reads without O_DIRECT."""
        tasks = reads.batch.tasks
        refused = np.flatnonzero((tasks["status"] == errno.EINVAL) & (tasks["alignment"] > 1))
        if len(refused):
            self._files.leave_direct("the file system refuses direct reads")
            tasks["alignment"] = 1
            again = tasks[refused]
            row_copies.TaskBatch(again, reads).work(staging)
            tasks[refused] = again
        stats.direct_refusal = self._files.direct_refusal
        stats.preadv_calls += int(tasks["calls"].sum())
        stats.bytes_read += reads.nbytes
        return [reads.explain(number) for number in np.flatnonzero(tasks["status"]).tolist()]

    def _want_threads(self, *, waits: bool) -> None:
        """Choose the number of reading threads after a piece.

        All threads read if some tasks waited for a disk, or Python read data that takes time. Reads
        from the page cache keep one core busy each: more threads than cores only take turns with
        the training loop. On two cores two threads instead of four made batches of 64 samples of 3
        KB 1.3 times as fast.
        """
        with self._changed:
            wanted = len(self.threads) if waits else self._cores
            if wanted > self._wanted:
                self._wanted_changed.notify_all()
            self._wanted = wanted

    def _done(self, work: _Work, failed: list[tuple[IntArray, DataError]]) -> None:
        """Record that some reads of a piece are done; deliver complete batches, in order."""
        with self._changed:
            work.reads.failed.extend(failed)
            work.unfinished -= 1
            self._deliver_finished()

    def _deliver_finished(self) -> None:
        while self._works and not self._works[0].unfinished and not self._closed:
            self._deliver(self._works.popleft())
            self._changed.notify_all()

    def _deliver(self, work: _Work) -> None:
        """Deliver the batches that a piece completes, and note in all what was not read."""
        self._files.release(work.reads.slabs)
        batch_size = self.plan.share.batch_size
        for places, error in work.reads.failed:
            positions = places[places >= 0] + work.first
            steps = positions // batch_size
            for step in np.unique(steps).tolist():
                filled = work.batches[step - work.first_step]
                filled.bad.append((positions[steps == step] % batch_size, error))
        for filled in work.batches[: work.complete]:
            self._ready.put(filled)
        if self._starved and not self._works:
            self._call_for_slots()

    def _finish_plan(self) -> None:
        """After the last piece, deliver empty batches if the share ended early, then the end."""
        with self._changed:
            while self._works and not self._closed:
                self._changed.wait()
            self._exhausted = True
            self._wanted_changed.notify_all()
            for _ in range(self._completed, self.plan.share.steps):
                self._ready.put(Filled(None, 0))
            self._ready.put(None)


def _read_slowly(
    reader: RowReader, read: SlowRead, *, verify: bool
) -> list[tuple[IntArray, DataError]]:
    """Read what only Python can read: chunks, by h5py, another byte order; return failures."""
    failed = []
    done = 0
    for number, (start, count) in enumerate(
        zip(read.starts.tolist(), read.counts.tolist(), strict=True)
    ):
        rows = slice(done, done + count)
        try:
            reader.scatter(
                read.name,
                read.slab,
                start,
                read.addresses[rows],
                first=None if read.firsts is None else int(read.firsts[number]),
                sizes=None if read.sizes is None else read.sizes[rows],
                verify=verify,
            )
        except DataError as error:
            failed.append((read.places[rows], error))
        done += count
    return failed
