"""EpochOrder and Share: the samples that each rank reads, and their order, computed from counts.

All ranks have the metadata for it, so they agree without a message.

The stream of an epoch is one permutation of all samples. It depends only on the dataset, the seed
and the epoch, not on the number of ranks; rank r takes a fixed contiguous part of it. Shuffling is
block shuffling in the manner of CorgiPile (Xu et al., SIGMOD 2022): all blocks are permuted
globally, then the samples inside each window of consecutive blocks are permuted. On a dataset that
was permuted at conversion this behaves like a full shuffle.

With "slabs" the order of slabs depends on the seed only, and blocks are permuted among a few
neighbouring slabs. So a part of the stream has the same slabs in every epoch, and ranks take the
parts in turn (`part_in_turn`), first inside their node: the slabs in a node's memory serve it for
as many epochs as it has ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SHUFFLES",
    "Cut",
    "EpochOrder",
    "IntArray",
    "Range",
    "Share",
    "StreamPiece",
    "concatenate_ranges",
    "part_in_turn",
    "part_of",
    "permutation",
    "remaining",
    "share_of",
    "with_cut",
]

SHUFFLES = ("block", "slabs", "none", "full")

IntArray = NDArray[np.int64]
Range = tuple[int, int]  # first position, number of positions

_MERGE_GAP = 3  # most rows read and dropped instead of a new read: at most 4 times the bytes
# Purposes of random streams, so that no two are the same (shuffle_passes.py has 4).
_BLOCKS, _ROWS, _WINDOW, _SLABS = 1, 2, 3, 5
_GROUP_WINDOWS = 4  # about so many windows in slabs whose blocks are permuted together


@dataclass(frozen=True)
class Share:
    """The part of the stream that one rank reads in one epoch.

    Attributes:
        start: first position in the stream.
        count: samples, padding included; positions wrap around at the end of the stream.
        padding: samples that another rank has, too.
        steps: batches, equal on all ranks.
    """

    start: int
    count: int
    padding: int
    steps: int
    batch_size: int

    def batch_count(self, step: int) -> int:
        """Return the samples of a batch: fewer in the last, 0 after the end of an exact share."""
        return max(0, min(self.batch_size, self.count - step * self.batch_size))


def share_of(
    num_samples: int,
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    drop_last: bool = False,
    pad: bool = True,
    resumed: bool = False,
) -> Share:
    """Return the share of `rank`; all ranks get the same number of steps.

    With `drop_last` there are only full batches: up to world_size * batch_size - 1 samples at the
    end of the stream are left out, others in each epoch if shuffled. Otherwise every sample appears
    exactly once per epoch, except for padding.

    With `pad` all ranks get ceil(num_samples / world_size) samples; a rank that is one short
    repeats the next sample of the stream, wrapping around. So all ranks have equal batches. Without
    `pad` nothing is repeated, and the last batch of a rank may be one sample shorter than that of
    another, or empty.

    If `resumed`, the samples are the rest of an epoch: there may be fewer than ranks, or none,
    which gives no step.

    Raises:
        ValueError: a rank would have no sample or no step.
        TypeError: a count is not an integer.
    """
    _require_int("batch_size", batch_size, 1)
    _require_int("world_size", world_size, 1)
    _require_int("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank {rank} of world_size {world_size}; use 0 to {world_size - 1}")
    if num_samples < world_size and not resumed:
        raise ValueError(
            f"{num_samples} samples for {world_size} ranks: every rank needs one at least; "
            + (f"start at most {num_samples} ranks" if num_samples else "the dataset is empty")
        )
    if drop_last:
        steps = num_samples // (world_size * batch_size)
        if steps == 0 and not resumed:
            raise ValueError(
                f"drop_last=True leaves no batch: {num_samples} samples for {world_size} ranks and "
                f"batch_size {batch_size}; use a batch_size of at most {num_samples // world_size} "
                "or drop_last=False"
            )
        count = steps * batch_size
        return Share(rank * count, count, 0, steps, batch_size)
    per_rank, longer_ranks = divmod(num_samples, world_size)
    start = (rank * per_rank + min(rank, longer_ranks)) % max(1, num_samples)
    own = per_rank + (rank < longer_ranks)
    longest = per_rank + (longer_ranks > 0)
    steps = -(-longest // batch_size)
    count = longest if pad else own
    return Share(start, count, count - own, steps, batch_size)


def part_in_turn(seat: int, epoch: int, world_size: int, local_size: int) -> int:
    """Return the part of the stream for the rank at `seat` if ranks take the parts in turn.

    Seats are counted node by node, local_size per node. Parts go round inside the node for
    local_size epochs, then to the next node. If local_size does not divide world_size, they go
    round all ranks.
    """
    if world_size % local_size:
        return (seat + epoch) % world_size
    node, local = divmod(seat, local_size)
    nodes = world_size // local_size
    return (node + epoch // local_size) % nodes * local_size + (local + epoch) % local_size


def permutation(count: int, *key: int) -> IntArray:
    """Return a random permutation of range(count), which depends on `key` only.

    Random 64-bit keys have their index in the low bits and are sorted. All keys differ, so the
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
class Cut:
    """The point where an epoch was left: every rank had consumed `steps` batches of this division.

    A resumed epoch may be left again, on another number of ranks; then its cuts form a sequence.
    """

    world_size: int
    batch_size: int
    drop_last: bool
    pad: bool
    steps: int


def with_cut(cuts: Sequence[Cut], new: Cut) -> tuple[Cut, ...]:
    """Return the cuts and a new one; one like the last only adds its steps to the last."""
    if cuts and replace(cuts[-1], steps=new.steps) == new:
        return (*cuts[:-1], replace(new, steps=cuts[-1].steps + new.steps))
    return (*cuts, new)


def remaining(num_samples: int, cuts: Sequence[Cut]) -> list[Range]:
    """Return the rest of an epoch after the cuts, as ranges of positions (start, count), in order.

    Each rank of a cut leaves the rest of its part, without the sample that it would have repeated.
    Samples that drop_last excluded from full batches come last, so only the job that ends the epoch
    leaves out a tail. Needs no message: every rank gets the same result.
    """
    left = [(0, num_samples)]
    for cut in cuts:
        total = sum(count for _, count in left)
        rest: list[Range] = []
        shared = 0
        for rank in range(cut.world_size):
            share = share_of(
                total,
                cut.batch_size,
                rank,
                cut.world_size,
                drop_last=cut.drop_last,
                pad=cut.pad,
                resumed=True,
            )
            own = share.count - share.padding
            consumed = min(own, cut.steps * cut.batch_size)
            rest += part_of(left, share.start + consumed, own - consumed)
            shared += own
        left = [*rest, *part_of(left, shared, total - shared)]
    return left


def part_of(ranges: Sequence[Range], start: int, count: int) -> list[Range]:
    """Return `count` positions from the `start`-th on of consecutive ranges, wrapping around."""
    found: list[Range] = []
    skip = start
    while count > 0:
        before = count
        for first, length in ranges:
            taken = min(length - skip, count)
            if taken > 0:
                found.append((first + skip, taken))
                count -= taken
            skip = max(0, skip - length)
        if count == before:
            raise ValueError(f"start {start} is outside of what is left of the stream")
    return found


@dataclass(frozen=True)
class StreamPiece:
    """The next rows to read, and their places.

    Read the dataset rows [starts[i], starts[i] + counts[i]) for all i, one after the other. The
    k-th row read is number places[k] of the next `stream_rows` samples of the stream; -1 means that
    it is not needed. No range crosses a slab.
    """

    starts: IntArray
    counts: IntArray
    places: IntArray
    stream_rows: int

    @property
    def buffer_rows(self) -> int:
        return len(self.places)

    def samples(self) -> IntArray:
        """Return the dataset rows of the samples, in the order of the stream."""
        wanted = self.places >= 0
        found = np.empty(self.stream_rows, np.int64)
        found[self.places[wanted]] = concatenate_ranges(self.starts, self.counts)[wanted]
        return found


class EpochOrder:
    """The order of the global stream in one epoch: position -> dataset row.

    Memory: O(blocks + window), O(samples) for "full".

    Args:
        slab_counts: samples per slab; no block crosses a slab.
        block_samples: rows per block.
        window_samples: rows per window (a whole number of blocks, at least one).
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
        self._stops = np.cumsum(np.asarray(slab_counts, np.int64))
        if shuffle == "full":
            self._rows = permutation(self.num_samples, *self._key, _ROWS)
        else:
            self._plan_blocks(slab_counts, int(block_samples))

    @property
    def piece_samples(self) -> int:
        """The most samples that a piece may have in any epoch."""
        if self._shuffle == "full":
            return self._window_samples
        if self._shuffle == "none":
            return int(np.diff(self._window_ends, prepend=0).max(initial=1))
        others = max(0, len(self._block_counts) - self._window_blocks)
        return max(1, int(np.sort(self._block_counts)[others:].sum()))

    def pieces(self, start: int, count: int) -> Iterator[StreamPiece]:
        """Yield `count` samples of the stream from position `start` on, wrapping at its end."""
        if count and not 0 <= start < self.num_samples:
            raise ValueError(f"start {start} is outside of a stream of {self.num_samples} samples")
        while count > 0:
            stop = min(start + count, self.num_samples)
            yield from self._pieces(start, stop)
            count -= stop - start
            start = 0

    def slabs(self, start: int, count: int) -> IntArray:
        """Return the slabs of `count` stream positions from `start` on, wrapping; ascending."""
        every: IntArray = np.arange(len(self._stops))
        if self._shuffle == "full" or start + count > self.num_samples:
            return every
        ends = self._window_ends
        windows = slice(
            int(np.searchsorted(ends, start, side="right")),
            int(np.searchsorted(ends, start + count, side="left")) + 1,
        )
        blocks = slice(windows.start * self._window_blocks, windows.stop * self._window_blocks)
        found = np.searchsorted(self._stops, self._block_starts[blocks], side="right")
        return np.unique(found) if count else every[:0]

    def indices(self, start: int, count: int) -> IntArray:
        """Return the dataset rows at `count` stream positions from `start` on, wrapping around."""
        parts = (piece.samples() for piece in self.pieces(start, count))
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _pieces(self, start: int, stop: int) -> Iterator[StreamPiece]:
        if self._shuffle == "full":
            for low in range(start, stop, self._window_samples):
                yield self._gather(self._rows[low : min(low + self._window_samples, stop)])
            return
        first = int(np.searchsorted(self._window_ends, start, side="right"))
        for window in range(first, len(self._window_ends)):
            window_start = int(self._window_ends[window - 1]) if window else 0
            if window_start >= stop:
                break
            window_stop = int(self._window_ends[window])
            yield self._window(window, max(0, start - window_start), min(stop, window_stop))

    def _plan_blocks(self, slab_counts: Sequence[int], block_samples: int) -> None:
        """Cut slabs into blocks, permute all blocks, and group them in windows."""
        counts = np.asarray(slab_counts, np.int64)
        first_rows = np.cumsum(counts) - counts
        per_slab = -(-counts // block_samples)
        in_slab = concatenate_ranges(np.zeros_like(per_slab), per_slab) * block_samples
        starts = np.repeat(first_rows, per_slab) + in_slab
        lengths = np.minimum(block_samples, np.repeat(counts, per_slab) - in_slab)
        if self._shuffle in ("block", "slabs"):
            order = (
                permutation(len(starts), *self._key, _BLOCKS)
                if self._shuffle == "block"
                else self._order_in_groups(counts, per_slab)
            )
            starts, lengths = starts[order], lengths[order]
        self._block_starts, self._block_counts = starts, lengths
        mean_block = -(-self.num_samples // max(1, len(starts)))
        self._window_blocks = max(1, self._window_samples // max(1, mean_block))
        ends = np.cumsum(self._block_counts)
        self._window_ends = ends[self._window_blocks - 1 :: self._window_blocks]
        if len(ends) % self._window_blocks:
            self._window_ends = np.append(self._window_ends, ends[-1])

    def _order_in_groups(self, counts: IntArray, per_slab: IntArray) -> IntArray:
        """Return the order of blocks: slabs by the seed, blocks permuted inside groups of slabs."""
        slabs = permutation(len(counts), self._key[0], _SLABS)
        first_blocks = np.cumsum(per_slab) - per_slab
        order = concatenate_ranges(first_blocks[slabs], per_slab[slabs])
        group = (np.cumsum(counts[slabs]) - 1) // (_GROUP_WINDOWS * self._window_samples)
        edges = np.append(np.flatnonzero(np.diff(group, prepend=-2)), len(slabs))
        ends = np.append(0, np.cumsum(per_slab[slabs]))[edges]
        for number, (low, high) in enumerate(itertools.pairwise(ends.tolist())):
            order[low:high] = order[low:high][permutation(high - low, *self._key, _BLOCKS, number)]
        return order

    def _window(self, window: int, skip: int, stop: int) -> StreamPiece:
        """Return stream positions from the `skip`-th of a window to `stop`, read block by block."""
        blocks = slice(window * self._window_blocks, (window + 1) * self._window_blocks)
        starts, counts = self._block_starts[blocks], self._block_counts[blocks]
        rows = int(counts.sum())
        kept = stop - (int(self._window_ends[window]) - rows) - skip
        places = np.arange(rows)
        if self._shuffle != "none":
            places[permutation(rows, *self._key, _WINDOW, window)] = np.arange(rows)
        if kept == rows:
            return StreamPiece(starts, counts, places, rows)
        places -= skip
        places[(places < 0) | (places >= kept)] = -1
        read = concatenate_ranges(starts, counts)
        of_block = np.repeat(np.arange(len(starts)), counts)
        wanted = np.flatnonzero(places >= 0)
        return _merge_near(read[wanted], of_block[wanted], places[wanted])

    def _gather(self, rows: IntArray) -> StreamPiece:
        """Return reads of `rows`, all different and in stream order, in the order of the files."""
        places = np.argsort(rows, kind="stable")
        ordered = rows[places]
        return _merge_near(ordered, np.searchsorted(self._stops, ordered, side="right"), places)


def _merge_near(rows: IntArray, parts: IntArray, places: IntArray) -> StreamPiece:
    """Return reads of `rows`, ascending inside each part; near rows of a part share one read."""
    if not len(rows):
        return StreamPiece(rows, rows, places, 0)
    gaps = np.diff(rows) - 1
    breaks = np.flatnonzero((gaps > _MERGE_GAP) | (gaps < 0) | (np.diff(parts) != 0)) + 1
    firsts = np.concatenate(([0], breaks))
    starts = rows[firsts]
    counts = rows[np.concatenate((breaks - 1, [len(rows) - 1]))] - starts + 1
    before = np.cumsum(counts) - counts
    run = np.repeat(np.arange(len(starts)), np.diff(np.append(firsts, len(rows))))
    spread = np.full(int(counts.sum()), -1, np.int64)
    spread[before[run] + rows - starts[run]] = places
    return StreamPiece(starts, counts, spread, len(rows))


def concatenate_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Return concatenate([arange(s, s + c) for s, c in zip(starts, counts)]), without the loop."""
    skipped = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return skipped + np.arange(len(skipped), dtype=np.int64)


def _require_int(name: str, value: Any, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); use an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; use at least {least}")
