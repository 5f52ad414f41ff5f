"""PartitionedLoader: the batches of one rank, read ahead by threads.

Owns the arguments, the epoch and its state, and the memory that iterations share. Threads and
batches are those of iteration.py and filler.py. Never talks to other ranks: rank and
world_size are arguments, and equal arguments everywhere are enough for equal steps and disjoint
samples.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from hsgd.base.closing import Closing

from .batches.buffer_ring import BufferRing
from .batches.decode_stage import DecodeSettings, DecodeStage, decoded_bytes
from .batches.device_transfer import DeviceTransfer
from .batches.error_policy import ErrorPolicy
from .batches.filler import Filler
from .batches.image_decoder import ImageDecoder
from .batches.iteration import Batch, Counts, Iteration, IterationSettings, Progress
from .batches.mapped_batches import MappedBatches, check_mappable
from .batches.scheduler import ReadPlan, staging_bytes
from .cache.node_cache import CacheStats, NodeCache, NodeGroup
from .cache.seats import seats_of
from .format.data_map import DataMap
from .format.fields import left_out_line
from .format.open_map import open_map
from .format.packed_map import packed_map
from .format.packing_of import packing_warnings
from .format.slab_folder import FieldSpec
from .format.stored_rows import unwritten_lines
from .options import CacheOptions, ErrorAction, ReadOptions, Shuffle
from .order.epoch_order import (
    Cut,
    EpochOrder,
    Share,
    part_of,
    remaining,
    share_of,
    with_cut,
)
from .order.resume import EpochState, state_from
from .rank_here import check_still_alone, rank_here
from .reading.open_map_together import open_map_together
from .reading.row_copies import MOST_ROWS
from .reading.row_reader import ReadStats
from .remote.block_files import DiskOptions
from .remote.disk_cache import disk_cache_of
from .remote.object_reader import RemoteAccess
from .remote.urls import is_url

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "PartitionedLoader"]

_PACKED = "its values are delivered as they are stored; apply these in transform="
# Attributes that no other process gets.
_OF_PROCESS = (
    "_lock",
    "_made",
    "_rings",
    "_used_rings",
    "_running",
    "_iterations",
    "_read",
    "_seen",
    "_pid",
)


class PartitionedLoader(Closing):
    """Iterable of the batches of one rank in one epoch; iterate again for the next epoch.

    A batch is a dict: field name -> CPU torch tensor of shape (samples, ...), or NumPy array when
    torch is not installed or as_numpy=True; for a field whose samples differ in length it is a
    hsgd.io.Ragged of two of them. Tensors look at the memory into which the file was read and
    belong to the caller: that memory is used again only after the last of them has died.

    path: a slab folder (hsgd data convert) or an ordinary HDF5 file, or the URL of one (https, http
    or s3). batch_size: samples per rank.
    rank, world_size: both, or neither: then they are those of comm, of torch.distributed, or what
    torchrun, hsgd run, horovodrun, mpirun or srun say; repr() shows where they are from.
    shuffle: "block" (blocks permuted globally, then samples within windows), "slabs" (the same
    among a few slabs at a time, and ranks take these in turn, epoch by epoch, inside their node
    first), "full" (one permutation of all samples; reads single rows) or "none" (the order of the
    files). seed and epoch alone determine the order; they must be equal on all ranks, and so must
    block_bytes and window_bytes of `read`, the sizes of what is shuffled. The first iteration is
    epoch 0, and each one after an iteration that gave a batch, or ended, the next epoch, unless
    set_epoch() says otherwise; so all ranks iterate equally often.
    drop_last, pad: see hsgd.io.share_of. By default every sample comes once per epoch; ranks that
    would be one sample short repeat one; pad=False repeats nothing (for evaluation), the
    last batch may then be empty on some ranks. All ranks have the same number of steps.
    fields: names to read (all by default). group: of an HDF5 file, such as "train": it takes the
    place of the whole file, and names are those inside it.
    pack: a sample is a window of so many elements of the ragged fields (those of `fields`): window
    n is the elements [n * pack, (n + 1) * pack) of all samples in the order of the files, each
    element in one window, but for less than `pack` at the end. A batch then has "cu_seqlens" too:
    int32, where segments begin in the batch of samples * pack elements, and its end; a segment is a
    document or what a window has of it.
    decode: by field, how its encoded samples become arrays, in threads: see hsgd.io.images. A
    sample that cannot be decoded is one that cannot be read.
    transform: called with each batch; what it returns is delivered, in order.
    device: where its tensors are delivered: "cuda" (the current device of torch) or "cuda:1", say.
    They are copied from page-locked memory, by a CUDA stream of the loader's own, while the stream
    that is current at next() still computes; what that stream does afterwards comes after the copy.
    Ragged fields, mapped batches and what `transform` makes are in ordinary memory: the loop waits
    while they are copied. So are objects with a method to(), by the current stream.
    on_error: what becomes of a batch with samples that cannot be read: "raise" an error, "skip" it,
    or "substitute" them by other samples of the batch. comm: a hsgd.Comm of these ranks; with it
    every batch costs one small allreduce, and all ranks raise or skip together, so that nobody
    waits in a collective for a rank that failed. "skip" on several ranks needs it. With comm rank 0
    alone examines the files (collective: all ranks make the loader), which must have one path.
    local_size: ranks of each node, for "slabs", when there is no comm to ask (ranks are numbered
    node by node).
    read: how it reads: threads, memory, sizes of what is shuffled. cache: slabs in the memory of
    the node, which needs comm; making the loader and iter() are then collective.

    Local: sends no message without comm. Picklable (without comm) and safe to fork; an iteration
    that runs stays in its process. `with` ends iterations that run. Raises DataError for files that
    are missing, truncated, foreign, unsealed or changed, ValueError for arguments that leave a rank
    without samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: Shuffle = "block",
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        fields: Sequence[str] | None = None,
        group: str | None = None,
        pack: int | None = None,
        decode: Mapping[str, ImageDecoder] | None = None,
        as_numpy: bool = False,
        transform: Callable[[Batch], Any] | None = None,
        device: torch.device | str | int | None = None,
        on_error: ErrorAction = "raise",
        comm: NodeGroup | None = None,
        local_size: int | None = None,
        read: ReadOptions | None = None,
        cache: CacheOptions | None = None,
    ) -> None:
        read, to_device = read or ReadOptions(), _transfer(device, as_numpy)
        self._options, self._shuffle, self._seed = read, shuffle, seed
        self._data = _open(path, fields, group, comm, read)
        if pack is not None:
            self._pack(pack, batch_size, on_error, chosen=fields is not None)
        self._here = here = rank_here(rank, world_size, comm)
        self._rank = here.rank
        self._cut = Cut(here.world_size, batch_size, drop_last, pad, 0)
        # Blocks are whole HDF5 chunks where there are chunks.
        row_bytes, chunk_rows = max(1, self._data.row_bytes), self._data.chunk_rows
        self._block_samples = -(-max(1, read.block_bytes // row_bytes) // chunk_rows) * chunk_rows
        self._window_samples = max(1, read.window_bytes // row_bytes)
        self._epoch, self._cuts, self._chosen = 0, (), True  # the next iteration is of epoch 0
        self._settings = IterationSettings(
            as_torch=not as_numpy and importlib.util.find_spec("torch") is not None,
            timeout_s=read.timeout_s,
            source=f"{self._data.path} (rank {here.rank})",
            transform=transform,
            transform_threads=read.transform_threads,
            window=pack or 0,
            to_device=to_device,
        )
        self._on_error, self._comm, self._decoders = on_error, comm, dict(decode or {})
        self._forget_process()
        _check_reading(self._data, shuffle, on_error, read)
        if read.mapped and (pack is not None or self._decoders or cache is not None):
            raise ValueError("mapped=True: pack=, decode= and cache= make copies; leave them out")
        self._share = self._whole_share(here.rank, part=here.rank)  # reports bad arguments now
        self._order()  # and so does this
        self._agree()
        in_turn = shuffle == "slabs" or cache is not None
        self._seats = seats_of(here.world_size, local_size, comm if in_turn else None)
        self._share = self._whole_share(here.rank)
        self._slots(self._share)
        self._check_delivery()
        self._cache = None if cache is None else self._open_cache(cache)

    def _agree(self) -> None:
        """Compare with the other ranks what decides which samples each reads; collective with comm,
        else nothing. Raises SignatureMismatch.
        """
        if self._comm is None:
            return
        from hsgd.comm.agree import agree

        cut = self._cut
        own: dict[str, object] = {"seed": self._seed, "shuffle": self._shuffle}
        own |= {"batch_size": cut.batch_size, "drop_last": cut.drop_last, "pad": cut.pad}
        own |= {"block_samples": self._block_samples, "window_samples": self._window_samples}
        own |= {"world_size": cut.world_size, "on_error": self._on_error}
        comm: Any = self._comm
        agree(comm, "PartitionedLoader", lambda: own)

    def _check_delivery(self) -> None:
        """Refuse fields that cannot become what was asked for, and name what is no field."""
        _check_decoders(self._decoders, self._data)
        kept = [spec for spec in self._data.fields if spec.name not in self._decoders]
        _check_policy(self._on_error, self._comm, self._here.world_size, kept)
        line = left_out_line(self._data.path, "no fields, so", self._data.left_out)
        lines = [f"{line}; name the fields to use with fields="] if line else []
        lines += unwritten_lines(
            self._data.unwritten().values(),
            accepted=self._options.fill_unwritten,
            option="ReadOptions(fill_unwritten=True)",
        )
        lines += packing_warnings(self._data.path, self._data.packing, _PACKED)
        for line in lines:
            if self._rank == 0:
                warnings.warn(line, stacklevel=3)
        if self._settings.as_torch:
            _check_torch_types(self._data.fields)

    def _pack(self, pack: int, batch_size: int, on_error: str, *, chosen: bool) -> None:
        """Make windows the samples. chosen: the caller named the fields."""
        if self._options.verify:
            raise ValueError(
                "verify=True with pack=: checksums cover whole documents, not windows; check the "
                "files before with hsgd data verify"
            )
        if on_error == "substitute":
            raise ValueError(
                'on_error="substitute" with pack= would leave cu_seqlens of other windows; use '
                '"skip" or "raise"'
            )
        self._data = packed_map(self._data, pack, chosen=chosen)
        if isinstance(batch_size, int) and pack * batch_size >= 1 << 31:
            raise ValueError(
                f"pack={pack} and batch_size={batch_size} make {pack * batch_size} elements, and "
                f"cu_seqlens counts to {(1 << 31) - 1}; lower one of them"
            )

    def _open_cache(self, cache: CacheOptions) -> NodeCache:
        if self._comm is None:
            raise ValueError("cache= needs comm=, a hsgd.Comm of these ranks")
        return NodeCache(
            self._data,
            self._comm,
            cache.node_bytes,
            nodes=self._seats.by_node(),
            verify=self._options.verify,
            exchange=cache.exchange,
        )

    _cuts: tuple[Cut, ...]  # how the epoch was left before
    _current: tuple[
        int, tuple[Cut, ...], Progress
    ]  # epoch, cuts and progress of the last iteration

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks and in all epochs."""
        return self._share.steps

    @property
    def steps_left(self) -> int:
        """Steps of the next iteration: fewer than len() in the rest of an epoch that a state left;
        the same on all ranks.
        """
        return len(self) if self._is_over() else self._resumed_share(self._rank)[0].steps

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or the one that was chosen since."""
        return self._epoch

    def __repr__(self) -> str:
        here = self._here
        return (
            f"PartitionedLoader({self._data.path!r}, {self._data.num_samples} samples, rank "
            f"{here.rank} of {here.world_size} ({here.found}), {len(self)} batches of "
            f"{self._cut.batch_size}, epoch {self._epoch})"
        )

    def __iter__(self) -> Iterator[Any]:
        check_still_alone(self._here)
        if self._is_over():
            self._begin(self._epoch + 1)
        self._chosen = False
        share, ranges = self._resumed_share(self._rank)
        if os.getpid() != self._pid:
            current = self._current
            self._forget_process()
            self._current = current
        if self._cache is not None:
            self._cache.prepare(self._wanted_slabs(), busy=bool(self._running))
        plan = ReadPlan(
            self._data,
            share,
            self._order(),
            ranges,
            self._block_samples,
            self._options.direct,
            self._options.verify,
            self._cache,
            numbered=bool(self._decoders),
        )
        ring: BufferRing | MappedBatches
        filler: Filler | MappedBatches
        if self._options.mapped:
            filler = ring = MappedBatches(plan)
        else:
            ring = self._take_ring(share)
            filler = Filler(plan, ring, self._options.threads)
        counted: list[Progress] = []
        iteration = Iteration(
            filler,
            ring,
            self._settings,
            ErrorPolicy(self._on_error, self._comm, self._rank),
            lambda: self._finished(filler, ring, counted),
            self._decode_stage() if self._decoders else None,
        )
        counted.append(iteration.progress)
        with self._lock:
            self._running.append((filler, iteration.progress))
        self._iterations.add(iteration)
        self._current = (self._epoch, self._cuts, iteration.progress)
        return iteration

    def _decode_stage(self) -> DecodeStage:
        reading = self._options
        return DecodeStage(
            DecodeSettings(
                self._data,
                self._decoders,
                self._seed,
                self._epoch,
                reading.decode_threads or len(os.sched_getaffinity(0)),
                self._slot_samples(),
                self._decoded_slots(),
                self._pins_decoded,
                reading.memory_limit is not None,
            )
        )

    @property
    def _pins_decoded(self) -> bool:
        """Whether decoded batches are page-locked."""
        to_device = self._settings.to_device
        return self._options.pin_memory or (to_device is not None and to_device.is_cuda)

    @property
    def _pins_rows(self) -> bool:
        """Whether what is read is: with ragged fields a slot has room for the longest samples, and
        most of it is never touched. It is page-locked only where that was asked for.
        """
        ragged = any(spec.ragged for spec in self._data.fields)
        return self._options.pin_memory or (self._pins_decoded and not ragged)

    def _is_over(self) -> bool:
        """Whether the next iteration is of the next epoch."""
        return not self._chosen and self._current[2].has_begun

    def _decoded_slots(self) -> int:
        """Decoded batches: the loop has one while it asks for the next."""
        return max(2, self._options.read_ahead)

    def _decoded_bytes(self) -> int:
        """Memory of decoded batches that is there from the start."""
        if not self._decoders:
            return 0
        each = decoded_bytes(self._decoders, self._slot_samples(), pin=self._pins_decoded)
        return self._decoded_slots() * each

    def close(self) -> None:
        """End the iterations that run, and give back the memory of batches that nobody has; local.
        The loader can be iterated again.
        """
        for iteration in list(self._iterations):
            iteration.close()
        with self._lock:
            self._rings.clear()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; same value on all ranks.

        A state that was loaded stays in force when `epoch` is the one that it was saved in.
        An iteration that has given no batch yet begins anew in that epoch.
        """
        if epoch != self._epoch:
            self._begin(epoch)
            self._supersede()
        else:
            self._take_epoch(epoch)
            if self._current[2].has_begun and not self._runs(self._current[2]):
                self._current = (epoch, self._cuts, Progress())
        self._chosen = True

    def _runs(self, progress: Progress) -> bool:
        """Whether a loop still takes batches: its state counts until it ends."""
        with self._lock:
            return not progress.ended and any(other is progress for _, other in self._running)

    def _take_epoch(self, epoch: int) -> None:
        """Raises TypeError or ValueError for what is none, and nothing changes."""
        before, self._epoch = self._epoch, epoch
        try:
            self._order()
        except (TypeError, ValueError):
            self._epoch = before
            raise

    def _begin(self, epoch: int) -> None:
        """Be at the start of an epoch."""
        self._take_epoch(epoch)
        self._share = self._whole_share(self._rank)
        self._cuts = ()
        self._current = (epoch, (), Progress())

    def _supersede(self) -> None:
        """Trainers call iter() before they choose the epoch or load a state."""
        for iteration in list(self._iterations):
            iteration.supersede(self.__iter__)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: the batches that the latest iteration has handed out are consumed.

        A few numbers, the same on all ranks after the same step; batches that were only read ahead
        do not count. Local.
        """
        epoch, cuts, progress = self._current
        steps = progress.batches + progress.skipped
        if steps:
            cuts = with_cut(cuts, replace(self._cut, steps=steps))
        return self._state(epoch, cuts, progress.ended).as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where state_dict() was called, perhaps on another number of ranks; on every rank.

        The next iteration gives the samples of that epoch which no rank had consumed, each exactly
        once; with as many ranks and the same batch_size, in the same order (but for padding). Where
        the loop had seen the end of that epoch the next iteration is of the next epoch, unless
        set_epoch() names that one again: then nothing is left.
        Raises ValueError for the state of another dataset, or of another order (seed, shuffle,
        block and window).
        """
        wanted = state_from(state)
        wanted.check_fits(self._state(0, ()))
        self._begin(wanted.epoch)
        self._cuts, self._chosen = wanted.cuts, not wanted.ended
        self._current = (wanted.epoch, wanted.cuts, Progress(ended=wanted.ended))
        self._supersede()

    @property
    def sampler(self) -> PartitionedLoader:
        """Itself: trainers call sampler.set_epoch(epoch) before each epoch."""
        return self

    @property
    def num_samples(self) -> int:
        """Samples of the whole dataset, over all ranks."""
        return self._data.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """Samples that this rank gets per epoch, padding included."""
        return self._share.count

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        """Name, shape and dtype of what a sample holds, in a batch."""
        return tuple(
            self._decoders[spec.name].spec(spec.name) if spec.name in self._decoders else spec
            for spec in self._data.fields
        )

    def metrics(self) -> dict[str, Any]:
        """What was read since construction, over all iterations in this process.

        bytes_read, preadv_calls, h5py_calls, read_s (seconds spent reading, summed over threads),
        requests and retries (to servers), fetched_bytes (from them), disk_bytes (from the cache on
        disk instead), disk_damaged (blocks there),
        direct_refusal (why direct=True does not hold, or ""), batches, samples, wait_s (seconds
        that the loop waited for batches), skipped (batches), substituted (samples), padding
        (samples per epoch that another rank has too), tail (elements of a field behind the last
        window, with pack), buffer_bytes (memory of the batches as they are read), decoded_bytes (of
        those that were decoded),
        cached_slabs (in the memory of the node), cache_bytes (that this rank read for it),
        exchanged_bytes (that it got for it from other nodes), and
        bypass: field name -> "preadv", "range requests" behind a URL, either with " + gzip" and the
        like for chunks, "mmap", or "h5py: " and the reason.
        """
        bypass = self._data.read_by()
        if self._options.mapped:
            bypass = dict.fromkeys(bypass, "mmap")
        cached = CacheStats() if self._cache is None else self._cache.stats
        with self._lock:
            read, seen = replace(self._read), replace(self._seen)
            for filler, progress in self._running:
                _add(read, filler.stats)
                _add(seen, [progress])
            rings = {id(ring): ring for ring in (*self._rings, *self._used_rings)}
        return {
            **asdict(read),
            **asdict(seen),
            **asdict(cached),
            "padding": self._share.padding,
            "tail": 0 if self._data.windows is None else self._data.windows.tail,
            "buffer_bytes": sum(ring.nbytes for ring in rings.values()),
            "decoded_bytes": sum(each.decoded_bytes for each in list(self._iterations)),
            "bypass": bypass,
        }

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process; statistics begin anew."""
        own = vars(self).copy()
        for name in _OF_PROCESS:
            del own[name]
        epoch, cuts, progress = self._current
        own["_current"] = (epoch, cuts, replace(progress))
        return own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        current = self._current
        self._forget_process()
        self._current = current

    def _forget_process(self) -> None:
        """What no other process may share: memory of batches, locks, statistics."""
        self._pid = os.getpid()
        self._made: tuple[tuple[type, int], EpochOrder] | None = None
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._rings: list[BufferRing] = []
        self._used_rings: list[BufferRing] = []
        self._running: list[tuple[Filler | MappedBatches, Progress]] = []
        self._iterations: weakref.WeakSet[Iteration] = weakref.WeakSet()
        self._read, self._seen = ReadStats(), Counts()
        self._current = (self._epoch, self._cuts, Progress())

    def _take_ring(self, share: Share) -> BufferRing:
        """A ring that no iteration uses; memory is kept from one epoch to the next."""
        slots = self._slots(share)
        with self._lock:
            fitting = [ring for ring in self._rings if ring.base_slots >= slots]
            if fitting:
                ring = fitting[0]
                self._rings.remove(ring)
                ring.discard_wakes()
            else:
                ring = BufferRing(
                    self._data.fields,
                    self._slot_samples(),
                    slots,
                    self._buffer_limit(),
                    pin=self._pins_rows,
                    longest=self._longest(),
                )
            self._used_rings.append(ring)
        return ring

    def _finished(
        self,
        filler: Filler | MappedBatches,
        ring: BufferRing | MappedBatches,
        counted: Sequence[Progress],
    ) -> None:
        """An iteration has ended: keep its ring for the next, and its figures."""
        if isinstance(ring, BufferRing):
            ring.trim()
        with self._lock:
            _add(self._read, filler.stats)
            _add(self._seen, counted)
            self._running = [entry for entry in self._running if entry[0] is not filler]
            self._used_rings = [other for other in self._used_rings if other is not ring]
            if isinstance(ring, BufferRing):
                self._rings = [ring]  # two iterations at once are rare: keep the memory of one

    def _slots(self, share: Share) -> int:
        """Batches that the ring holds: two windows, those read ahead, and what the loop has."""
        if (samples := self._slot_samples()) >= MOST_ROWS:
            raise ValueError(f"batches of {samples} samples; use a batch_size below {MOST_ROWS}")
        reading, batch_size = self._options, share.batch_size
        piece_samples = self._order().piece_samples
        window = -(-piece_samples // batch_size) + 1
        slots = max(1, min(2 * window + reading.read_ahead, share.steps + 1))
        limit = self._buffer_limit()
        if limit is not None:
            slot_bytes = BufferRing(
                self._data.fields,
                self._slot_samples(),
                0,
                pin=self._pins_rows,
                longest=self._longest(),
            ).slot_bytes
            least = min(slots, window + 2)
            if least * slot_bytes > limit:
                raise ValueError(
                    f"memory_limit={reading.memory_limit} is too small: a window of "
                    f"{piece_samples} samples, 2 batches and {reading.threads} threads "
                    f"need {least * slot_bytes + self._other_bytes()} bytes; raise "
                    "it, or lower window_bytes, batch_size or threads"
                    f"{' (page-locked batches take powers of two)' if self._pins_rows else ''}"
                )
            slots = min(slots, limit // slot_bytes)
        return slots

    def _slot_samples(self) -> int:
        """The most samples that a batch has: a batch_size may be beyond the whole dataset."""
        cut = self._cut
        return min(cut.batch_size, -(-self._data.num_samples // cut.world_size))

    def _longest(self) -> dict[str, int]:
        return {spec.name: self._data.longest(spec) for spec in self._data.fields if spec.ragged}

    def _buffer_limit(self) -> int | None:
        reading = self._options
        if reading.memory_limit is None:
            return None
        return reading.memory_limit - self._other_bytes()

    def _other_bytes(self) -> int:
        """What memory_limit counts beside the ring."""
        return self._staging_bytes() + self._decoded_bytes()

    def _staging_bytes(self) -> int:
        reading = self._options
        each = staging_bytes(self._data, direct=reading.direct, verify=reading.verify)
        return reading.threads * each

    def _part(self, rank: int) -> int:
        """The part of the stream that a rank reads in this epoch."""
        return self._seats.part(rank, self._epoch) if self._shuffle == "slabs" else rank

    def _whole_share(self, rank: int, part: int | None = None) -> Share:
        """The share of a rank in this epoch, when nothing of it was consumed."""
        cut = self._cut
        return share_of(
            self._data.num_samples,
            cut.batch_size,
            self._part(rank) if part is None else part,
            cut.world_size,
            drop_last=cut.drop_last,
            pad=cut.pad,
        )

    def _wanted_slabs(self) -> list[list[int]]:
        """By node, the slabs that its ranks read next, those of the first rank first."""
        order, windows = self._order(), self._data.windows
        crossing = frozenset() if windows is None else windows.crossing  # one sample, not a file
        wanted = []
        for ranks in self._seats.by_node():
            found: dict[int, None] = {}
            for rank in ranks:
                for start, count in self._resumed_share(rank)[1]:
                    found.update(dict.fromkeys(order.slabs(start, count).tolist()))
            wanted.append([slab for slab in found if slab not in crossing])
        return wanted

    def _resumed_share(self, rank: int) -> tuple[Share, tuple[tuple[int, int], ...]]:
        """The share of a rank in what is left of the epoch, and its positions in the stream."""
        if not self._cuts:
            share = self._whole_share(rank)
            return share, tuple(part_of([(0, self._data.num_samples)], share.start, share.count))
        left = remaining(self._data.num_samples, self._cuts)
        cut = self._cut
        share = share_of(
            sum(count for _, count in left),
            cut.batch_size,
            self._part(rank),
            cut.world_size,
            drop_last=cut.drop_last,
            pad=cut.pad,
            resumed=True,
        )
        return share, tuple(part_of(left, share.start, share.count))

    def _state(self, epoch: int, cuts: tuple[Cut, ...], ended: bool = False) -> EpochState:
        return EpochState(
            dataset=self._data.fingerprint(),
            num_samples=self._data.num_samples,
            shuffle=self._shuffle,
            seed=self._seed,
            block_samples=self._block_samples,
            window_samples=self._window_samples,
            epoch=epoch,
            cuts=cuts,
            ended=ended,
        )

    def _order(self) -> EpochOrder:
        """The order of the current epoch; of many samples it takes a while to make, so it stays."""
        key = (type(self._epoch), self._epoch)
        if self._made is None or self._made[0] != key:
            order = EpochOrder(
                self._data.slab_counts,
                shuffle=self._shuffle,
                seed=self._seed,
                epoch=self._epoch,
                block_samples=self._block_samples,
                window_samples=self._window_samples,
            )
            self._made = (key, order)
        return self._made[1]


def _open(
    path: str | os.PathLike[str],
    fields: Sequence[str] | None,
    group: str | None,
    comm: NodeGroup | None,
    read: ReadOptions,
) -> DataMap:
    disk = failure = None
    if read.disk_cache is not None and is_url(path):
        folder = os.path.abspath(os.path.expanduser(os.fsdecode(read.disk_cache)))
        disk = DiskOptions(folder, read.disk_cache_bytes)
        try:
            disk_cache_of(disk, required=True)
        except ValueError as error:
            failure = error
    access = RemoteAccess(read.retry_s, disk)
    if comm is None:
        if failure is not None:
            raise failure
        return open_map(path, fields, group, access)
    found = open_map_together(path, fields, group, comm, access)
    if is_url(path) and comm.allreduce(np.array([failure is not None], np.int64))[0]:
        raise failure or ValueError(
            "disk_cache: another rank cannot use its folder, and its message says why; mend it, or "
            "leave disk_cache out"
        )
    return found


def _add(total: Any, parts: Sequence[Any]) -> None:
    """Add the figures of `parts` to those of `total`, a dataclass; keep the first text."""
    for part in parts:
        for field in fields(total):
            before, more = getattr(total, field.name), getattr(part, field.name)
            setattr(total, field.name, before or more if isinstance(more, str) else before + more)


def _check_torch_types(specs: Sequence[FieldSpec]) -> None:
    import torch

    for spec in specs:
        try:
            torch.from_numpy(np.empty(0, spec.dtype))
        except TypeError:
            raise TypeError(
                f"field {spec.name!r} has dtype {spec.dtype}, torch has no such type; "
                "use as_numpy=True or name other fields"
            ) from None


def _check_policy(
    on_error: str, comm: NodeGroup | None, world_size: int, specs: Sequence[FieldSpec]
) -> None:
    if on_error not in get_args(ErrorAction):
        known = ", ".join(map(repr, get_args(ErrorAction)))
        raise ValueError(f"on_error={on_error!r}; use one of {known}")
    ragged = [spec.name for spec in specs if spec.ragged]
    if on_error == "substitute" and ragged:
        raise ValueError(
            f'on_error="substitute" cannot put one sample in the place of another of ragged field '
            f'{ragged[0]!r}; use "skip" or "raise", or name other fields'
        )
    if on_error == "skip" and world_size > 1 and comm is None:
        raise ValueError(
            'on_error="skip" on several ranks needs comm=, a hsgd.Comm of these ranks: they skip a '
            "batch together, or their numbers of steps would differ"
        )


def _check_reading(data: DataMap, shuffle: str, on_error: str, read: ReadOptions) -> None:
    if read.verify:
        _check_verifiable(data, shuffle)
    if read.pin_memory:
        _check_pinning()
    if read.mapped:
        check_mappable(data, shuffle, on_error)


def _check_decoders(decoders: Mapping[str, ImageDecoder], data: DataMap) -> None:
    specs = {spec.name: spec for spec in data.fields}
    for name, decoder in decoders.items():
        if not isinstance(decoder, ImageDecoder):
            raise TypeError(f"decode: {name!r} has {decoder!r}; use hsgd.io.images(size=...)")
        spec = specs.get(name)
        if spec is None:
            raise ValueError(f"decode: no field {name!r}; there are: {', '.join(specs)}")
        if not spec.ragged or spec.shape or spec.dtype != np.uint8:
            raise ValueError(
                f"decode: field {name!r} does not hold encoded samples (bytes of any length); make "
                "it with hsgd data convert --encoded"
            )


def _check_verifiable(data: DataMap, shuffle: str) -> None:
    if not data.checksum_rows:
        raise ValueError(
            f"verify=True: {data.path} has no checksums; convert it with hsgd data convert"
        )
    if shuffle == "full":
        raise ValueError(
            'verify=True with shuffle="full" would read a block for every sample; use "block", or '
            "check the files before with hsgd data verify"
        )


def _transfer(device: torch.device | str | int | None, as_numpy: bool) -> DeviceTransfer | None:
    if device is None:
        return None
    if as_numpy:
        raise ValueError("as_numpy=True: NumPy's arrays have no device; leave out device=")
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"device={device!r} needs torch; leave it out here")
    return DeviceTransfer(device)


def _check_pinning() -> None:
    """Page-locking is done by the CUDA driver."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return
    raise ValueError("pin_memory=True needs torch with a CUDA device; leave it out here")
