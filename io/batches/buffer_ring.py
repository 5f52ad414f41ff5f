"""BufferRing: buffers for batches, free again when the last tensor over them is gone."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import queue
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..cache.slot_layout import SlotLayout, slot_layout
from ..format.ragged import Block, Ragged
from ..format.slab_folder import OFFSETS, FieldSpec
from .pinned_memory import block_bytes, bytes_of, new_block

if TYPE_CHECKING:
    import torch

__all__ = ["BufferRing", "RingClosed", "Slot", "batch_layout"]

_PAGE = 4096
_HUGE = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class RingClosed(Exception):
    """The ring was closed while a thread waited for a slot."""


class _PinnedSlots:
    """Slots that get their memory from torch's allocator, batch by batch."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.nbytes = slot_bytes * slots
        self.active = True


class _Arena:
    """One piece of memory for several slots, which are reused while it is `active`."""

    def __init__(self, slot_bytes: int, slots: int, *, sparse: bool) -> None:
        # Huge pages mean fewer page faults and TLB misses. They need an aligned address and private
        # memory: Linux has none for shared memory, mmap's default. If most of a slot is never
        # touched, they would waste memory.
        whole = slot_bytes * slots
        slack = _HUGE if whole >= _HUGE and not sparse else 0
        try:
            self.memory = mmap.mmap(-1, whole + slack, _PRIVATE)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"{slots} batches of {slot_bytes} bytes cannot be had ({error}); lower batch_size, "
                "window_bytes or read_ahead"
            ) from None
        if slack and hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = -(-address // _HUGE) * _HUGE if slack else address
        self.nbytes = whole
        self.active = True


class Slot:
    """Memory of one batch; `block` is its page-locked memory until it is delivered."""

    __slots__ = ("address", "arena", "block")

    def __init__(self, arena: _Arena | _PinnedSlots, address: int = 0) -> None:
        self.arena = arena
        self.address = address
        self.block: torch.Tensor | None = None

    def pin(self, nbytes: int) -> None:
        """Allocate page-locked memory. Raises RuntimeError if the driver refuses."""
        if self.block is None:
            self.block = new_block(nbytes)
            self.address = self.block.data_ptr()


def batch_layout(
    specs: Sequence[FieldSpec],
    batch_size: int,
    *,
    pin: bool = False,
    longest: Mapping[str, int] | None = None,
) -> SlotLayout:
    """Return the layout of a batch in a BufferRing with these arguments, without its memory."""
    elements = {name: batch_size * count for name, count in (longest or {}).items()}
    layout = slot_layout(specs, batch_size, elements)
    nbytes = max(_PAGE, -(-layout.nbytes // _PAGE) * _PAGE)
    return SlotLayout(layout.offsets, block_bytes(nbytes) if pin else nbytes)


class BufferRing:
    """Slots for batches of `batch_size` samples of the fields `specs`.

    A slot is free again when the last array or tensor over it is gone, in whatever thread.

    Args:
        slots: their number at first.
        memory_limit: bytes that all slots together may take. With None slots are added while the
            training loop holds old batches.
        pin: use page-locked memory, from which a CUDA device copies, for whole slots
            (pinned_memory.py). While the device still copies a batch that is gone, its slot gets
            other memory.
        longest: elements of the longest sample of each ragged field. A slot has room for a batch of
            them; unused memory is never touched. Offsets lie before the values.
    """

    def __init__(
        self,
        specs: Sequence[FieldSpec],
        batch_size: int,
        slots: int,
        memory_limit: int | None = None,
        *,
        pin: bool = False,
        longest: Mapping[str, int] | None = None,
    ) -> None:
        layout = batch_layout(specs, batch_size, pin=pin, longest=longest)
        self.offsets, self.slot_bytes = layout.offsets, layout.nbytes
        self._specs = tuple(specs)
        self._limit, self._pin = memory_limit, pin
        # SimpleQueue, as a destructor may put into it at any point of a thread.
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._arenas: list[_Arena | _PinnedSlots] = []
        self._lease = _lease_type(self.slot_bytes, self._free)
        self.base_slots = slots
        self.grow(slots)
        self._base_arenas = 1

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self._arenas)

    def can_grow(self) -> bool:
        return self._limit is None or self.nbytes + self.slot_bytes <= self._limit

    def grow(self, slots: int) -> None:
        """Add slots, as many as the limit allows."""
        if self._limit is not None:
            slots = min(slots, (self._limit - self.nbytes) // self.slot_bytes)
        if slots <= 0:
            return
        sparse = any(spec.ragged for spec in self._specs)
        if self._pin:
            pinned = _PinnedSlots(self.slot_bytes, slots)
            first, *others = (Slot(pinned) for _ in range(slots))
            # Not in a reading thread: CUDA, if not used before, is initialized on the device that
            # is current in the loop's thread. If this fails, take() raises the error.
            with contextlib.suppress(RuntimeError):
                first.pin(self.slot_bytes)
            self._arenas.append(pinned)
            for slot in (first, *others):
                self._free.put(slot)
            return
        arena = _Arena(self.slot_bytes, slots, sparse=sparse)
        self._arenas.append(arena)
        for number in range(slots):
            self._free.put(Slot(arena, arena.address + number * self.slot_bytes))

    def enlarge(self, slots: int) -> None:
        """Keep at least so many slots from now on. Nobody may use the ring meanwhile."""
        if slots > self.base_slots:
            self.grow(slots - self.base_slots)
            self.base_slots, self._base_arenas = slots, len(self._arenas)

    def trim(self) -> None:
        """Remove added slots; memory that the loop still uses is freed when the loop drops it."""
        for arena in self._arenas[self._base_arenas :]:
            arena.active = False
        del self._arenas[self._base_arenas :]

    def discard(self) -> None:
        """Remove all slots; memory that the loop still uses is freed when the loop drops it."""
        for arena in self._arenas:
            arena.active = False
        self._arenas.clear()
        self.discard_wakes()

    def take(self, timeout_s: float | None) -> Slot:
        """Wait for a free slot.

        Raises queue.Empty after timeout_s, RingClosed after wake(), and RuntimeError if memory
        cannot be pinned.
        """
        while True:
            slot = self._free.get_nowait() if timeout_s == 0 else self._free.get(timeout=timeout_s)
            if slot is None:
                raise RingClosed
            if not slot.arena.active:
                continue
            if self._pin:
                try:
                    slot.pin(self.slot_bytes)
                except RuntimeError:
                    self._free.put(slot)
                    raise
            return slot

    def has_free(self) -> bool:
        return not self._free.empty()

    def give_back(self, slot: Slot) -> None:
        """Take back a slot that was not delivered."""
        self._free.put(slot)

    def wake(self) -> None:
        """Make one waiting take() raise RingClosed."""
        self._free.put(None)

    def discard_wakes(self) -> None:
        """Drop unused wakes, and inactive slots, before the ring is used again."""
        kept = []
        while not self._free.empty():
            slot = self._free.get_nowait()
            if slot is not None and slot.arena.active:
                kept.append(slot)
        for slot in kept:
            self._free.put(slot)

    def arrays(self, slot: Slot, count: int) -> dict[str, Block]:
        """Return arrays of a slot's first `count` samples; it is free once they are gone."""
        if self._pin:
            lease = self._lend_block(slot)
        else:
            lease = self._lease.from_address(slot.address)
            lease.slot = slot
        return {spec.name: self._array(spec, lease, count) for spec in self._specs}

    def empty(self) -> dict[str, Block]:
        found: dict[str, Block] = {}
        for spec in self._specs:
            values = np.empty((0, *spec.shape), spec.dtype)
            found[spec.name] = Ragged(values, np.zeros(1, np.int64)) if spec.ragged else values
        return found

    def _lend_block(self, slot: Slot) -> Any:
        block, slot.block = slot.block, None
        assert block is not None
        return bytes_of(block, functools.partial(_free_slot, slot, self._free))

    def _array(self, spec: FieldSpec, lease: Any, count: int) -> Block:
        start = self.offsets[spec.name]
        if not spec.ragged:
            rows: NDArray[Any] = np.ndarray((count, *spec.shape), spec.dtype, lease, start)
            return rows
        where = self.offsets[f"{spec.name}/{OFFSETS}"]
        offsets = np.ndarray((count + 1,), np.int64, lease, where)
        values = np.ndarray((int(offsets[-1]), *spec.shape), spec.dtype, lease, start)
        return Ragged(values, offsets)


def _free_slot(slot: Slot, free: queue.SimpleQueue[Slot | None]) -> None:
    if slot.arena.active:
        free.put(slot)


def _lease_type(nbytes: int, free: queue.SimpleQueue[Slot | None]) -> Any:
    """Return a ctypes array type over a slot: arrays keep it alive, and its end frees the slot."""

    def __del__(self: Any) -> None:
        _free_slot(self.slot, free)

    return type("_Lease", (ctypes.c_char * nbytes,), {"__del__": __del__})
