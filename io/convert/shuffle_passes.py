"""The two passes of a conversion: rows to their slabs, then rows of each slab into final order.

Pass 1 reads the source once and appends every row to its slab. Pass 2 puts the rows of one slab at
a time into their final order. Both read and write large sequential parts; together they make
exactly one random permutation of all rows. Memory: one field of one slab, two blocks, and 16 bytes
per sample.

Every _CHECKPOINT_BYTES the position is saved in the journal. Rows appended after that can be
appended again, with the same result. Ordering cannot be repeated: a slab that may be ordered in
part is filled again from the source. So the journal names slabs before they are ordered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from hsgd.errors import DataError

from ..format.ragged import Block, Ragged, elements, join, offsets_of, part_of_block, take
from ..format.slab_folder import FieldSpec
from ..order.epoch_order import IntArray, permutation
from .progress import Advance
from .slab_folder_writer import SlabFolderWriter
from .source import Source
from .staged_folder import Journal, Position

__all__ = ["BLOCK_BYTES", "Order", "Passes"]

BLOCK_BYTES = 16 << 20
_CHECKPOINT_BYTES = 1 << 30
_PERMUTE = 4  # purpose of the random stream (epoch_order.py uses 1, 2, 3 and 5)


class Order:
    """The order of rows in the slabs; with seed None that of the source, without arrays."""

    def __init__(self, count: int, seed: int | None) -> None:
        self.place_of: IntArray | None = None  # new place of each row
        self.source_at: IntArray | None = None  # row at each place
        if seed is not None:
            self.source_at = permutation(count, seed, _PERMUTE)
            self.place_of = np.empty_like(self.source_at)
            self.place_of[self.source_at] = np.arange(count)

    def ends(self, lengths: IntArray) -> IntArray:
        return offsets_of(lengths if self.source_at is None else lengths[self.source_at])


class Passes:
    """Both passes of one rank over all fields; writes the slabs that `writer` owns.

    Args:
        lengths: lengths of the rows of each ragged field, in the order of the source.
        position: position from the journal.
        advance: called with the number of bytes done since the last call.
    """

    def __init__(
        self,
        writer: SlabFolderWriter,
        source: Source,
        order: Order,
        lengths: Mapping[str, IntArray],
        journal: Journal,
        position: Position,
        advance: Advance,
    ) -> None:
        self._writer, self._source, self._advance = writer, source, advance
        self._order, self._lengths = order, lengths
        self._journal = journal
        self._bounds = np.asarray(writer.bounds)
        self._passes = 1 if order.place_of is None else 2
        self._at = self._saved = position
        self._unsaved_bytes = 0

    def run(self) -> str:
        """Write all rows that are missing and return the digest of the source."""
        specs = self._source.specs
        samples = self._source.num_samples
        self._advance(self._passes * sum(self._bytes(s, samples) for s in specs[: self._at.field]))
        for number in range(self._at.field, len(specs)):
            spec = specs[number]
            self._advance(self._bytes(spec, self._at.row))
            if self._at.row < samples:
                self._append(spec)
            elif self._at.touched > self._at.ordered:
                again = self._writer.owned[self._at.ordered : self._at.touched]
                for _ in self._fill(spec, frozenset(again), 0):
                    pass
            for slab in self._writer.owned:
                self._writer.write_offsets(slab, spec)
            if self._order.place_of is not None:
                self._order_slabs(spec)
            self._at = Position(number + 1, (*self._at.digests, self._at.chain))
            self._checkpoint()
        if self._saved != self._at and self._saved != Position():
            self._save()  # sealed slabs cannot be written any more
        digest = hashlib.sha256()
        for spec, of_field in zip(specs, self._at.digests, strict=True):
            described = [spec.name, spec.shape, spec.dtype.str, *(["ragged"] * spec.ragged)]
            digest.update(json.dumps(described).encode())
            digest.update(bytes.fromhex(of_field))
        return digest.hexdigest()

    def _append(self, spec: FieldSpec) -> None:
        """Do pass 1: append every row to its slab."""
        chain = bytes.fromhex(self._at.chain)
        for block in self._fill(spec, frozenset(self._writer.owned), self._at.row):
            chain = _chained(chain, block)
            self._at = replace(self._at, row=self._at.row + len(block), chain=chain.hex())
            nbytes = elements(block).nbytes
            self._advance(nbytes)
            self._unsaved_bytes += nbytes
            self._checkpoint()
        if self._at.row != self._source.num_samples:
            raise DataError(
                f"field {spec.name!r}: {self._at.row} rows came, {self._source.num_samples} were "
                "announced"
            )

    def _fill(self, spec: FieldSpec, slabs: frozenset[int], start: int) -> Iterator[Block]:
        """Append rows from `start` on to their slabs, if in `slabs`; yield each written block."""
        filled = self._filled_before(spec, start)
        row = start
        blocks = self._source.stream(spec, self._block_rows(spec), start)
        for block in _even_blocks(blocks, self._block_rows(spec)):
            self._check_lengths(spec, row, block)
            slab_of = self._slab_of(row, row + len(block))
            by_slab = np.argsort(slab_of, kind="stable")
            present, firsts = np.unique(slab_of[by_slab], return_index=True)
            for slab, chosen in zip(present.tolist(), np.split(by_slab, firsts[1:]), strict=True):
                if slab in slabs:
                    self._writer.write(slab, spec, filled[slab], elements(take(block, chosen)))
            filled += self._amounts(spec, row, row + len(block))
            row += len(block)
            yield block

    def _check_lengths(self, spec: FieldSpec, row: int, block: Block) -> None:
        """Raise DataError if samples have other lengths than when the slabs were made."""
        if isinstance(block, Ragged):
            expected = self._lengths[spec.name][row : row + len(block)]
            differ = np.flatnonzero(block.lengths != expected)
            if len(differ):
                raise DataError(
                    f"field {spec.name!r}: sample {row + differ[0]} of the source had "
                    f"{expected[differ[0]]} elements and now has {block.lengths[differ[0]]}; do "
                    "not change the source while it is converted"
                )

    def _slab_of(self, start: int, stop: int) -> IntArray:
        """Return the slab of each of the source's rows [start, stop)."""
        places = np.arange(start, stop)
        if self._order.place_of is not None:
            places = self._order.place_of[start:stop]
        found: IntArray = np.searchsorted(self._bounds, places, side="right") - 1
        return found

    def _filled_before(self, spec: FieldSpec, row: int) -> IntArray:
        """Return the rows, or elements, in each slab after the source's first `row` rows."""
        step = 1 << 20  # bounds the memory
        parts = (self._amounts(spec, low, min(low + step, row)) for low in range(0, row, step))
        return sum(parts, np.zeros(len(self._bounds) - 1, np.int64))

    def _amounts(self, spec: FieldSpec, start: int, stop: int) -> IntArray:
        """Return the rows, or elements, that rows [start, stop) of the source add to each slab."""
        slab_of = self._slab_of(start, stop)
        if not spec.ragged:
            return np.bincount(slab_of, minlength=len(self._bounds) - 1)
        found = np.zeros(len(self._bounds) - 1, np.int64)
        np.add.at(found, slab_of, self._lengths[spec.name][start:stop])
        return found

    def _bytes(self, spec: FieldSpec, rows: int) -> int:
        count = int(self._lengths[spec.name][:rows].sum()) if spec.ragged else rows
        return count * spec.row_bytes

    def _block_rows(self, spec: FieldSpec) -> int:
        total = self._bytes(spec, self._source.num_samples)
        return max(1, BLOCK_BYTES * self._source.num_samples // max(1, total))

    def _order_slabs(self, spec: FieldSpec) -> None:
        """Do pass 2: order the slabs that are not in their final order yet."""
        owned = self._writer.owned
        sizes = np.array([self._writer.slab_bytes(slab, spec) for slab in owned], np.int64)
        self._advance(int(sizes[: self._at.ordered].sum()))
        for number in range(self._at.ordered, len(owned)):
            if number >= self._at.touched:
                self._announce(number, sizes)
            self._order_slab(spec, owned[number])
            self._at = replace(self._at, ordered=number + 1)
            self._unsaved_bytes += int(sizes[number])

    def _announce(self, number: int, sizes: IntArray) -> None:
        """Record which slabs will be ordered next, unless the journal has nothing of this field."""
        begun = self._saved.field == self._at.field and self._saved.row > 0
        if not begun and self._unsaved_bytes < _CHECKPOINT_BYTES:
            return
        reached = np.cumsum(sizes[number:])
        more = max(1, int(np.searchsorted(reached, _CHECKPOINT_BYTES, side="right")))
        self._at = replace(self._at, touched=min(len(sizes), number + more))
        self._save()

    def _order_slab(self, spec: FieldSpec, slab: int) -> None:
        """Move the rows of a slab from the order of the source to their final places."""
        assert self._order.place_of is not None and self._order.source_at is not None
        start, stop = self._writer.bounds[slab], self._writer.bounds[slab + 1]
        arrived = np.sort(self._order.source_at[start:stop])
        arrival_at = np.empty_like(arrived)
        arrival_at[self._order.place_of[arrived] - start] = np.arange(len(arrived))
        values: Block = self._writer.read_back(slab, spec)
        if spec.ragged:
            values = Ragged(values, offsets_of(self._lengths[spec.name][arrived]))
        rows = self._block_rows(spec)
        position = 0
        for first in range(0, len(values), rows):
            block = elements(take(values, arrival_at[first : first + rows]))
            self._writer.write(slab, spec, position, block)
            position += len(block)
            self._advance(block.nbytes)

    def _checkpoint(self) -> None:
        if self._unsaved_bytes >= _CHECKPOINT_BYTES:
            self._save()

    def _save(self) -> None:
        self._writer.sync()
        self._journal.save(self._at)
        self._saved, self._unsaved_bytes = self._at, 0


def _chained(chain: bytes, block: Block) -> bytes:
    """Return a hash of all blocks so far, from that of the earlier ones and the next block."""
    digest = hashlib.sha256(elements(block).reshape(-1).view(np.uint8).data)
    if isinstance(block, Ragged):
        digest.update(block.lengths.data)
    return hashlib.sha256(chain + digest.digest()).digest()


def _even_blocks(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Yield the same rows in blocks of exactly `rows`, except for the last."""
    held: list[Block] = []
    count = 0
    for block in blocks:
        if not count and len(block) == rows:
            yield block
            continue
        start = 0
        while start < len(block):
            part = part_of_block(block, start, min(len(block), start + rows - count)).copy()
            held.append(part)
            start += len(part)
            count += len(part)
            if count == rows:
                yield join(held)
                held, count = [], 0
    if held:
        yield join(held)
