"""Slabs in the shared memory of a node: each is read from its file once, by one rank of the node.

Owns the memory, what is in it, and who reads what. Never decides which slabs an epoch needs
(partition.py, loader.py) and never waits but in the collectives of its communicator. All ranks work
out the same contents from metadata, so they need no message besides.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from hsgd.io import native
from hsgd.io.datamap import DataMap
from hsgd.io.layout import FieldSpec
from hsgd.io.reader import RowReader
from hsgd.io.sharing import Group
from numpy.typing import NDArray

from hsgd.errors import DataError, HsgdError

__all__ = ["CacheStats", "NodeCache", "NodeGroup"]

_LINE = 64


class NodeGroup(Group, Protocol):
    """What is needed of hsgd.Comm."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def local_rank(self) -> int:
        """This rank among those of its node."""

    @property
    def local_size(self) -> int:
        """Ranks of this node."""

    @property
    def cross_rank(self) -> int:
        """The number of this node."""

    def shared(self, shape: Any, dtype: Any = "float32") -> Any:
        """An array of which each node has one, zero; collective, blocking."""

    def allgather(self, array: Any) -> Any:
        """The arrays of all ranks, one after the other; collective, blocking."""

    def barrier(self) -> None:
        """Wait for all ranks; collective."""


@dataclass
class CacheStats:
    """cached_slabs: that the node holds. cache_bytes: that this rank read for it, in all epochs."""

    cached_slabs: int = 0
    cache_bytes: int = 0


class NodeCache:
    """Up to `limit_bytes` of slabs in the memory of this node; collective to make.

    Holds the fields that are not ragged, in the native byte order and without compression. verify:
    check what comes in against its checksums. A slab that cannot be read, or is damaged, is left
    out: who wants it reads the file and gets the error.
    Raises SharedMemoryError when the memory is not there.
    """

    def __init__(self, data: DataMap, comm: NodeGroup, limit_bytes: int, *, verify: bool) -> None:
        self._data, self._comm, self._verify = data, comm, verify
        self.stats = CacheStats()
        self._specs = [spec for spec in data.fields if not spec.ragged and spec.row_bytes]
        largest = max(data.slab_counts, default=0)
        self._offsets: dict[str, int] = {}
        end = 0
        for spec in self._specs:
            self._offsets[spec.name] = end
            end += -(-spec.row_bytes * largest // _LINE) * _LINE
        self._slot_bytes = max(_LINE, end)
        slots = min(len(data.slabs), limit_bytes // self._slot_bytes)
        self._slabs: list[int] = [-1] * slots  # what each slot holds
        self._memory: NDArray[np.uint8] = comm.shared((max(1, slots * self._slot_bytes),), "uint8")
        self._good: NDArray[np.uint8] = comm.shared((max(1, slots),), "uint8")
        self._address = self._memory.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of the node."""
        return len(self._slabs) * self._slot_bytes

    def prepare(self, wanted: Sequence[int], *, busy: bool) -> None:
        """Let the node hold as many of `wanted` slabs as fit; collective, blocking.

        wanted: the same on all ranks of a node. busy: this rank still reads what is there; then
        nothing changes anywhere.
        """
        digest = zlib.crc32(np.asarray(wanted, np.int64).tobytes())
        told = self._comm.allreduce(np.array([busy, digest, -digest], np.int64), op="max")
        if told[1] != -told[2]:
            raise HsgdError(
                "the ranks of a node want different slabs in their cache; give them the same epoch "
                "and state"
            )
        if told[0]:
            return
        kept = wanted[: len(self._slabs)]
        missing = [slab for slab in kept if slab not in self._slabs]
        free = [slot for slot, slab in enumerate(self._slabs) if slab not in kept]
        with RowReader(self._data) as reader:
            for number, (slab, slot) in enumerate(zip(missing, free, strict=False)):
                self._slabs[slot] = slab
                if number % self._comm.local_size == self._comm.local_rank:
                    self._good[slot] = 0  # until it is there
                    self._good[slot] = self._load(reader, slab, slot)
        self._comm.barrier()
        self.stats.cached_slabs = int(np.count_nonzero(self._good[: len(self._slabs)]))

    def addresses(self, specs: Sequence[FieldSpec]) -> NDArray[np.uint64]:
        """By slab and field, where the first row lies; 0 for what the node does not hold."""
        found = np.zeros((len(self._data.slabs), len(specs)), np.uint64)
        for slot, slab in enumerate(self._slabs):
            if slab >= 0 and self._good[slot]:
                base = self._address + slot * self._slot_bytes
                for column, spec in enumerate(specs):
                    if spec.name in self._offsets:
                        found[slab, column] = base + self._offsets[spec.name]
        return found

    def _load(self, reader: RowReader, number: int, slot: int) -> bool:
        """Read a slab into a slot; False when that fails."""
        slab = self._data.slabs[number]
        for spec in self._specs:
            start = slot * self._slot_bytes + self._offsets[spec.name]
            nbytes = slab.count * spec.row_bytes
            rows = self._memory[start : start + nbytes].view(spec.dtype)
            rows = rows.reshape((slab.count, *spec.shape))
            try:
                reader.read(spec.name, slab.start, rows)
            except DataError:
                return False
            if self._verify and not self._is_right(number, spec, rows):
                return False
            self.stats.cache_bytes += nbytes
        return True

    def _is_right(self, number: int, spec: FieldSpec, rows: NDArray[Any]) -> bool:
        """Whether the rows of a slab have their checksums."""
        step = self._data.checksum_rows
        expected = np.frombuffer(self._data.slabs[number].extents[spec.name].checksums, np.uint32)
        return all(
            native.crc32c(rows[block * step : (block + 1) * step]) == checksum
            for block, checksum in enumerate(expected.tolist())
        )
