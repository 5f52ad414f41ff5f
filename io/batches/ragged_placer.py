"""RaggedPlacer: where the elements of ragged samples go, one after the other in their batch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hsgd.errors import DataError

from ..format.ragged import offsets_of
from ..format.slab_folder import FieldSpec
from ..order.epoch_order import IntArray, StreamPiece
from ..reading.row_copies import Addresses
from ..reading.row_reader import RowReader

__all__ = ["PlacedRows", "RaggedPlacer"]

_ITEM = 8  # bytes of an offset


@dataclass(frozen=True)
class PlacedRows:
    """Places of the ragged rows of a piece."""

    starts: IntArray  # first byte of each range, counted in its slab
    addresses: Addresses  # of each row
    sizes: IntArray  # of each row, in bytes
    failed: dict[int, DataError]  # by range, if its offsets cannot be read


class RaggedPlacer:
    """Placer for one ragged field of one iteration; pieces come in order.

    Args:
        values_at: distance of a batch's values from its address; offsets_at: that of its offsets.
        held: by slab, offsets in memory (NodeCache.ends).
        verify: ranges are whole checksum blocks, whose offsets are checked.
    """

    def __init__(
        self,
        reader: RowReader,
        spec: FieldSpec,
        batch_size: int,
        values_at: int,
        offsets_at: int,
        held: Mapping[int, IntArray],
        *,
        verify: bool,
    ) -> None:
        self._reader, self._spec, self._batch_size = reader, spec, batch_size
        self._values_at, self._offsets_at = values_at, offsets_at
        self._held, self._verify = held, verify
        self._carried = 0  # elements of the unfinished batch from earlier pieces

    def place(
        self, piece: StreamPiece, slabs: IntArray, starts: IntArray, skip: int, bases: Addresses
    ) -> PlacedRows:
        """Place the rows of a piece, and write offsets to the memory of its batches.

        `slabs` and `starts` are those of each range; starts count samples in the slab. The first
        batch had `skip` samples before; `bases` are the addresses of the batches.
        """
        lengths, range_starts, failed = self._read_lengths(piece, slabs, starts)
        in_stream = np.zeros(piece.stream_rows, np.int64)
        wanted = piece.places >= 0
        in_stream[piece.places[wanted]] = lengths[wanted]
        batch, row = np.divmod(np.arange(skip, skip + piece.stream_rows), self._batch_size)
        before = offsets_of(in_stream)
        firsts = np.maximum(np.arange(len(bases)) * self._batch_size - skip, 0)
        base = before[np.minimum(firsts, piece.stream_rows)]
        if len(base):
            base[0] -= self._carried if skip else 0
        begins = before[:-1] - base[batch]
        ends = begins + in_stream
        self._write_offsets(ends, row, firsts, bases)
        if piece.stream_rows:
            finished = (skip + piece.stream_rows) % self._batch_size == 0
            self._carried = 0 if finished else int(ends[-1])
        of_stream = (begins * self._spec.row_bytes).view(np.uint64)
        of_stream += bases[batch] + np.uint64(self._values_at)
        addresses = np.zeros(len(lengths), np.uint64)
        addresses[wanted] = of_stream[piece.places[wanted]]
        row_bytes = self._spec.row_bytes
        return PlacedRows(range_starts * row_bytes, addresses, lengths * row_bytes, failed)

    def _read_lengths(
        self, piece: StreamPiece, slabs: IntArray, starts: IntArray
    ) -> tuple[IntArray, IntArray, dict[int, DataError]]:
        """Return elements of each row, elements before each range in its slab, and errors."""
        lengths = np.zeros(piece.buffer_rows, np.int64)
        firsts = np.zeros(len(starts), np.int64)
        failed = {}
        done = 0
        for number, (slab, start, count) in enumerate(
            zip(slabs.tolist(), starts.tolist(), piece.counts.tolist(), strict=True)
        ):
            try:
                ends = self._ends(slab, start, count)
                firsts[number] = ends[0]
                lengths[done : done + count] = np.diff(ends)
            except DataError as error:
                failed[number] = error
            done += count
        return lengths, firsts, failed

    def _ends(self, slab: int, start: int, count: int) -> IntArray:
        if slab in self._held:
            return self._held[slab][start : start + count + 1]
        return self._reader.read_offsets(slab, self._spec.name, start, count, verify=self._verify)

    def _write_offsets(
        self, ends: IntArray, rows: IntArray, firsts: IntArray, bases: Addresses
    ) -> None:
        """Write to each batch: 0, and where each of its samples ends."""
        stops = np.append(firsts[1:], len(ends))
        for first, stop, base in zip(firsts.tolist(), stops.tolist(), bases.tolist(), strict=True):
            if stop > first:
                to = base + self._offsets_at
                if rows[first] == 0:
                    ctypes.c_int64.from_address(to).value = 0
                after = to + _ITEM * (int(rows[first]) + 1)
                ctypes.memmove(after, ends.ctypes.data + _ITEM * first, _ITEM * (stop - first))
