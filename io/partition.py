"""Which rank reads which samples, and in which order: arithmetic on counts.

Owns the split of a global stream of samples over ranks (`share_of`) and the order of that stream in
one epoch (`EpochOrder`). Never opens a file and never talks to another rank: metadata that every
rank has is all it needs, so all ranks agree without a message.

The stream of an epoch is one permutation of all samples that depends on the dataset, the seed and
the epoch alone, not on the number of ranks; rank r takes a fixed contiguous part of it. Shuffling
is block shuffling in the manner of CorgiPile (Xu et al., SIGMOD 2022): all blocks are permuted
globally, then the samples inside each window of consecutive blocks are permuted. Over a dataset
that was permuted at conversion this behaves like a full shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SHUFFLES", "EpochOrder", "Piece", "Share", "permutation", "share_of"]

SHUFFLES = ("block", "none", "full")

IntArray = NDArray[np.int64]

# Rows that are read and thrown away rather than starting another read: at most 4 times the bytes.
_MERGE_GAP = 3
_BLOCKS, _ROWS, _WINDOW = 1, 2, 3  # what a random stream is for, so that no two are the same


@dataclass(frozen=True)
class Share:
    """The part of the stream that one rank reads in one epoch.

    start: first position in the stream. count: samples, padding included; positions wrap around at
    the end of the stream. padding: how many of them another rank has as well. steps: batches, equal
    on all ranks.
    """

    start: int
    count: int
    padding: int
    steps: int
    batch_size: int

    def batch_count(self, step: int) -> int:
        """Samples in batch `step`: less in the last one, 0 where an exact share has run out."""
        return max(0, min(self.batch_size, self.count - step * self.batch_size))


def share_of(
    num_samples: int,
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    drop_last: bool = False,
    pad: bool = True,
) -> Share:
    """The share of `rank`; all ranks get the same number of steps.

    drop_last=True: only full batches; up to world_size * batch_size - 1 samples at the end of the
    stream are left out (others in each epoch when shuffled). drop_last=False: every sample of the
    dataset appears exactly once per epoch, except for explicit padding: with pad=True all ranks get
    ceil(num_samples / world_size) samples, and where that does not come out even a rank repeats one
    sample (the next in the stream, wrapping around), so all ranks have equal batches; with
    pad=False nothing is repeated, and the last batch of a rank may be one sample shorter than that
    of another, or empty.

    Raises ValueError when a rank would have no sample or no step, TypeError for counts that are not
    integers.
    """
    _require_int("batch_size", batch_size, 1)
    _require_int("world_size", world_size, 1)
    _require_int("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank {rank} of world_size {world_size}; ranks end at {world_size - 1}")
    if num_samples < world_size:
        raise ValueError(
            f"{num_samples} samples for {world_size} ranks: every rank needs one at least; "
            + (f"start at most {num_samples} ranks" if num_samples else "the dataset is empty")
        )
    if drop_last:
        steps = num_samples // (world_size * batch_size)
        if steps == 0:
            raise ValueError(
                f"drop_last=True leaves no batch: {num_samples} samples for {world_size} ranks and "
                f"batch_size {batch_size}; use a batch_size of at most {num_samples // world_size} "
                "or drop_last=False"
            )
        count = steps * batch_size
        return Share(rank * count, count, 0, steps, batch_size)
    per_rank, longer_ranks = divmod(num_samples, world_size)
    start = rank * per_rank + min(rank, longer_ranks)
    own = per_rank + (rank < longer_ranks)
    longest = per_rank + (longer_ranks > 0)
    steps = -(-longest // batch_size)
    count = longest if pad else own
    return Share(start, count, count - own, steps, batch_size)


def permutation(count: int, *key: int) -> IntArray:
    """A random permutation of range(count), a function of `key` alone.

    Random 64-bit keys carry their index in the low bits and are sorted: all keys differ, so the
    result does not depend on the sorting algorithm, and NumPy guarantees the raw stream of PCG64
    across versions (unlike Generator.permutation, NEP 19). Ties in the random part (rare below
    2**30 rows) keep their order.
    """
    if count <= 1:
        return np.zeros(count, np.int64)
    mask = np.uint64((1 << (count - 1).bit_length()) - 1)
    bits: NDArray[np.uint64] = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    bits &= ~mask
    bits |= np.arange(count, dtype=np.uint64)
    bits.sort()
    bits &= mask
    return bits.view(np.int64)


@dataclass(frozen=True)
class Piece:
    """What to read next, and how the stream goes on from it.

    Read the dataset rows [starts[i], starts[i] + counts[i]) for all i, one after the other, into a
    buffer; the stream goes on with buffer[take] (the buffer as it is when take is None).
    """

    starts: IntArray
    counts: IntArray
    take: IntArray | None

    @property
    def buffer_rows(self) -> int:
        """Rows that the buffer holds."""
        return int(self.counts.sum())

    @property
    def stream_rows(self) -> int:
        """Samples that the stream gets from this piece."""
        return self.buffer_rows if self.take is None else len(self.take)


class EpochOrder:
    """The order of the global stream in one epoch: position -> dataset row.

    slab_counts: samples per slab; no block crosses a slab. block_samples: rows per block.
    window_samples: rows that a window holds (a whole number of blocks, at least one). Memory:
    O(blocks + window), O(samples) for "full".
    """

    def __init__(
        self,
        slab_counts: Sequence[int],
        *,
        shuffle: str = "block",
        seed: int = 0,
        epoch: int = 0,
        block_samples: int = 1024,
        window_samples: int = 16384,
    ) -> None:
        if shuffle not in SHUFFLES:
            raise ValueError(f"shuffle={shuffle!r}; use one of {', '.join(map(repr, SHUFFLES))}")
        _require_int("seed", seed, 0)
        _require_int("epoch", epoch, 0)
        _require_int("block_samples", block_samples, 1)
        _require_int("window_samples", window_samples, 1)
        self.num_samples = int(sum(slab_counts))
        self._shuffle = shuffle
        self._key = (int(seed), int(epoch))
        self._window_samples = int(window_samples)
        if shuffle == "block":
            self._plan_blocks(slab_counts, int(block_samples))
        elif shuffle == "full":
            self._rows = permutation(self.num_samples, *self._key, _ROWS)

    def pieces(self, start: int, count: int) -> Iterator[Piece]:
        """The stream from position `start` on, for `count` samples, wrapping around at its end."""
        if count and not 0 <= start < self.num_samples:
            raise ValueError(f"start {start} is outside of a stream of {self.num_samples} samples")
        while count > 0:
            stop = min(start + count, self.num_samples)
            yield from self._pieces(start, stop)
            count -= stop - start
            start = 0

    def indices(self, start: int, count: int) -> IntArray:
        """Dataset rows at `count` stream positions from `start` on (wrapping around)."""
        rows = [np.empty(0, np.int64)]
        for piece in self.pieces(start, count):
            buffer = _concatenate_ranges(piece.starts, piece.counts)
            rows.append(buffer if piece.take is None else buffer[piece.take])
        return np.concatenate(rows)

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        if self._shuffle == "none":
            yield Piece(np.array([start]), np.array([stop - start]), None)
        elif self._shuffle == "full":
            for low in range(start, stop, self._window_samples):
                yield _gather(self._rows[low : min(low + self._window_samples, stop)])
        else:
            first = int(np.searchsorted(self._window_ends, start, side="right"))
            for window in range(first, len(self._window_ends)):
                window_start = int(self._window_ends[window - 1]) if window else 0
                if window_start >= stop:
                    break
                rows = self._window_rows(window)
                yield _gather(rows[max(0, start - window_start) : stop - window_start])

    def _plan_blocks(self, slab_counts: Sequence[int], block_samples: int) -> None:
        """Cut slabs into blocks, permute all blocks, and group them in windows."""
        counts = np.asarray(slab_counts, np.int64)
        first_rows = np.cumsum(counts) - counts
        per_slab = -(-counts // block_samples)
        in_slab = _concatenate_ranges(np.zeros_like(per_slab), per_slab) * block_samples
        starts = np.repeat(first_rows, per_slab) + in_slab
        lengths = np.minimum(block_samples, np.repeat(counts, per_slab) - in_slab)
        order = permutation(len(starts), *self._key, _BLOCKS)
        self._block_starts, self._block_counts = starts[order], lengths[order]
        mean_block = -(-self.num_samples // max(1, len(starts)))
        self._window_blocks = max(1, self._window_samples // max(1, mean_block))
        ends = np.cumsum(self._block_counts)
        self._window_ends = ends[self._window_blocks - 1 :: self._window_blocks]
        if len(ends) % self._window_blocks:
            self._window_ends = np.append(self._window_ends, ends[-1])

    def _window_rows(self, window: int) -> IntArray:
        blocks = slice(window * self._window_blocks, (window + 1) * self._window_blocks)
        rows = _concatenate_ranges(self._block_starts[blocks], self._block_counts[blocks])
        return rows[permutation(len(rows), *self._key, _WINDOW, window)]


def _gather(rows: IntArray) -> Piece:
    """Read `rows` (all different) with few reads in file order: near rows share one read."""
    ordered = np.sort(rows)
    breaks = np.flatnonzero(np.diff(ordered) > _MERGE_GAP + 1) + 1
    starts = ordered[np.concatenate(([0], breaks))]
    counts = ordered[np.concatenate((breaks - 1, [len(ordered) - 1]))] - starts + 1
    run = np.searchsorted(starts, rows, side="right") - 1
    return Piece(starts, counts, rows - starts[run] + (np.cumsum(counts) - counts)[run])


def _concatenate_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """concatenate([arange(s, s + c) for s, c in zip(starts, counts)]), without the loop."""
    skipped = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return skipped + np.arange(len(skipped), dtype=np.int64)


def _require_int(name: str, value: Any, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); use an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; use at least {least}")
