"""MemoryPlan: how much memory the batches of a loader take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .batches.buffer_ring import BufferRing, batch_layout
from .batches.image_decoder import ImageDecoder
from .batches.scheduler import staging_bytes
from .format.data_map import DataMap
from .options import ReadOptions
from .order.epoch_order import Share
from .reading.row_copies import MOST_ROWS

__all__ = ["MemoryPlan"]


@dataclass(frozen=True)
class MemoryPlan:
    """The sizes of rings, within memory_limit."""

    data: DataMap
    options: ReadOptions
    decoders: Mapping[str, ImageDecoder]
    batch_samples: int  # of the largest batch
    on_cuda: bool  # batches are copied to a CUDA device

    @property
    def pins_decoded(self) -> bool:
        return self.options.pin_memory or self.on_cuda

    @property
    def pins_rows(self) -> bool:
        """True if batches as read are page-locked.

        With ragged fields a slot has room for the longest samples, and most of it is never touched;
        then it is page-locked only on request.
        """
        ragged = any(spec.ragged for spec in self.data.fields)
        return self.options.pin_memory or (self.pins_decoded and not ragged)

    def slots(self, share: Share, piece_samples: int) -> int:
        """Return the number of batches in a ring: two windows, read_ahead, and those of the loop.

        Raises ValueError for a batch_size or memory_limit with which nothing can be read.
        """
        if self.batch_samples >= MOST_ROWS:
            raise ValueError(
                f"batches of {self.batch_samples} samples; use a batch_size below {MOST_ROWS}"
            )
        window = -(-piece_samples // share.batch_size) + 1
        slots = max(1, min(2 * window + self.options.read_ahead, share.steps + 1))
        limit = self._ring_limit
        if limit is None:
            return slots
        each = batch_layout(
            self.data.fields, self.batch_samples, pin=self.pins_rows, longest=self._longest
        ).nbytes
        least = min(slots, window + 2)
        if least * each > limit:
            raise ValueError(
                f"memory_limit={self.options.memory_limit} is too small: a window of "
                f"{piece_samples} samples, 2 batches and {self.options.threads} threads "
                f"need {least * each + self._other_bytes} bytes; raise "
                "it, or lower window_bytes, batch_size or threads"
                f"{' (page-locked batches take powers of two)' if self.pins_rows else ''}"
            )
        return min(slots, limit // each)

    def new_ring(self, slots: int) -> BufferRing:
        return BufferRing(
            self.data.fields,
            self.batch_samples,
            slots,
            self._ring_limit,
            pin=self.pins_rows,
            longest=self._longest,
        )

    def new_decoded_ring(self) -> BufferRing:
        """Allocate the memory of decoded batches; with memory_limit it never grows."""
        specs = [each.memory_spec(name) for name, each in self.decoders.items()]
        limit = None if self.options.memory_limit is None else self._decoded_bytes
        slots = self._decoded_slots
        return BufferRing(specs, self.batch_samples, slots, limit, pin=self.pins_decoded)

    @property
    def _longest(self) -> dict[str, int]:
        return {spec.name: self.data.longest(spec) for spec in self.data.fields if spec.ragged}

    @property
    def _decoded_slots(self) -> int:
        return max(2, self.options.read_ahead)  # the loop holds one while it takes the next

    @property
    def _decoded_bytes(self) -> int:
        if not self.decoders:
            return 0
        specs = [each.memory_spec(name) for name, each in self.decoders.items()]
        each = batch_layout(specs, self.batch_samples, pin=self.pins_decoded).nbytes
        return self._decoded_slots * each

    @property
    def _other_bytes(self) -> int:
        """Bytes that count for memory_limit besides the ring."""
        options = self.options
        each = staging_bytes(self.data, direct=options.direct, verify=options.verify)
        return options.threads * each + self._decoded_bytes

    @property
    def _ring_limit(self) -> int | None:
        limit = self.options.memory_limit
        return None if limit is None else limit - self._other_bytes
