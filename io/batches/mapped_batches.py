"""MappedBatches: batches as views of the mapped files, without copies.

Mappings are private: a program's writes to a batch reach neither the file nor another batch. Every
4 MiB the file must be unchanged; but if a file is truncated while the process reads a batch, SIGBUS
ends it.
"""

from __future__ import annotations

import errno
import itertools
import mmap
from bisect import bisect_right
from collections import deque

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.data_map import DataMap, SlabMap
from ..format.ragged import Block
from ..format.slab_folder import FieldSpec
from ..reading.row_reader import ReadStats
from ..reading.slab_files import SlabFiles
from .batch_source import BatchSource, Filled
from .scheduler import ReadPlan

__all__ = ["MappedBatches", "check_mappable"]

_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)  # Python 3.12 has it
_RUN_BYTES = 4 << 20  # of rows that are mapped after one check of the file


def check_mappable(data: DataMap, shuffle: str, on_error: str) -> None:
    """Raise ValueError with the reason if batches cannot be views of the files."""
    reason = ""
    if data.access is not None:
        reason = f"{data.path} is no file; leave it out"
    elif shuffle != "none":
        reason = f'shuffle={shuffle!r} needs copies; use "none"'
    elif on_error == "substitute":
        reason = 'on_error="substitute" needs copies; use "raise" or "skip"'
    for slab, spec in itertools.product(data.slabs, data.fields):
        extent = slab.extents[spec.name]
        if spec.ragged or extent.chunks is not None:
            reason = reason or f"field {spec.name!r} has samples of different lengths, or chunks"
        elif extent.refusal or not extent.stored_dtype.isnative:
            kind = extent.refusal or "of another byte order"
            reason = reason or f"field {spec.name!r} of {slab.path} cannot be ({kind})"
        elif extent.positions:
            reason = reason or f"samples of {slab.path} lie apart"
        elif extent.offset % spec.dtype.alignment:
            reason = reason or f"field {spec.name!r} of {slab.path} begins at an odd address"
    if reason:
        raise ValueError(f"mapped=True: {reason}")


class MappedBatches(BatchSource):
    """The batches of a plan in the order of the files, made in the calling thread."""

    def __init__(self, plan: ReadPlan) -> None:
        self.stats = [ReadStats()]
        self._plan = plan
        self._files = SlabFiles(plan.data)
        self._stops = list(itertools.accumulate(plan.data.slab_counts))
        self._ranges = deque(plan.ranges)
        self._step, self._left = 0, plan.share.count
        self._row_bytes = plan.data.row_bytes
        batch_bytes = max(1, self._row_bytes * plan.share.batch_size)
        self._run_rows = max(1, _RUN_BYTES // batch_bytes) * plan.share.batch_size
        self._run: dict[str, NDArray[np.generic]] = {}  # consecutive rows
        self._next = self._end = 0  # rows of the run that are not yet in a batch

    def get(self, timeout_s: float) -> Filled | None:
        if self._step == self._plan.share.steps:
            return None
        self._step += 1
        count = min(self._plan.share.batch_size, self._left)
        if not count:
            return Filled(None, 0)
        self._left -= count
        try:
            found = self._gather(count)
        except DataError as error:
            return Filled(None, count, [(np.arange(count), error)])
        self.stats[0].bytes_read += count * self._row_bytes
        return Filled(found, count)

    def arrays(self, filled: Filled) -> dict[str, Block]:
        if filled.memory is None:
            specs = self._plan.data.fields
            return {spec.name: np.empty((0, *spec.shape), spec.dtype) for spec in specs}
        rows: dict[str, Block] = filled.memory
        return rows

    def close(self) -> None:
        self._step = self._plan.share.steps

    def release(self, timeout_s: float) -> bool:
        self._run = {}
        self._files.close()  # batches that the loop holds keep their mapping
        return True

    def _gather(self, count: int) -> dict[str, NDArray[np.generic]]:
        """Return the next rows, copied if in several slabs; skip them if DataError is raised."""
        parts, failure, wanted = [], None, count
        while wanted:
            if self._next == self._end:
                try:  # runs begin with a batch, so most batches lie in one run
                    self._open_run(self._run_rows if wanted == count else wanted)
                except DataError as error:
                    failure = error
                    wanted -= self._pass_over(wanted)
                    continue
            rows = min(wanted, self._end - self._next)
            taken = slice(self._next, self._next + rows)
            parts.append({name: values[taken] for name, values in self._run.items()})
            self._next += rows
            wanted -= rows
        if failure is not None:
            raise failure
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _open_run(self, most: int) -> None:
        """Map up to `most` rows of one slab; DataError if its file changed or cannot be mapped."""
        number, row, rows = self._run_ahead(most)
        slab = self._plan.data.slabs[number]
        descriptor, _ = self._files.acquire(number)
        try:
            # One mapping per run: pages to which the program wrote are freed with its batches.
            self._run = {
                spec.name: self._mapped(descriptor, slab, spec, row, rows)
                for spec in self._plan.data.fields
            }
        except (OSError, ValueError) as error:
            kept = "; each batch that is kept holds one" * (
                isinstance(error, OSError) and error.errno == errno.EMFILE
            )
            raise DataError(f"{slab.path}: cannot be mapped: {error}{kept}") from error
        finally:
            self._files.release([number])
        self._pass_over(rows)
        self._next, self._end = 0, rows

    def _mapped(
        self, descriptor: int, slab: SlabMap, spec: FieldSpec, row: int, rows: int
    ) -> NDArray[np.generic]:
        shape = (rows, *spec.shape)
        if not spec.row_bytes:
            return np.empty(shape, spec.dtype)
        start = slab.extents[spec.name].offset + row * spec.row_bytes
        begin = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = start + rows * spec.row_bytes - begin
        memory = mmap.mmap(descriptor, length, _FLAGS, offset=begin)
        found: NDArray[np.generic] = np.ndarray(shape, spec.dtype, memory, start - begin)
        return found

    def _run_ahead(self, most: int) -> tuple[int, int, int]:
        """Return slab, row in it, and how many consecutive rows follow, at most `most`."""
        start, count = self._ranges[0]
        start %= self._plan.data.num_samples
        number = bisect_right(self._stops, start)
        rows = min(most, count, self._stops[number] - start)
        return number, start - self._plan.data.slabs[number].start, rows

    def _pass_over(self, most: int) -> int:
        """Advance in the stream; return by how many rows, all of one slab."""
        rows = self._run_ahead(most)[2]
        start, count = self._ranges.popleft()
        if rows < count:
            self._ranges.appendleft((start + rows, count - rows))
        return rows
