"""Scheduler: turns pieces of the stream into reads, computed in NumPy, for libhsgd_io."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..cache.node_cache import NodeCache
from ..format.data_map import DataMap, Extent
from ..format.ragged import offsets_of
from ..format.slab_folder import OFFSETS
from ..order.epoch_order import EpochOrder, IntArray, Range, Share, StreamPiece
from ..reading import row_copies
from ..reading.row_copies import TASK, Addresses, BatchRows, TaskBatch
from ..reading.row_reader import ReadStats, RowReader
from ..reading.slab_files import SECTOR_BYTES, SlabFiles, descriptor_limit
from ..remote.object_reader import ObjectReader
from .ragged_placer import PlacedRows, RaggedPlacer
from .scattered_rows import ScatteredRows

__all__ = ["PieceReads", "ReadPlan", "Scheduler", "SlowRead", "staging_bytes"]

_STAGING_BYTES = 1 << 20  # for small rows; stays in the CPU's cache
_DIRECT_BYTES = 4 << 20  # one read past the page cache
_FEW = 8  # 1 of 8 rows is few


@dataclass(frozen=True)
class ReadPlan:
    """The reads of one rank in one iteration; holds no open files."""

    source: str  # dataset and rank, for messages
    data: DataMap
    share: Share
    order: EpochOrder
    ranges: tuple[Range, ...]  # positions of the stream, in the order of this rank
    block_samples: int  # the most rows that one task reads
    direct: bool  # read past the page cache
    verify: bool  # check the checksums; blocks are then read whole
    cache: NodeCache | None = None  # slabs in memory
    numbered: bool = False  # batches have the numbers of their samples

    def pieces(self) -> Iterator[StreamPiece]:
        """Yield all that is to be read.

        If rows can be read alone, the first batch is a piece of its own, so the loop gets it before
        a whole window was read.
        """
        alone = self.share.batch_size if self._reads_single_rows() else 0
        for start, count in self.ranges:
            first = min(alone, count)
            alone -= first
            yield from self.order.pieces(start, first)
            yield from self.order.pieces((start + first) % self.data.num_samples, count - first)

    def _reads_single_rows(self) -> bool:
        """Return whether rows can be read without the checksum block, or chunk, around them."""
        if self.data.windows is not None:
            return not self.data.windows.chunked
        extents = self.data.extents()
        return not self.verify and all(e.chunks is None and not e.refusal for e in extents)


@dataclass(frozen=True)
class SlowRead:
    """Ranges of one slab and field that libhsgd_io cannot read."""

    name: str
    slab: int
    starts: IntArray  # samples, counted in the slab
    counts: IntArray
    addresses: Addresses
    places: IntArray  # in the piece, -1 for samples that are not needed
    firsts: IntArray | None = None  # for a ragged field: first element of each range
    sizes: IntArray | None = None  # for a ragged field: bytes of each sample


@dataclass(frozen=True)
class _Portions:
    """The ranges of a piece in portions: consecutive ranges of one slab, up to a block of rows."""

    slabs: IntArray  # of each range
    starts: IntArray  # of each range: samples, counted in the slab
    counts: IntArray  # of each range
    edges: IntArray  # first range of each portion, and the end
    row_edges: IntArray  # first row of each portion, and the end
    slab_of: IntArray  # of each portion

    def rows(self, number: int) -> slice:
        return slice(*self.row_edges[number : number + 2].tolist())


@dataclass(frozen=True)
class PieceReads:
    """All reads of one piece."""

    data: DataMap
    batch: TaskBatch
    slow: deque[SlowRead]
    slabs: list[int]  # acquired in SlabFiles, to be released
    nbytes: int
    failed: list[tuple[IntArray, DataError]]  # places of the piece that cannot be read
    places: IntArray  # of the piece
    portions: _Portions
    portion_of: IntArray  # of each task
    reads_slowly: bool  # the reads by Python take time

    def explain(self, number: int) -> tuple[IntArray, DataError]:
        """Return places and error of a task that failed."""
        task, portion = self.batch.tasks[number], int(self.portion_of[number])
        path = self.data.slabs[int(self.portions.slab_of[portion])].path
        rows = self.portions.rows(portion)
        status, position = int(task["status"]), int(task["position"])
        if status == row_copies.END:
            text = f"truncated, bytes from {position} on are missing; copy or convert it again"
        elif status == row_copies.MISMATCH:
            text = (
                f"the checksum of the block at byte {position} is wrong, its data changed on the "
                "disk or on the way; restore this file, see hsgd data verify"
            )
        else:
            text = f"reading from byte {position} on failed: {os.strerror(status)}"
        return self.places[rows], DataError(f"{path}: {text}")


def _failed(
    piece: StreamPiece,
    portions: _Portions,
    placed: Mapping[int, PlacedRows],
    failures: Mapping[int, DataError],
) -> tuple[list[tuple[IntArray, DataError]], NDArray[np.bool_]]:
    """Return places that cannot be read, and why; and by portion, whether it is readable."""
    failed = []
    readable = np.ones(len(portions.slab_of), bool)
    for number, slab in enumerate(portions.slab_of.tolist()):
        if slab in failures:
            failed.append((piece.places[portions.rows(number)], failures[slab]))
            readable[number] = False
    for found in placed.values():
        for part, error in found.failed.items():
            number = int(np.searchsorted(portions.edges, part, side="right")) - 1
            if readable[number]:
                failed.append((piece.places[portions.rows(number)], error))
                readable[number] = False
    return failed, readable


def staging_bytes(data: DataMap, *, direct: bool, verify: bool) -> int:
    """Return the memory that each reading thread needs besides the batches."""
    least = _DIRECT_BYTES if direct else _STAGING_BYTES
    if data.windows is not None:
        data = data.windows.source
    chunks = [extent.chunks for extent in data.extents() if extent.chunks is not None]
    least += max((each.decoding_bytes for each in chunks), default=0)
    least += max((each.joined_bytes for each in chunks), default=0)
    if not verify:
        return least
    longest = max((data.block_bytes(spec) for spec in data.fields), default=0)
    return max(least, longest + 2 * SECTOR_BYTES)


def _offset(extent: Extent) -> int:
    """Return the byte offset of a field; -1 if libhsgd_io cannot read it."""
    return extent.offset if not extent.refusal and extent.stored_dtype.isnative else -1


class Scheduler:
    """Planner of the reads of pieces; `stats` counts what planning itself reads."""

    def __init__(
        self,
        plan: ReadPlan,
        field_offsets: Mapping[str, int],
        files: SlabFiles,
        objects: ObjectReader,
        stats: ReadStats,
    ) -> None:
        self._plan, self._files = plan, files
        self._field_offsets = field_offsets
        slabs = plan.data.slabs
        self._starts = np.array([slab.start for slab in slabs], np.int64)
        self._stops = self._starts + np.array([slab.count for slab in slabs], np.int64)
        self._fields = [spec for spec in plan.data.fields if spec.row_bytes]
        self._is_remote = remote = plan.data.access is not None
        places = [[_offset(slab.extents[spec.name]) for spec in self._fields] for slab in slabs]
        self._offsets = np.array(places, np.int64).reshape(len(slabs), len(self._fields))
        if remote:
            self._offsets.fill(-1)
        self._gathered = np.array(
            [[slab.extents[spec.name].gathered for spec in self._fields] for slab in slabs], bool
        ).reshape(self._offsets.shape)
        # Addresses in the node's memory by slab and field; constant during an iteration.
        self._memory = np.zeros(self._offsets.shape, np.uint64)
        if plan.cache is not None:
            self._memory = plan.cache.addresses(self._fields)
        in_file = (self._offsets >= 0) & (self._memory == 0)
        self._scattered = ScatteredRows(slabs, self._fields, in_file, field_offsets)
        # Files open for one piece; several pieces are read at once, and each thread has more.
        self._most_files = max(16, descriptor_limit() // 8)
        # Slabs without reads from files.
        held = frozenset(np.flatnonzero(self._memory.min(axis=1, initial=1) > 0).tolist())
        self._without_file = frozenset(range(len(slabs))) if remote else held
        self.staging_bytes = staging_bytes(plan.data, direct=plan.direct, verify=plan.verify)
        self._reader = RowReader(plan.data, stats, objects)  # of offsets
        self._placers = {
            spec.name: RaggedPlacer(
                self._reader,
                spec,
                plan.share.batch_size,
                field_offsets[spec.name],
                field_offsets[f"{spec.name}/{OFFSETS}"],
                {} if plan.cache is None else plan.cache.ends(spec),
                verify=plan.verify,
            )
            for spec in self._fields
            if spec.ragged
        }
        if plan.verify:
            blocks = -(-(self._stops - self._starts) // plan.data.checksum_rows)
            self._first_blocks = np.cumsum(blocks) - blocks
            self._checksums = [
                np.frombuffer(b"".join(slab.extents[spec.name].checksums for slab in slabs), "u4")
                for spec in self._fields
            ]

    def close(self) -> None:
        self._reader.close()

    def reads(self, piece: StreamPiece, skip: int, bases: Addresses) -> PieceReads:
        """Plan the reads of a piece for batches at `bases`; the first had `skip` samples before."""
        piece = self._whole_blocks(piece) if self._plan.verify else piece
        piece = self._scattered.one_by_one(piece)
        portions = self._portions(piece)
        slab_of = portions.slab_of
        to_rows = self._batch_rows(piece, skip)
        placed = {
            column: self._placers[spec.name].place(
                piece, portions.slabs, portions.starts, skip, bases
            )
            for column, spec in enumerate(self._fields)
            if spec.ragged
        } | self._scattered.place(piece, to_rows, bases)
        present = sorted(set(slab_of.tolist()))
        opened, failures = self._open([slab for slab in present if slab not in self._without_file])
        tasks, nbytes = self._tasks(portions, to_rows, bases, placed, opened)
        unopened = [s for s in present if s not in opened and s not in self._without_file]
        if unopened:
            tasks["offset"][np.isin(slab_of, unopened)] = -1
        expected = self._expected(portions.slabs, portions.starts)
        for column, values in enumerate(expected):
            tasks["checksums"][:, column] = values.ctypes.data + 4 * portions.edges[:-1]
        fast = tasks["offset"] >= 0
        failed: list[tuple[IntArray, DataError]] = []
        reads_slowly = False
        slow: deque[SlowRead] = deque()
        # Field after field: the memory of one field is small enough to stay in the CPU's cache.
        # Planning runs on a core with cold caches after reads: each NumPy call takes ten times as
        # long as alone, so the common case makes few calls.
        if not failures and not any(found.failed for found in placed.values()) and fast.all():
            chosen = tasks.T.reshape(-1)
            numbers = np.tile(np.arange(len(slab_of)), fast.shape[1])
            read = nbytes if self._plan.cache is None else nbytes[tasks["memory"] == 0]
        else:
            failed, readable = _failed(piece, portions, placed, failures)
            fast &= readable[:, None]
            missed = readable[:, None] & ~fast
            reads_slowly = self._reads_slowly(portions, missed)
            slow.extend(self._slow(piece, portions, to_rows, bases, placed, missed))
            chosen, numbers = np.ascontiguousarray(tasks.T[fast.T]), np.nonzero(fast.T)[1]
            read = nbytes[fast & (tasks["memory"] == 0)]
        return PieceReads(
            self._plan.data,
            TaskBatch(chosen, (portions, to_rows, bases, expected, placed)),
            slow,
            list(opened),
            int(read.sum()),
            failed,
            piece.places,
            portions,
            numbers,
            reads_slowly,
        )

    def _portions(self, piece: StreamPiece) -> _Portions:
        slabs = np.searchsorted(self._stops, piece.starts, side="right")
        ends = np.cumsum(piece.counts)
        portion = (ends - 1) // self._plan.block_samples
        breaks = np.flatnonzero((np.diff(slabs) != 0) | (np.diff(portion) != 0)) + 1
        edges = np.concatenate(([0], breaks, [len(piece.starts)]))
        return _Portions(
            slabs,
            piece.starts - self._starts[slabs],
            np.ascontiguousarray(piece.counts),
            edges,
            np.concatenate(([0], ends))[edges],
            slabs[edges[:-1]],
        )

    def _tasks(
        self,
        portions: _Portions,
        to_rows: BatchRows,
        bases: Addresses,
        placed: Mapping[int, PlacedRows],
        opened: Mapping[int, tuple[int, int]],
    ) -> tuple[NDArray[Any], IntArray]:
        """Return, by portion and field, task and bytes to read; offset -1 is not a task."""
        slab_of, edges, row_edges = portions.slab_of, portions.edges, portions.row_edges
        tasks = np.zeros((len(slab_of), len(self._fields)), TASK)
        tasks["offset"] = self._offsets[slab_of]
        if self._plan.cache is not None:
            tasks["memory"] = self._memory[slab_of]
            tasks["offset"][tasks["memory"] > 0] = 0
        tasks["ranges"] = np.diff(edges)[:, None]
        tasks["starts"] = portions.starts.ctypes.data + 8 * edges[:-1, None]
        tasks["counts"] = portions.counts.ctypes.data + 8 * edges[:-1, None]
        handles = np.array([opened.get(slab, (-1, 1)) for slab in slab_of.tolist()])
        tasks["file"] = handles[:, :1]
        tasks["alignment"] = handles[:, 1:]
        tasks["row_bytes"] = [spec.row_bytes for spec in self._fields]
        tasks["places"] = to_rows.ctypes.data + 8 * row_edges[:-1, None]
        tasks["bases"] = bases.ctypes.data
        tasks["base_offset"] = [self._field_offsets[spec.name] for spec in self._fields]
        nbytes = tasks["row_bytes"] * np.diff(row_edges)[:, None]
        for column, found in placed.items():
            tasks["row_bytes"][:, column] = 1
            tasks["starts"][:, column] = found.starts.ctypes.data + 8 * edges[:-1]
            tasks["bases"][:, column] = 0
            tasks["places"][:, column] = found.addresses.ctypes.data + 8 * row_edges[:-1]
            tasks["sizes"][:, column] = found.sizes.ctypes.data + 8 * row_edges[:-1]
            nbytes[:, column] = np.diff(offsets_of(found.sizes)[row_edges])
        return tasks, nbytes

    def _slow(
        self,
        piece: StreamPiece,
        portions: _Portions,
        to_rows: BatchRows,
        bases: Addresses,
        placed: Mapping[int, PlacedRows],
        wanted: NDArray[np.bool_],
    ) -> Iterator[SlowRead]:
        for number, column in np.argwhere(wanted).tolist():
            spec, rows = self._fields[column], portions.rows(number)
            ranges = slice(*portions.edges[number : number + 2].tolist())
            firsts = sizes = None
            if (found := placed.get(column)) is not None:
                addresses, sizes = found.addresses[rows], found.sizes[rows]
                firsts = found.starts[ranges] // spec.row_bytes
            else:
                addresses = row_copies.addresses_of(
                    to_rows[rows], bases, self._field_offsets[spec.name], spec.row_bytes
                )
            yield SlowRead(
                spec.name,
                int(portions.slab_of[number]),
                portions.starts[ranges],
                portions.counts[ranges],
                addresses,
                piece.places[rows],
                firsts,
                sizes,
            )

    def _open(self, slabs: list[int]) -> tuple[dict[int, tuple[int, int]], dict[int, DataError]]:
        """Return descriptors and alignments of slabs, and errors of those that cannot be opened."""
        opened: dict[int, tuple[int, int]] = {}
        failures: dict[int, DataError] = {}
        paths: set[str] = set()
        for slab in slabs:
            paths.add(self._plan.data.slabs[slab].path)
            if len(paths) > self._most_files:
                break  # read one after the other
            try:
                opened[slab] = self._files.acquire(slab)
            except DataError as error:
                failures[slab] = error
        return opened, failures

    def _whole_blocks(self, piece: StreamPiece) -> StreamPiece:
        """Return a piece that reads the same rows as whole checksum blocks."""
        rows = self._plan.data.checksum_rows
        read = np.repeat(piece.starts - (np.cumsum(piece.counts) - piece.counts), piece.counts)
        read += np.arange(len(read))
        wanted = piece.places >= 0
        read, places = read[wanted], piece.places[wanted]
        slabs = np.searchsorted(self._stops, read, side="right")
        in_slab = read - self._starts[slabs]
        block = self._first_blocks[slabs] + in_slab // rows
        blocks, first_seen, of_row = np.unique(block, return_index=True, return_inverse=True)
        order = np.argsort(first_seen)  # as they come in the stream
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        slab = slabs[first_seen][order]
        starts = self._starts[slab] + (blocks[order] - self._first_blocks[slab]) * rows
        counts = np.minimum(rows, self._stops[slab] - starts)
        spread = np.full(int(counts.sum()), -1, np.int64)
        of_row = rank[of_row]
        spread[(np.cumsum(counts) - counts)[of_row] + read - starts[of_row]] = places
        return StreamPiece(starts, counts, spread, piece.stream_rows)

    def _expected(self, slabs: IntArray, starts: IntArray) -> list[NDArray[np.uint32]]:
        """Return by field the checksum of each range; empty if they are not checked."""
        if not self._plan.verify:
            return []
        blocks = self._first_blocks[slabs] + starts // self._plan.data.checksum_rows
        return [of_field[blocks] for of_field in self._checksums]

    def _batch_rows(self, piece: StreamPiece, skip: int) -> BatchRows:
        """Return where the rows of a piece go, in all fields that are not ragged."""
        batch, row = np.divmod(piece.places + skip, self._plan.share.batch_size)
        found = row_copies.batch_rows(batch, row)
        found[piece.places < 0] = 0
        return found

    def _reads_slowly(self, portions: _Portions, missed: NDArray[np.bool_]) -> bool:
        """Return whether Python's reads, `missed`, take time; a few windows across files do not."""
        if self._is_remote or (missed & ~self._gathered[portions.slab_of]).any():
            return bool(missed.any())
        rows = np.diff(portions.row_edges)[:, None]
        return bool(_FEW * (rows * missed).sum() > rows.sum() * missed.shape[1])
