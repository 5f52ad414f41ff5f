"""DecodeStage: threads that decode the samples of some batches ahead of the loop."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.ragged import Block, Ragged
from ..order.epoch_order import IntArray
from .batch_source import BatchSource, Filled
from .buffer_ring import BufferRing
from .filler import RELEASE_S, Filler, Starved
from .image_decoder import ImageDecoder, UnreadableImage

__all__ = ["DecodeStage", "in_own_thread"]

_PER_TASK = 4  # samples
_AHEAD = 2  # batches after the one that the loop waits for
_Task = Future[list[tuple[int, DataError]]]  # samples that could not be decoded, and why


def in_own_thread() -> bool:
    """Return whether this is a thread of hsgd.

    The garbage collector may end an iteration in any thread, and a thread must not wait for itself.
    """
    return threading.current_thread().name.startswith("hsgd-")


class DecodeStage(BatchSource):
    """Source of batches that decodes what a Filler reads, a few batches ahead of the loop."""

    def __init__(
        self,
        filler: Filler,
        ring: BufferRing,
        decoders: Mapping[str, ImageDecoder],
        seed: int,
        epoch: int,
        threads: int,
    ) -> None:
        self.stats = filler.stats
        self._filler, self._ring, self._decoders = filler, ring, decoders
        self._seed, self._epoch = seed, epoch
        self._pool = ThreadPoolExecutor(threads, "hsgd-decode")
        self._begun: deque[tuple[Filled | BaseException, list[_Task]]] = deque()
        self._ended = False  # nothing more comes from the filler

    @property
    def decoded_bytes(self) -> int:
        return self._ring.nbytes

    def get(self, timeout_s: float) -> Filled | BaseException | None:
        while not self._ended and (not self._begun or self._may_begin_another()):
            found = self._filler.get_ready() if self._begun else self._filler.get(timeout_s)
            if isinstance(found, Starved):
                break
            if found is None:
                self._ended = True
            else:
                self._begun.append(self._begin(found))
        if not self._begun:
            return None
        filled, tasks = self._begun.popleft()
        if isinstance(filled, BaseException):
            return filled
        try:
            self._finish(filled, tasks, timeout_s)
        except Exception as error:
            return error
        return filled

    def arrays(self, filled: Filled) -> dict[str, Block]:
        decoded: dict[str, Block] = filled.memory
        return decoded

    def close(self) -> None:
        self._ended = True
        self._begun.clear()
        self._filler.close()

    def release(self, timeout_s: float) -> bool:
        self._pool.shutdown(wait=not in_own_thread(), cancel_futures=True)
        self._ring.discard()
        return self._filler.release(timeout_s)

    def _may_begin_another(self) -> bool:
        return (
            len(self._begun) <= _AHEAD
            and isinstance(self._begun[-1][0], Filled)
            and not self._filler.needs_room
            and (self._ring.can_grow() or self._ring.has_free())
            and self._filler.has_ready()
        )

    def _begin(self, found: Filled | BaseException) -> tuple[Filled | BaseException, list[_Task]]:
        """Let the threads decode a batch; pass on an error in its place."""
        if isinstance(found, BaseException):
            return found, []
        try:
            return self._start(found)
        except Exception as error:  # belongs to this step; all ranks will get it
            return error, []

    def _start(self, filled: Filled) -> tuple[Filled, list[_Task]]:
        arrays = self._filler.arrays(filled)
        if filled.memory is None:
            specs = [each.memory_spec(name) for name, each in self._decoders.items()]
            targets: dict[str, Any] = {s.name: np.empty((0, *s.shape), s.dtype) for s in specs}
        else:
            targets = self._memory(filled.count)
        skipped = np.zeros(filled.count, bool)
        for missing, _ in filled.bad:
            skipped[missing] = True
        samples = np.concatenate([*filled.samples, np.empty(0, np.int64)])
        tasks = []
        for name, decoder in self._decoders.items():
            encoded, target = arrays[name], targets[name]
            assert isinstance(encoded, Ragged)
            draws = decoder.draw(self._seed, self._epoch, samples)
            for low in range(0, filled.count, _PER_TASK):
                rows = [
                    row
                    for row in range(low, min(low + _PER_TASK, filled.count))
                    if not skipped[row]
                ]
                tasks.append(
                    self._pool.submit(self._decode, name, encoded, samples, draws, target, rows)
                )
        whole = {
            name: targets[name].transpose(0, 3, 1, 2) if name in targets else block
            for name, block in arrays.items()
        }
        return Filled(whole, filled.count, filled.bad), tasks

    def _finish(self, filled: Filled, tasks: list[_Task], timeout_s: float) -> None:
        """Wait for a batch, and note in it which samples could not be decoded."""
        for task in tasks:
            for row, error in task.result(timeout_s):
                filled.bad.append((np.array([row], np.int64), error))

    def _memory(self, count: int) -> dict[str, Block]:
        try:
            slot = self._ring.take(0 if self._ring.can_grow() else RELEASE_S)
        except queue.Empty:
            if not self._ring.can_grow():
                raise MemoryError(
                    f"{self._filler.plan.data.path}: the program keeps decoded batches of "
                    f"{self._ring.nbytes >> 20} MiB, all that memory_limit allows; drop them "
                    "before asking for more, or raise memory_limit or read_ahead"
                ) from None
            self._ring.grow(1)
            slot = self._ring.take(0)
        return self._ring.arrays(slot, count)

    def _decode(
        self,
        name: str,
        encoded: Ragged,
        samples: IntArray,
        draws: NDArray[np.float64],
        target: NDArray[np.uint8],
        rows: list[int],
    ) -> list[tuple[int, DataError]]:
        """Decode some rows of a batch in a thread; return those that failed, and why."""
        decoder, failed = self._decoders[name], []
        for row in rows:
            try:
                decoder.decode(encoded[row], draws[row], target[row])
            except UnreadableImage as error:
                failed.append((row, self._error(name, int(samples[row]), str(error))))
        return failed

    def _error(self, name: str, sample: int, reason: str) -> DataError:
        slab = next(s for s in self._filler.plan.data.slabs if sample < s.start + s.count)
        return DataError(
            f"{slab.path}: {name!r} of sample {sample} (row {sample - slab.start} of this file) "
            f'cannot be decoded: {reason}; convert without it, or use on_error="substitute"'
        )
