"""Encoded samples of a batch to pixels, in threads, some batches ahead of the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.data_map import DataMap
from ..format.ragged import Block, Ragged
from ..order.epoch_order import IntArray
from .buffer_ring import BufferRing
from .filler import Filled
from .image_decoder import ImageDecoder, UnreadableImage

__all__ = [
    "RELEASE_S",
    "DecodeSettings",
    "DecodeStage",
    "DecodingBatch",
    "decoded_bytes",
    "in_own_thread",
]

_PER_TASK = 4  # samples
RELEASE_S = 10.0  # for another thread of the program to drop batches when memory has run out


@dataclass(frozen=True)
class DecodeSettings:
    """decoders: by field. seed, epoch: of the order, for what is random. slots: batches that are
    there from the start. is_limited: there are never more.
    """

    data: DataMap
    decoders: Mapping[str, ImageDecoder]
    seed: int
    epoch: int
    threads: int
    batch_samples: int
    slots: int
    pin: bool
    is_limited: bool = False


@dataclass(frozen=True)
class DecodingBatch:
    """A batch on its way. arrays: its fields, those that are decoded not yet whole. tasks: each
    gives the samples that it could not decode.
    """

    arrays: dict[str, Block]
    tasks: list[Future[list[tuple[int, DataError]]]]


def decoded_bytes(
    decoders: Mapping[str, ImageDecoder], batch_samples: int, *, pin: bool = False
) -> int:
    """Memory of one decoded batch."""
    specs = [each.memory_spec(name) for name, each in decoders.items()]
    return BufferRing(specs, batch_samples, 0, pin=pin).slot_bytes


def in_own_thread() -> bool:
    """Whether this is a thread of ours: the garbage collector may end an iteration in any thread,
    and one that waits for itself never ends.
    """
    return threading.current_thread().name.startswith("hsgd-")


class DecodeStage:
    """For one iteration. Belongs to the training loop's thread."""

    def __init__(self, settings: DecodeSettings) -> None:
        self._settings = settings
        self._specs = [each.memory_spec(name) for name, each in settings.decoders.items()]
        limit = None
        if settings.is_limited:
            each = decoded_bytes(settings.decoders, settings.batch_samples, pin=settings.pin)
            limit = settings.slots * each
        self._ring = BufferRing(
            self._specs, settings.batch_samples, settings.slots, limit, pin=settings.pin
        )
        self._pool = ThreadPoolExecutor(settings.threads, "hsgd-decode")

    def close(self) -> None:
        """End the threads, and give up the memory."""
        self._pool.shutdown(wait=not in_own_thread(), cancel_futures=True)
        self._ring.discard()

    @property
    def nbytes(self) -> int:
        """Bytes of decoded batches, those that the loop has included."""
        return self._ring.nbytes

    def has_room(self) -> bool:
        """Whether another batch can begin now."""
        return self._ring.can_grow() or self._ring.has_free()

    def start(self, filled: Filled, arrays: dict[str, Block]) -> DecodingBatch:
        """Let the threads decode a batch."""
        if filled.slot is None:
            targets: dict[str, Any] = {
                spec.name: np.empty((0, *spec.shape), spec.dtype) for spec in self._specs
            }
        else:
            targets = self._memory(filled.count)
        skipped = np.zeros(filled.count, bool)
        for missing, _ in filled.bad:
            skipped[missing] = True
        samples = np.concatenate([*filled.samples, np.empty(0, np.int64)])
        tasks = []
        for name, decoder in self._settings.decoders.items():
            encoded, target = arrays[name], targets[name]
            assert isinstance(encoded, Ragged)
            draws = decoder.draw(self._settings.seed, self._settings.epoch, samples)
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
        return DecodingBatch(whole, tasks)

    def finish(self, filled: Filled, batch: DecodingBatch, timeout_s: float) -> dict[str, Block]:
        """Wait for a batch; samples that could not be decoded are noted in `filled`."""
        for task in batch.tasks:
            for row, error in task.result(timeout_s):
                filled.bad.append((np.array([row], np.int64), error))
        return batch.arrays

    def _memory(self, count: int) -> dict[str, Block]:
        try:
            slot = self._ring.take(0 if self._ring.can_grow() else RELEASE_S)
        except queue.Empty:
            if not self._ring.can_grow():
                raise MemoryError(
                    f"{self._settings.data.path}: the program keeps decoded batches of "
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
        """In a thread: some rows of a batch; those that cannot be decoded, and why."""
        decoder, failed = self._settings.decoders[name], []
        for row in rows:
            try:
                decoder.decode(encoded[row], draws[row], target[row])
            except UnreadableImage as error:
                failed.append((row, self._error(name, int(samples[row]), str(error))))
        return failed

    def _error(self, name: str, sample: int, reason: str) -> DataError:
        slab = next(s for s in self._settings.data.slabs if sample < s.start + s.count)
        return DataError(
            f"{slab.path}: {name!r} of sample {sample} (row {sample - slab.start} of this file) "
            f'cannot be decoded: {reason}; convert without it, or use on_error="substitute"'
        )
