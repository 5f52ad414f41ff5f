"""PartitionedLoader: the batches of one rank, read ahead by threads.

It talks to no other rank without comm: rank and world_size are arguments, and equal arguments
everywhere are enough for equal steps and disjoint samples.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.base.closing import Closing

from .argument_checks import (
    check_decoders,
    check_packing,
    check_policy,
    check_reading,
    check_torch_types,
)
from .batches.batch_source import BatchSource
from .batches.decode_stage import DecodeStage
from .batches.device_transfer import DeviceTransfer
from .batches.error_policy import ErrorPolicy
from .batches.filler import Filler
from .batches.image_decoder import ImageDecoder
from .batches.iteration import Batch, IterationSettings
from .batches.mapped_batches import MappedBatches
from .batches.scheduler import ReadPlan
from .cache.node_cache import CacheStats, NodeCache
from .cache.seats import seats_of
from .epoch_state import EpochState, OrderSettings
from .format.data_map import DataMap
from .format.fields import left_out_line
from .format.open_map import open_map
from .format.packed_map import packed_map
from .format.packing_of import packing_warnings
from .format.slab_folder import FieldSpec
from .format.stored_rows import unwritten_lines
from .iterations import Iterations
from .memory_plan import MemoryPlan
from .options import CacheOptions, ErrorAction, ReadOptions, Shuffle
from .order.epoch_order import Cut, Share
from .rank_group import RankGroup
from .rank_here import check_still_alone, rank_here
from .reading.open_map_together import open_map_together
from .remote.block_files import DiskOptions
from .remote.disk_cache import disk_cache_of
from .remote.object_reader import RemoteAccess
from .remote.urls import is_url

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "PartitionedLoader"]

_PACKED = "its values are delivered as they are stored; apply these in transform="


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
        comm: RankGroup | None = None,
        local_size: int | None = None,
        read: ReadOptions | None = None,
        cache: CacheOptions | None = None,
    ) -> None:
        read, to_device = read or ReadOptions(), _transfer(device, as_numpy)
        self._options, self._comm, self._decoders = read, comm, dict(decode or {})
        self._data = data = _open(path, fields, group, comm, read)
        if pack is not None:
            check_packing(pack, batch_size, on_error, read)
            self._data = data = packed_map(data, pack, chosen=fields is not None)
        self._here = here = rank_here(rank, world_size, comm)
        self._settings = IterationSettings(
            as_torch=not as_numpy and importlib.util.find_spec("torch") is not None,
            timeout_s=read.timeout_s,
            source=f"{data.path} (rank {here.rank})",
            transform=transform,
            transform_threads=read.transform_threads,
            to_device=to_device,
        )
        self._on_error, self._iterations = on_error, Iterations()
        check_reading(data, shuffle, on_error, read)
        if read.mapped and (pack is not None or self._decoders or cache is not None):
            raise ValueError("mapped=True: pack=, decode= and cache= make copies; leave them out")
        self._order = _order_settings(data, shuffle, seed, read)
        cut = Cut(here.world_size, batch_size, drop_last, pad, 0)
        self._state = EpochState(data, self._order, cut, here.rank)
        self._agree(cut)
        in_turn = shuffle == "slabs" or cache is not None
        seats = seats_of(here.world_size, local_size, comm if in_turn else None)
        self._state.seats, self._nodes = seats, seats.by_node()
        self._memory = MemoryPlan(
            data,
            read,
            self._decoders,
            min(batch_size, -(-data.num_samples // here.world_size)),
            on_cuda=to_device is not None and to_device.is_cuda,
        )
        self._slots(self._state.share(here.rank))
        self._check_delivery()
        self._cache = None if cache is None else self._open_cache(cache)

    def _agree(self, cut: Cut) -> None:
        """Compare with the other ranks what decides which samples each reads; collective with comm,
        else nothing. Raises SignatureMismatch.
        """
        if self._comm is None:
            return
        from hsgd.comm.agree import agree

        own: dict[str, object] = asdict(self._order) | asdict(cut) | {"on_error": self._on_error}
        comm: Any = self._comm
        agree(comm, "PartitionedLoader", lambda: own)

    def _check_delivery(self) -> None:
        """Refuse fields that cannot become what was asked for, and name what is no field."""
        data = self._data
        check_decoders(self._decoders, data)
        kept = [spec for spec in data.fields if spec.name not in self._decoders]
        check_policy(self._on_error, self._comm, self._here.world_size, kept)
        line = left_out_line(data.path, "no fields, so", data.left_out)
        lines = [f"{line}; name the fields to use with fields="] if line else []
        lines += unwritten_lines(
            data.unwritten().values(),
            accepted=self._options.fill_unwritten,
            option="ReadOptions(fill_unwritten=True)",
        )
        lines += packing_warnings(data.path, data.packing, _PACKED)
        for line in lines:
            if self._here.rank == 0:
                warnings.warn(line, stacklevel=3)
        if self._settings.as_torch:
            check_torch_types(data.fields)

    def _open_cache(self, cache: CacheOptions) -> NodeCache:
        if self._comm is None:
            raise ValueError("cache= needs comm=, a hsgd.Comm of these ranks")
        return NodeCache(
            self._data,
            self._comm,
            cache.node_bytes,
            nodes=self._nodes,
            verify=self._options.verify,
            exchange=cache.exchange,
        )

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks and in all epochs."""
        return self._state.share(self._here.rank).steps

    @property
    def steps_left(self) -> int:
        """Steps of the next iteration: fewer than len() in the rest of an epoch that a state left;
        the same on all ranks.
        """
        return len(self) if self._state.is_over else self._state.left(self._here.rank)[0].steps

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or the one that was chosen since."""
        return self._state.epoch

    def __repr__(self) -> str:
        here = self._here
        return (
            f"PartitionedLoader({self._data.path!r}, {self._data.num_samples} samples, rank "
            f"{here.rank} of {here.world_size} ({here.found}), {len(self)} batches of "
            f"{self._state.cut.batch_size}, epoch {self.epoch})"
        )

    def __iter__(self) -> Iterator[Any]:
        check_still_alone(self._here)
        state, options, rank = self._state, self._options, self._here.rank
        state.begin_iteration()
        share, ranges = state.left(rank)
        if os.getpid() != self._iterations.pid:
            self._iterations = Iterations()
        if self._cache is not None:
            wanted = state.wanted_slabs(self._nodes)
            self._cache.prepare(wanted, busy=self._iterations.any_run())
        plan = ReadPlan(
            self._settings.source,
            self._data,
            share,
            state.order(),
            ranges,
            self._order.block_samples,
            options.direct,
            options.verify,
            self._cache,
            numbered=bool(self._decoders),
        )
        source: BatchSource
        ring = None
        if options.mapped:
            source = MappedBatches(plan)
        else:
            decoded = self._memory.new_decoded_ring() if self._decoders else None
            ring = self._iterations.take_ring(self._slots(share), self._memory.new_ring)
            source = filler = Filler(plan, ring, options.threads)
            if decoded is not None:
                threads = options.decode_threads or len(os.sched_getaffinity(0))
                seed = self._order.seed
                source = DecodeStage(filler, decoded, self._decoders, seed, self.epoch, threads)
        policy = ErrorPolicy(self._on_error, self._comm, rank)
        iteration = self._iterations.begin(source, ring, self._settings, policy)
        state.follow(iteration.progress)
        return iteration

    def _slots(self, share: Share) -> int:
        return self._memory.slots(share, self._state.order().piece_samples)

    def close(self) -> None:
        """End the iterations that run, and give back the memory of batches that nobody has; local.

        The loader can be iterated again.
        """
        self._iterations.close()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; same value on all ranks.

        A state that was loaded stays in force when `epoch` is the one that it was saved in.
        An iteration that has given no batch yet begins anew in that epoch.
        """
        if self._state.set_epoch(epoch, self._iterations.runs):
            self._iterations.supersede(self.__iter__)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is: what the latest iteration has handed out is consumed.

        A few numbers, the same on all ranks after the same step; batches that were only read ahead
        do not count. Local.
        """
        return self._state.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where state_dict() was called, perhaps on another number of ranks; on every rank.

        The next iteration gives the samples of that epoch which no rank had consumed, each exactly
        once; with as many ranks and the same batch_size, in the same order (but for padding). Where
        the loop had seen the end of that epoch the next iteration is of the next epoch, unless
        set_epoch() names that one again: then nothing is left.
        Raises ValueError for the state of another dataset, or of another order (seed, shuffle,
        block and window).
        """
        self._state.load(state)
        # Trainers call iter() before they choose the epoch or load a state.
        self._iterations.supersede(self.__iter__)

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
        return self._state.share(self._here.rank).count

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        """Name, shape and dtype of what a sample holds, in a batch."""
        return tuple(
            self._decoders[spec.name].spec(spec.name) if spec.name in self._decoders else spec
            for spec in self._data.fields
        )

    def metrics(self) -> dict[str, Any]:
        """Return what was read since construction, over all iterations in this process.

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
        return {
            **self._iterations.figures(),
            **asdict(cached),
            "padding": self._state.share(self._here.rank).padding,
            "tail": 0 if self._data.windows is None else self._data.windows.tail,
            "bypass": bypass,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process; statistics begin anew."""
        return {**vars(self), "_iterations": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._iterations = Iterations()


def _order_settings(data: DataMap, shuffle: str, seed: int, read: ReadOptions) -> OrderSettings:
    # Blocks are whole HDF5 chunks where there are chunks.
    row_bytes, chunk_rows = max(1, data.row_bytes), data.chunk_rows
    block_samples = -(-max(1, read.block_bytes // row_bytes) // chunk_rows) * chunk_rows
    return OrderSettings(shuffle, seed, block_samples, max(1, read.window_bytes // row_bytes))


def _open(
    path: str | os.PathLike[str],
    fields: Sequence[str] | None,
    group: str | None,
    comm: RankGroup | None,
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


def _transfer(device: torch.device | str | int | None, as_numpy: bool) -> DeviceTransfer | None:
    if device is None:
        return None
    if as_numpy:
        raise ValueError("as_numpy=True: NumPy's arrays have no device; leave out device=")
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"device={device!r} needs torch; leave it out here")
    return DeviceTransfer(device)
