"""SegmentFinder: where documents begin in the windows of a packed dataset (cu_seqlens)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.data_map import Windows
from ..format.ragged import offsets_of
from ..order.epoch_order import IntArray, StreamPiece, concatenate_ranges
from ..reading.row_reader import ReadStats, RowReader
from ..remote.object_reader import ObjectReader

__all__ = ["CU_SEQLENS", "SegmentFinder", "Starts", "cumulative", "documents_between"]

CU_SEQLENS = "cu_seqlens"  # field name in a batch

Starts = NDArray[np.int32]  # the type in flash attention

_FEW = 2048  # offsets that are read at once instead of searched
_NEAR_BYTES = 1 << 20  # largest gap between windows that are searched together


def documents_between(reader: RowReader, name: str, first: int, stop: int) -> IntArray:
    """Return the elements in [first, stop) at which samples of a ragged field begin.

    Elements are counted over all slabs; the result is ascending, without duplicates. Raises
    DataError for impossible offsets.
    """
    parts = [np.empty(0, np.int64)]
    for number, low, high in reader.element_ranges(name, first, stop):
        parts += (found + (first - low) for found in _of_slab(reader, number, name, low, high))
        first += high - low
    found = np.concatenate(parts)
    differs = np.ones(len(found), bool)
    np.not_equal(found[1:], found[:-1], out=differs[1:])
    return found[differs]  # empty samples begin where the next one does


def _of_slab(reader: RowReader, number: int, name: str, low: int, high: int) -> Iterator[IntArray]:
    """Yield the same for elements [low, high) of one slab, in parts."""
    slab = reader.data.slabs[number]
    offsets = slab.extents[name].offsets
    assert offsets is not None
    likely = _FEW + (high - low) * slab.count // max(1, offsets.elements)
    # The place if all samples had one length: mostly near enough for a single read.
    sample = max(0, low * slab.count // max(1, offsets.elements) - _FEW // 2)
    least, after = 0, slab.count  # samples before `least` begin before low, `after` does not
    while True:
        count = min(likely, slab.count - sample)
        begins_at = reader.read_offsets(number, name, sample, count)[:-1]
        if sample > least and begins_at[0] >= low:
            after = sample
        elif begins_at[-1] < low and sample + count < after:
            least = sample + count
        else:
            break
        sample = (least + after) // 2 if after - least > _FEW else least
    while True:
        chosen = slice(*np.searchsorted(begins_at, [low, high]).tolist())
        yield begins_at[chosen]
        sample += len(begins_at)
        if chosen.stop < len(begins_at) or sample >= slab.count:
            return
        begins_at = reader.read_offsets(number, name, sample, min(likely, slab.count - sample))[:-1]


class SegmentFinder:
    """Finder of segments for one iteration over a packed dataset; pieces come in order."""

    def __init__(
        self, windows: Windows, batch_size: int, objects: ObjectReader, stats: ReadStats
    ) -> None:
        self._windows, self._batch_size = windows, batch_size
        self._reader = RowReader(windows.source, stats, objects)
        element_bytes = max(1, windows.source.fields[0].row_bytes)
        self._near = max(1, _NEAR_BYTES // (element_bytes * windows.length))  # in windows

    def close(self) -> None:
        self._reader.close()

    def find(
        self, piece: StreamPiece, skip: int, batches: int
    ) -> tuple[list[Starts], list[tuple[IntArray, DataError]]]:
        """Return, by batch, where segments of this piece begin, and places with unreadable offsets.

        Starts count elements from the first of the batch; each window begins a segment. `skip` is
        the number of samples that the first batch had before.
        """
        length = self._windows.length
        rows = concatenate_ranges(piece.starts, piece.counts)
        wanted = piece.places >= 0
        rows, places = rows[wanted], piece.places[wanted]
        by_row = np.argsort(rows, kind="stable")
        rows, places = rows[by_row], places[by_row]
        owners, inside = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        failed = []
        breaks = np.flatnonzero(np.diff(rows) > self._near) + 1
        edges = [0, *breaks.tolist(), len(rows)] if len(rows) else []
        for part in itertools.starmap(slice, itertools.pairwise(edges)):
            first, stop = int(rows[part.start]), int(rows[part.stop - 1]) + 1
            try:
                found = documents_between(
                    self._reader, self._windows.name, first * length, stop * length
                )
            except DataError as error:
                failed.append((places[part], error))
                continue
            found -= first * length
            window = found // length
            found -= window * length
            number = np.full(stop - first, -1)
            number[rows[part] - first] = np.arange(part.start, part.stop)
            owner = number[window]
            kept = (found > 0) & (owner >= 0)
            owners.append(owner[kept])
            inside.append(found[kept])
        flat, ends = self._placed(places, np.concatenate(owners), np.concatenate(inside), skip)
        first_rows = np.arange(batches + 1) * self._batch_size - skip
        edges = ends[first_rows.clip(0, len(places))].tolist()
        return [flat[low:high] for low, high in itertools.pairwise(edges)], failed

    def _placed(
        self, places: IntArray, owners: IntArray, inside: IntArray, skip: int
    ) -> tuple[Starts, IntArray]:
        """Return the starts of segments in the order of `places`, and where each window's begin.

        Starts count from the first element of each batch. For each document that begins after the
        first element of a window, `owners` has the number of this window, ascending, and `inside`
        the distance from that element.
        """
        counts = np.bincount(owners, minlength=len(places))
        in_order = np.empty_like(places)
        in_order[places] = counts + 1
        ends = offsets_of(in_order)
        begins = ends[places]
        windows = (skip + places) % self._batch_size * self._windows.length
        flat = np.empty(int(ends[-1]), np.int32)
        flat[begins] = windows
        behind = begins + 1 - offsets_of(counts)[:-1]
        flat[behind[owners] + np.arange(len(owners))] = windows[owners] + inside
        return flat, ends


def cumulative(parts: Sequence[Starts], elements: int) -> Starts:
    """Return the starts of all segments of a batch, and its end."""
    return np.concatenate([*parts, np.array([elements], np.int32)])
