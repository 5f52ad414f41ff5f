"""PartitionedLoader: the batches of one rank, read ahead by threads.

Without comm it sends no messages: equal arguments on all ranks, except for rank, are enough for
equal numbers of steps and disjoint samples.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hsgd.base.closing import Closing

from .argument_checks import (
    check_decoders,
    check_packing,
    check_policy,
    check_reading,
    check_torch_types,
    decoders_of,
)
from .batches.batch_source import BatchSource
from .batches.cf_decode import CfDecode
from .batches.decode_stage import DecodeStage
from .batches.dense_rows import DenseDecode, DenseRows
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
from .format.packing_of import packing_warnings
from .format.slab_folder import FieldSpec
from .format.stored_rows import unwritten_lines
from .iterations import Iterations
from .layouts.files_of import Place
from .layouts.open_map import open_map
from .layouts.packed_map import packed_map
from .layouts.single_map import Layout
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

_PACKED = (
    'its values are delivered as they are stored; apply these with decode="cf", or in transform='
)


class PartitionedLoader(Closing):
    """Iterable over the batches of one rank in one epoch; iterate again for the next epoch.

    A batch is a dict: field name -> CPU torch tensor of shape (samples, ...), or NumPy array if
    torch is not installed or as_numpy=True. A field whose samples differ in length is a
    hsgd.io.Ragged of two of them. Tensors are views of the memory into which the file was read, and
    belong to the caller: that memory is reused only after the last tensor is gone.

    The order depends only on seed and epoch, which must be equal on all ranks, and so must
    block_bytes and window_bytes of `read`. The first iteration is epoch 0. An iteration after one
    that gave a batch, or ended, is the next epoch, unless set_epoch() was called. So all ranks must
    iterate equally often; they have the same number of steps.

    Local without `comm`. Picklable (without comm) and safe to fork; a running iteration stays in
    its process. `with` ends running iterations.

    Args:
        path: a slab folder (hsgd data convert), an ordinary HDF5 file, or the URL of one (https,
            http or s3); or several files: a list, a pattern such as "parts/*.h5", or a folder.
        batch_size: samples per rank.
        rank: with world_size; if both are None they come from comm, from torch.distributed, or from
            torchrun, hsgd run, horovodrun, mpirun or srun; repr() shows the source.
        shuffle: "block" permutes blocks globally, then samples within windows. "slabs" does the
            same among a few slabs at a time, which ranks take in turn, epoch by epoch, first inside
            their node. "full" is one permutation of all samples and reads single rows. "none" is
            the order of the files. As for torch's DataLoader, True is "block" and False "none".
        drop_last: leave out incomplete batches, see hsgd.io.share_of. By default every sample comes
            once per epoch.
        pad: ranks that would be one sample short repeat one. False repeats nothing (for
            evaluation); the last batch may then be empty on some ranks.
        fields: names to read; all by default.
        group: of an HDF5 file, such as "train": it replaces the whole file, and names are those
            inside it.
        layout: what a sample is, as for open_map(): "rows" of datasets, "groups" of a file,
            "files", or "auto", which warns of its choice unless that is rows.
        pack: a sample is a window of this many elements of the ragged fields (those of `fields`):
            window n has the elements [n * pack, (n + 1) * pack) of all samples in the order of the
            files. Less than `pack` elements at the end are left out. A batch then has "cu_seqlens",
            too: int32, the starts of segments in the batch of samples * pack elements, and its end;
            a segment is the part of a document inside one window.
        decode: by field, how threads turn encoded samples into arrays: see hsgd.io.images. A sample
            that cannot be decoded counts as one that cannot be read. By sparse matrix: see
            hsgd.io.dense. "cf": apply scale_factor, add_offset and _Unsigned of netCDF, and make
            missing values NaN; results are floats.
        transform: called with each batch; its results are delivered, in order.
        device: where tensors are delivered, such as "cuda" (torch's current device) or "cuda:1".
            They are copied from page-locked memory by a CUDA stream of the loader, while the stream
            that is current at next() still computes; later work of that stream comes after the
            copy. Ragged fields, mapped batches and results of `transform` are in ordinary memory:
            the loop waits for their copy. Other objects with a method to() are copied by the
            current stream.
        on_error: for batches with samples that cannot be read: "raise" an error, "skip" the batch,
            or "substitute" the samples by others of the batch. "skip" on several ranks needs comm.
        comm: a hsgd.Comm of these ranks. Each batch then costs one small allreduce, and all ranks
            raise or skip together, so no rank waits for one that failed. Only rank 0 examines the
            files, whose path must be the same on all ranks; making the loader is collective.
        local_size: ranks of each node, for "slabs" without comm; ranks are numbered node by node.
        read: threads, memory, and the sizes that are shuffled.
        cache: slabs in the memory of the node; needs comm. Making the loader and iter() are then
            collective.

    Raises:
        DataError: files are missing, truncated, foreign, unsealed or changed.
        ValueError: the arguments leave a rank without samples, or do not fit together.
    """

    def __init__(
        self,
        path: Place | Sequence[Place],
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: Shuffle | bool = "block",
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        fields: Sequence[str] | None = None,
        group: str | None = None,
        layout: Layout = "auto",
        pack: int | None = None,
        decode: Mapping[str, ImageDecoder | DenseRows] | Literal["cf"] | None = None,
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
        order: Shuffle = ("block" if shuffle else "none") if isinstance(shuffle, bool) else shuffle
        self._options, self._comm = read, comm
        self._decoders, matrices = decoders_of(decode)
        self._data = data = _open(path, fields, group, comm, read, layout)
        if pack is not None:
            check_packing(pack, batch_size, on_error, read)
            self._data = data = packed_map(data, pack, chosen=fields is not None)
        self._here = here = rank_here(rank, world_size, comm)
        self._settings = IterationSettings(
            as_torch=not as_numpy and importlib.util.find_spec("torch") is not None,
            timeout_s=read.timeout_s,
            source=f"{data.path} (rank {here.rank})",
            transform=_value_decode(data, matrices, transform, is_cf=decode == "cf"),
            transform_threads=read.transform_threads,
            to_device=to_device,
        )
        self._on_error, self._iterations = on_error, Iterations()
        makes_copies = pack is not None or bool(self._decoders) or cache is not None
        check_reading(data, order, on_error, read, makes_copies)
        self._order = _order_settings(data, order, seed, read)
        cut = Cut(here.world_size, batch_size, drop_last, pad, 0)
        self._state = EpochState(data, self._order, cut, here.rank)
        self._agree(cut)
        in_turn = order == "slabs" or cache is not None
        seats = seats_of(here.world_size, local_size, comm if in_turn else None)
        self._state.seats, self._nodes = seats, seats.by_node()
        largest = min(batch_size, -(-data.num_samples // here.world_size))
        on_cuda = to_device is not None and to_device.is_cuda
        self._memory = MemoryPlan(data, read, self._decoders, largest, on_cuda=on_cuda)
        self._slots(self._state.share(here.rank))
        self._check_delivery(is_guess=layout == "auto" and fields is None)
        self._cache = None if cache is None else self._open_cache(cache)

    def _agree(self, cut: Cut) -> None:
        """Compare the settings of the order on all ranks; collective with comm, else nothing.

        Raises SignatureMismatch if they differ.
        """
        if self._comm is None:
            return
        from hsgd.comm.agree import agree

        own: dict[str, object] = asdict(self._order) | asdict(cut) | {"on_error": self._on_error}
        comm: Any = self._comm
        agree(comm, "PartitionedLoader", lambda: own)

    def _check_delivery(self, *, is_guess: bool) -> None:
        """Raise an error for fields that cannot be delivered, and warn of what is left out."""
        data = self._data
        check_decoders(self._decoders, data)
        kept = [spec for spec in data.fields if spec.name not in self._decoders]
        check_policy(self._on_error, self._comm, self._here.world_size, kept)
        line = left_out_line(data.path, "no fields, so", data.left_out)
        lines = [f"{line}; name the fields to use with fields="] if line else []
        if data.note and is_guess:
            lines.append(f"{data.path}: {data.note}; layout= or fields= confirms it")
        lines += unwritten_lines(
            data.unwritten().values(),
            accepted=self._options.fill_unwritten,
            option="ReadOptions(fill_unwritten=True)",
        )
        if not isinstance(self._settings.transform, CfDecode):
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
        """Return the steps of a whole epoch, the same on all ranks and in all epochs."""
        return self._state.share(self._here.rank).steps

    @property
    def steps_left(self) -> int:
        """Steps of the next iteration, equal on all ranks; fewer than len() for a loaded state."""
        return len(self) if self._state.is_over else self._state.left(self._here.rank)[0].steps

    @property
    def epoch(self) -> int:
        """Epoch of the latest iteration, or the one set since."""
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
        """End running iterations, and free unused memory; local. The loader stays usable."""
        self._iterations.close()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; same value on all ranks.

        A loaded state stays in force if `epoch` is the epoch in which it was saved. An iteration
        that has given no batch yet starts again in that epoch.
        """
        if self._state.set_epoch(epoch, self._iterations.runs):
            self._iterations.supersede(self.__iter__)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop: what the latest iteration has delivered counts; local.

        The state is a few numbers, the same on all ranks after the same step. Batches that were
        only read ahead do not count.
        """
        return self._state.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where state_dict() was called, also on another number of ranks; on every rank.

        The next iteration gives the samples of that epoch which no rank had consumed, each exactly
        once; with as many ranks and the same batch_size in the same order (except for padding). If
        the loop had seen the end of that epoch, the next iteration is the next epoch, unless
        set_epoch() names that epoch again: then nothing is left. Raises ValueError for the state of
        another dataset or order (seed, shuffle, block and window).
        """
        self._state.load(state)
        # Trainers call iter() before they set the epoch or load a state.
        self._iterations.supersede(self.__iter__)

    @property
    def sampler(self) -> PartitionedLoader:
        """The loader itself: trainers call sampler.set_epoch(epoch) before each epoch."""
        return self

    @property
    def num_samples(self) -> int:
        """Samples of the whole dataset, over all ranks."""
        return self._data.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """Samples of this rank per epoch, padding included."""
        return self._state.share(self._here.rank).count

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        """Name, shape and dtype of each field of a sample, as delivered in a batch."""
        specs, decode = self._data.fields, self._settings.transform
        if isinstance(decode, CfDecode | DenseDecode):
            specs = decode.fields(specs)
        decoders = self._decoders
        return tuple(
            decoders[spec.name].spec(spec.name) if spec.name in decoders else spec for spec in specs
        )

    def metrics(self) -> dict[str, Any]:
        """Return counters since construction, over all iterations in this process; local.

        Reading: bytes_read, preadv_calls, h5py_calls, read_s (seconds, summed over threads),
        requests and retries (to servers), fetched_bytes (from servers), disk_bytes (from the cache
        on disk instead), disk_damaged (blocks there), direct_refusal (why direct=True does not
        hold, or ""), and bypass: field name -> "preadv", "range requests" behind a URL, either with
        " + gzip" and the like for chunks, "mmap", or "h5py: " and the reason.

        Batches: batches, samples, wait_s (seconds that the loop waited for batches), skipped
        (batches), substituted (samples), padding (samples per epoch that another rank has, too),
        tail (elements of a field after the last window, with pack), buffer_bytes (memory of the
        batches as read), decoded_bytes (memory of decoded batches).

        The node's cache: cached_slabs (now in memory), cache_bytes (that this rank read for it),
        exchanged_bytes (that this rank got for it from other nodes).
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
        """Leave out what belongs to this process; counters start again."""
        return {**vars(self), "_iterations": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._iterations = Iterations()


def _order_settings(data: DataMap, shuffle: str, seed: int, read: ReadOptions) -> OrderSettings:
    # Blocks consist of whole HDF5 chunks, if there are chunks.
    row_bytes, chunk_rows = max(1, data.row_bytes), data.chunk_rows
    block_samples = -(-max(1, read.block_bytes // row_bytes) // chunk_rows) * chunk_rows
    return OrderSettings(shuffle, seed, block_samples, max(1, read.window_bytes // row_bytes))


def _open(
    path: Place | Sequence[Place],
    fields: Sequence[str] | None,
    group: str | None,
    comm: RankGroup | None,
    read: ReadOptions,
    layout: Layout = "auto",
) -> DataMap:
    disk = failure = None
    is_remote = any(map(is_url, [path] if isinstance(path, str | os.PathLike) else path))
    if read.disk_cache is not None and is_remote:
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
        return open_map(path, fields, group, access, layout)
    found = open_map_together(path, fields, group, comm, access, layout)
    if is_remote and comm.allreduce(np.array([failure is not None], np.int64))[0]:
        raise failure or ValueError(
            "disk_cache: another rank cannot use its folder, and its message says why; mend it, or "
            "leave disk_cache out"
        )
    return found


def _value_decode(
    data: DataMap,
    matrices: Mapping[str, DenseRows],
    transform: Callable[[Batch], Any] | None,
    *,
    is_cf: bool,
) -> Callable[[Batch], Any] | None:
    """Return the transform that decodes values, and then calls `transform`."""
    if is_cf:
        return CfDecode(data, transform)
    return DenseDecode(data, matrices, transform) if matrices else transform


def _transfer(device: torch.device | str | int | None, as_numpy: bool) -> DeviceTransfer | None:
    if device is None:
        return None
    if as_numpy:
        raise ValueError("as_numpy=True: NumPy's arrays have no device; leave out device=")
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"device={device!r} needs torch; leave it out here")
    return DeviceTransfer(device)
