"""NodeCache: slabs in a node's shared memory, each read from its file once, by one of its ranks.

All ranks compute the contents of all nodes from metadata, so they need no messages for it. Slabs in
another node's memory come from there on request (slab_transfer.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError, HsgdError

from ..format.data_map import DataMap
from ..format.slab_folder import OFFSETS, FieldSpec
from ..order.epoch_order import IntArray
from ..rank_group import RankGroup
from ..reading import row_copies
from ..reading.row_reader import RowReader
from .slab_transfer import NodeSlot, SlabTransfer, plan_transfers, transfer_slabs
from .slot_layout import slot_layout

__all__ = ["CacheStats", "NodeCache"]

_LINE = 64
_OFFSET_BYTES = 8  # int64


@dataclass
class CacheStats:
    """Counters of a NodeCache over all epochs."""

    cached_slabs: int = 0  # held by the node now
    cache_bytes: int = 0  # read from files by this rank
    exchanged_bytes: int = 0  # got by this rank from other nodes


class NodeCache:
    """Up to `limit_bytes` of slabs in the memory of this node; the constructor is collective.

    Holds all fields in native byte order, without compression; ragged fields as values and offsets.
    A slab that is damaged or cannot be read is left out; a rank that needs it reads the file and
    gets the error.

    Args:
        nodes: the ranks of each node.
        verify: check what is read or received against its checksums.
        exchange: see CacheOptions.

    Raises:
        SharedMemoryError: the node has not enough shared memory.
    """

    def __init__(
        self,
        data: DataMap,
        comm: RankGroup,
        limit_bytes: int,
        *,
        nodes: Sequence[Sequence[int]],
        verify: bool,
        exchange: str = "files",
    ) -> None:
        self._data, self._comm, self._verify = data, comm, verify
        self._nodes, self._travels = nodes, exchange == "comm" and len(nodes) > 1
        self._node = next(n for n, ranks in enumerate(nodes) if comm.rank in ranks)
        self.stats = CacheStats()
        self._specs = [spec for spec in data.fields if spec.row_bytes]
        elements = {
            spec.name: max((_elements(data, n, spec) for n in range(len(data.slabs))), default=0)
            for spec in self._specs
            if spec.ragged
        }
        layout = slot_layout(self._specs, max(data.slab_counts, default=0), elements)
        self._offsets, self._slot_bytes = layout.offsets, max(_LINE, layout.nbytes)
        slots = min(len(data.slabs), limit_bytes // self._slot_bytes)
        self._contents = [[-1] * slots for _ in nodes]  # the slab in each slot of each node
        self._memory: NDArray[np.uint8] = comm.shared((max(1, slots * self._slot_bytes),), "uint8")
        self._good: NDArray[np.uint8] = comm.shared((max(1, slots),), "uint8")
        self._address = self._memory.ctypes.data

    @property
    def nbytes(self) -> int:
        return len(self._contents[self._node]) * self._slot_bytes

    def prepare(self, wanted: Sequence[Sequence[int]], *, busy: bool) -> None:
        """Load as many of each node's `wanted` slabs as fit into its memory; collective, blocking.

        `wanted` is by node, the same on all ranks. If any rank is `busy`, still reading from the
        cache, nothing changes on any.
        """
        slabs = [np.array([len(of_node), *of_node], np.int64) for of_node in wanted]
        if self._travels:  # senders must know how many slots other nodes have
            slabs.append(np.array([len(self._contents[self._node])], np.int64))
        digest = zlib.crc32(np.concatenate(slabs).tobytes())
        states = self._comm.allreduce(np.array([busy, digest, -digest], np.int64), op="max")
        if states[1] != -states[2]:
            raise HsgdError(
                "the ranks want different slabs in the memory of their nodes; give all the same "
                'epoch and state, and with exchange="comm" the same node_cache_bytes'
            )
        if states[0]:
            return
        coming = [
            _refill(held, of_node) for held, of_node in zip(self._contents, wanted, strict=True)
        ]
        transfers = self._plan_transfers(coming)
        mine = {slot: slab for slot, slab in coming[self._node].items() if self._is_mine(slot)}
        for slot in mine:
            self._good[slot] = 0  # until the slab has arrived
        self.stats.exchanged_bytes += self._transfer(transfers)
        arrived = {transfer.to.slot for transfer in transfers if transfer.to.node == self._node}
        with RowReader(self._data) as reader:
            for slot, slab in mine.items():
                here = slot in arrived or self._load(reader, slab, slot)
                self._good[slot] = here and (not self._verify or self._is_right(slab, slot))
        for held, refill in zip(self._contents, coming, strict=True):
            for slot, slab in refill.items():
                held[slot] = slab
        self._comm.barrier()
        self.stats.cached_slabs = int(np.count_nonzero(self._good[: len(self._contents[0])]))

    def addresses(self, specs: Sequence[FieldSpec]) -> NDArray[np.uint64]:
        """Return the address of the first row by slab and field; 0 if the node does not hold it."""
        found = np.zeros((len(self._data.slabs), len(specs)), np.uint64)
        for slot, slab in self._held():
            base = self._address + slot * self._slot_bytes
            for column, spec in enumerate(specs):
                if spec.name in self._offsets:
                    found[slab, column] = base + self._offsets[spec.name]
        return found

    def ends(self, spec: FieldSpec) -> dict[int, IntArray]:
        """Return the offsets of a ragged field by slab, for slabs that the node holds.

        The offsets say where each sample begins and where the last one ends, in elements of the
        slab. They are views of the node's memory: do not write to them.
        """
        return {slab: self._ends(slab, slot, spec) for slot, slab in self._held()}

    def _held(self) -> list[tuple[int, int]]:
        """Return slot and slab of each slab that this node holds."""
        contents = self._contents[self._node]
        return [(n, slab) for n, slab in enumerate(contents) if slab >= 0 and self._good[n]]

    def _owner(self, place: NodeSlot) -> int:
        """Return the one rank that fills a slot and sends its contents, so these never overlap."""
        ranks = self._nodes[place.node]
        return ranks[place.slot % len(ranks)]

    def _is_mine(self, slot: int) -> bool:
        return self._owner(NodeSlot(self._node, slot)) == self._comm.rank

    def _plan_transfers(self, coming: Sequence[dict[int, int]]) -> list[SlabTransfer]:
        """Plan what comes from other nodes; the same on all ranks."""
        if not self._travels:
            return []
        first_of_node = self._nodes[self._node][0] == self._comm.rank
        own_good = self._good if first_of_node else self._good[:0]
        good = self._comm.allgather(own_good).reshape(len(self._nodes), -1)
        return plan_transfers(self._contents, good, coming)

    def _transfer(self, transfers: Sequence[SlabTransfer]) -> int:
        """Exchange slabs with other nodes; return the bytes that this rank got."""
        if not transfers:
            return 0
        slots = len(self._contents[self._node])
        memory = self._memory[: slots * self._slot_bytes].reshape(slots, self._slot_bytes)
        return transfer_slabs(self._comm, memory, transfers, self._owner)

    def _rows(self, number: int, slot: int, spec: FieldSpec) -> NDArray[Any]:
        rows = (
            _elements(self._data, number, spec) if spec.ragged else self._data.slabs[number].count
        )
        start = slot * self._slot_bytes + self._offsets[spec.name]
        memory = self._memory[start : start + rows * spec.row_bytes]
        return memory.view(spec.dtype).reshape((rows, *spec.shape))

    def _ends(self, number: int, slot: int, spec: FieldSpec) -> IntArray:
        start = slot * self._slot_bytes + self._offsets[f"{spec.name}/{OFFSETS}"]
        nbytes = _OFFSET_BYTES * (self._data.slabs[number].count + 1)
        return self._memory[start : start + nbytes].view(np.int64)

    def _load(self, reader: RowReader, number: int, slot: int) -> bool:
        slab = self._data.slabs[number]
        for spec in self._specs:
            rows = self._rows(number, slot, spec)
            try:
                if spec.ragged:
                    ends = self._ends(number, slot, spec)
                    ends[:] = reader.read_offsets(number, spec.name, 0, slab.count)
                    reader.read_elements(number, spec.name, 0, rows)
                    self.stats.cache_bytes += ends.nbytes
                else:
                    reader.read(spec.name, slab.start, rows)
            except DataError:
                return False
            self.stats.cache_bytes += rows.nbytes
        return True

    def _is_right(self, number: int, slot: int) -> bool:
        return all(self._has_checksums(number, slot, spec) for spec in self._specs)

    def _has_checksums(self, number: int, slot: int, spec: FieldSpec) -> bool:
        slab, step = self._data.slabs[number], self._data.checksum_rows
        extent, rows = slab.extents[spec.name], self._rows(number, slot, spec)
        blocks = [(low, min(low + step, slab.count)) for low in range(0, slab.count, step)]
        parts = blocks
        if extent.offsets is not None:
            ends = self._ends(number, slot, spec)
            stored = ends + extent.offsets.first
            checksums = np.frombuffer(extent.offsets.checksums, np.uint32).tolist()
            if [row_copies.crc32c(stored[low : high + 1]) for low, high in blocks] != checksums:
                return False
            parts = [(int(ends[low]), int(ends[high])) for low, high in blocks]
        checksums = np.frombuffer(extent.checksums, np.uint32).tolist()
        found: list[int] = [row_copies.crc32c(rows[low:high]) for low, high in parts]
        return bool(found == checksums)


def _elements(data: DataMap, number: int, spec: FieldSpec) -> int:
    offsets = data.slabs[number].extents[spec.name].offsets
    assert offsets is not None
    return offsets.elements


def _refill(held: Sequence[int], wanted: Sequence[int]) -> dict[int, int]:
    """Return slot -> slab: where to load the slabs of `wanted` that are not held, as many as fit.

    Uses empty slots first, then those of slabs that are not wanted.
    """
    kept = wanted[: len(held)]
    present, needed = set(held), set(kept)
    missing = [slab for slab in kept if slab not in present]
    free = [slot for slot, slab in enumerate(held) if slab not in needed]
    free.sort(key=lambda slot: held[slot] >= 0)
    return dict(zip(free, missing, strict=False))
