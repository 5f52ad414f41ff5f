"""Where documents begin in the windows of a packed dataset.

Owns the search in the offsets of the ragged samples, and `SegmentFinder`, which notes for every
batch where its segments begin: the form of flash attention's cu_seqlens. Never reads elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.element_windows import Windows
from ..order.partition import IntArray, StreamPiece, concatenate_ranges
from ..reading.reader import ReadStats, RowReader
from ..remote.objects import ObjectReader

__all__ = ["CU_SEQLENS", "SegmentFinder", "Starts", "cumulative", "documents_between"]

CU_SEQLENS = "cu_seqlens"  # what a batch calls them

Starts = NDArray[np.int32]  # as flash attention takes them

_FEW = 2048  # offsets that are read at once rather than searched
_NEAR_BYTES = 1 << 20  # elements between two ranges of windows that are searched as one


def documents_between(reader: RowReader, name: str, first: int, stop: int) -> IntArray:
    """Elements [first, stop), counted from the first of all slabs, at which samples of a ragged
    field begin; ascending, each once. Raises DataError for offsets that cannot be.
    """
    parts = [np.empty(0, np.int64)]
    for number, low, high in reader.element_ranges(name, first, stop):
        parts += (found + (first - low) for found in _of_slab(reader, number, name, low, high))
        first += high - low
    found = np.concatenate(parts)
    return found[np.diff(found, prepend=-1) > 0]  # empty samples begin where the next one does


def _of_slab(reader: RowReader, number: int, name: str, low: int, high: int) -> Iterator[IntArray]:
    """The same for elements [low, high) of one slab, in parts."""
    slab = reader.data.slabs[number]
    offsets = slab.extents[name].offsets
    assert offsets is not None
    sample, after = 0, slab.count  # those before `sample` begin before low, `after` does not
    while after - sample > _FEW:
        middle = (sample + after) // 2
        begins = int(reader.read_offsets(number, name, middle, 0)[0])
        sample, after = (middle, after) if begins < low else (sample, middle)
    likely = _FEW + (high - low) * slab.count // max(1, offsets.elements)
    while sample < slab.count:
        count = min(likely, slab.count - sample)
        begins_at = reader.read_offsets(number, name, sample, count)[:-1]
        chosen = slice(*np.searchsorted(begins_at, [low, high]).tolist())
        yield begins_at[chosen]
        sample += count
        if chosen.stop < count:
            return


class SegmentFinder:
    """For one iteration over a packed dataset; pieces come in order. objects: what reads
    those behind URLs.
    """

    def __init__(
        self, windows: Windows, batch_size: int, objects: ObjectReader, stats: ReadStats
    ) -> None:
        self._windows, self._batch_size = windows, batch_size
        self._reader = RowReader(windows.source, stats, objects)
        element_bytes = max(1, windows.source.fields[0].row_bytes)
        self._near = max(1, _NEAR_BYTES // (element_bytes * windows.length))  # in windows

    def close(self) -> None:
        """Close what was opened for offsets."""
        self._reader.close()

    def find(
        self, piece: StreamPiece, skip: int, batches: int
    ) -> tuple[list[Starts], list[tuple[IntArray, DataError]]]:
        """By batch, the elements at which segments begin, counted from its first, those of
        this piece; each window begins one. And places of the piece whose offsets cannot be read.

        skip: samples that the first batch had before.
        """
        length = self._windows.length
        rows = concatenate_ranges(piece.starts, piece.counts)
        wanted = piece.places >= 0
        rows, places = rows[wanted], piece.places[wanted]
        by_row = np.argsort(rows, kind="stable")
        rows, places = rows[by_row], places[by_row]
        starts = [places * length]
        failed = []
        breaks = np.flatnonzero(np.diff(rows) > self._near) + 1
        for part in np.split(np.arange(len(rows)), breaks) if len(rows) else ():
            first, stop = int(rows[part[0]]), int(rows[part[-1]]) + 1
            try:
                found = documents_between(
                    self._reader, self._windows.name, first * length, stop * length
                )
            except DataError as error:
                failed.append((places[part], error))
                continue
            window, inside = np.divmod(found, length)
            at = np.minimum(np.searchsorted(rows, window), len(rows) - 1)
            known = (rows[at] == window) & (inside > 0)
            starts.append(places[at[known]] * length + inside[known])
        flat = np.sort(np.concatenate(starts)) + skip * length
        return self._by_batch(flat, batches), failed

    def _by_batch(self, flat: IntArray, batches: int) -> list[Starts]:
        """Cut into batches, counted from the first element of each."""
        size = self._batch_size * self._windows.length
        batch = flat // size
        inside = (flat - batch * size).astype(np.int32)
        edges = [0, *np.searchsorted(batch, np.arange(1, batches)).tolist(), len(flat)]
        return [inside[low:high] for low, high in itertools.pairwise(edges)]


def cumulative(parts: Sequence[Starts], elements: int) -> Starts:
    """The starts of all segments of a batch, and its end."""
    return np.concatenate([*parts, np.array([elements], np.int32)])
