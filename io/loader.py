"""PartitionedLoader: the batches of one rank, read ahead by a thread.

Owns the loop from stream order (partition.py) to batches: what to read when, into which buffer, and
the life of the reading thread. Never talks to other ranks: rank and world_size are arguments, and
equal arguments everywhere are enough for equal steps and disjoint samples.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from hsgd.io.channel import Channel
from hsgd.io.datamap import DataMap, open_map
from hsgd.io.layout import FieldSpec
from hsgd.io.partition import EpochOrder, Piece, Share, share_of
from hsgd.io.reader import ReadStats, RowReader
from numpy.typing import NDArray

from hsgd.errors import DataError

__all__ = ["Batch", "PartitionedLoader"]

Batch = dict[str, Any]  # field name -> CPU torch tensor or NumPy array, samples along axis 0
_Arrays = dict[str, NDArray[Any]]


@dataclass
class _LoaderStats(ReadStats):
    """ReadStats plus what the training loop saw."""

    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0


class PartitionedLoader:
    """Iterable of the batches of one rank in one epoch; iterate again for the same epoch again.

    A batch is a dict: field name -> CPU torch tensor of shape (samples, ...), or NumPy array when
    torch is not installed or as_numpy=True. Tensors share the memory of the array that was read
    and belong to the caller.

    path: a slab folder (hsgd data convert) or an ordinary HDF5 file. batch_size: samples per rank.
    shuffle: "block" (blocks permuted globally, then samples within windows), "full" (one
    permutation of all samples; reads single rows) or "none" (the order of the files). seed, and the
    epoch of set_epoch(), alone determine the order; they must be equal on all ranks.
    drop_last, pad: see hsgd.io.partition.share_of. By default every sample comes once per epoch and
    ranks that would be one sample short repeat one; pad=False repeats nothing (for evaluation), the
    last batch may then be empty on some ranks. All ranks have the same number of steps.
    fields: names to read (all by default). read_ahead: batches kept ready. block_bytes,
    window_bytes: sizes of what is shuffled; a window is also the memory of the reading thread.
    timeout_s: longest wait for one batch.

    Local: sends no message. Picklable and safe to fork; an iteration that runs stays in its
    process. Raises DataError for files that are missing, truncated, foreign, unsealed or changed,
    ValueError for arguments that leave a rank without samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: str = "block",
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        fields: Sequence[str] | None = None,
        as_numpy: bool = False,
        read_ahead: int = 4,
        block_bytes: int = 4 << 20,
        window_bytes: int = 64 << 20,
        timeout_s: float = 600.0,
    ) -> None:
        if read_ahead < 1 or block_bytes < 1 or window_bytes < 1:
            raise ValueError(
                f"read_ahead={read_ahead}, block_bytes={block_bytes}, window_bytes={window_bytes}; "
                "use at least 1"
            )
        self._data = open_map(path, fields)
        self._rank = rank
        self._share = share_of(
            self._data.num_samples, batch_size, rank, world_size, drop_last=drop_last, pad=pad
        )
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0
        self._block_bytes, self._window_bytes = block_bytes, window_bytes
        self._read_ahead, self._timeout_s = read_ahead, timeout_s
        self._as_torch = not as_numpy and importlib.util.find_spec("torch") is not None
        self._stats = _LoaderStats()
        self._order()  # reports bad arguments now and not in the first epoch
        if self._as_torch:
            _check_torch_types(self._data.fields)

    def __len__(self) -> int:
        """Steps per epoch, the same on all ranks."""
        return self._share.steps

    def __iter__(self) -> Iterator[Batch]:
        return _Iteration(
            _Plan(self._data, self._share, self._order()),
            Channel(self._read_ahead),
            self._stats,
            as_torch=self._as_torch,
            timeout_s=self._timeout_s,
            source=f"{self._data.path} (rank {self._rank})",
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the iterations that start from now on; same value on all ranks."""
        before, self._epoch = self._epoch, epoch
        try:
            self._order()
        except (TypeError, ValueError):
            self._epoch = before
            raise

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
        """Name, shape and dtype of what a sample holds."""
        return self._data.fields

    def stats(self) -> dict[str, Any]:
        """What was read since construction, over all iterations in this process.

        bytes_read, preadv_calls, h5py_calls, read_s (seconds spent reading, in the thread),
        batches, samples, wait_s (seconds that the loop waited for batches), padding (samples per
        epoch that another rank has too), and bypass: field name -> "preadv", or "h5py: " and the
        reason.
        """
        bypass = {
            name: f"h5py: {refusal}" if refusal else "preadv"
            for name, refusal in self._data.refusals().items()
        }
        return {**asdict(self._stats), "padding": self._share.padding, "bypass": bypass}

    def _order(self) -> EpochOrder:
        """The order of the current epoch; blocks are whole HDF5 chunks where there are chunks."""
        row_bytes, chunk_rows = max(1, self._data.row_bytes), self._data.chunk_rows
        block_samples = -(-max(1, self._block_bytes // row_bytes) // chunk_rows) * chunk_rows
        return EpochOrder(
            self._data.slab_counts,
            shuffle=self._shuffle,
            seed=self._seed,
            epoch=self._epoch,
            block_samples=block_samples,
            window_samples=max(1, self._window_bytes // row_bytes),
        )


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


@dataclass(frozen=True)
class _Plan:
    """All that the reading thread needs to know; holds no handle."""

    data: DataMap
    share: Share
    order: EpochOrder

    def batches(self, stats: ReadStats) -> Iterator[_Arrays]:
        """Read the share of this rank in stream order, cut into batches of fresh arrays."""
        share = self.share
        with RowReader(self.data, stats) as reader:
            window = _Window(self.data.fields, reader)
            pieces = self.order.pieces(share.start, share.count)
            for step in range(share.steps):
                count = share.batch_count(step)
                batch = {s.name: np.empty((count, *s.shape), s.dtype) for s in self.data.fields}
                filled = 0
                while filled < count:
                    if not window.remaining:
                        window.load(next(pieces))
                    filled += window.move_rows(batch, filled, count)
                yield batch


class _Window:
    """The piece of the stream that is being handed out; its buffers are used again and again."""

    def __init__(self, specs: Sequence[FieldSpec], reader: RowReader) -> None:
        self._specs = specs
        self._reader = reader
        self._buffers: _Arrays = {}
        self._piece: Piece | None = None
        self._next = 0
        self.remaining = 0

    def load(self, piece: Piece) -> None:
        """Read a piece whose rows come in another order; one in file order is read in move_rows."""
        self._piece, self._next, self.remaining = piece, 0, piece.stream_rows
        if piece.take is None:
            return
        rows = piece.buffer_rows
        for spec in self._specs:
            buffer = self._buffers.get(spec.name)
            if buffer is None or len(buffer) < rows:
                self._buffers.pop(spec.name, None)
                buffer = self._buffers[spec.name] = np.empty((rows, *spec.shape), spec.dtype)
            done = 0
            for start, count in zip(piece.starts.tolist(), piece.counts.tolist(), strict=True):
                self._reader.read(spec.name, start, buffer[done : done + count])
                done += count

    def move_rows(self, batch: _Arrays, begin: int, end: int) -> int:
        """Fill batch rows [begin, end) as far as the window goes; the number of rows filled."""
        assert self._piece is not None
        count = min(end - begin, self.remaining)
        for spec in self._specs:
            out = batch[spec.name][begin : begin + count]
            if self._piece.take is None:
                self._reader.read(spec.name, int(self._piece.starts[0]) + self._next, out)
            else:
                chosen = self._piece.take[self._next : self._next + count]
                # mode="clip" writes straight into `out`; the default goes through a second buffer.
                np.take(self._buffers[spec.name], chosen, axis=0, out=out, mode="clip")
        self._next += count
        self.remaining -= count
        return count


class _Iteration(Iterator[Batch]):
    """One pass over an epoch: starts the reading thread, and ends it however the loop ends."""

    def __init__(
        self,
        plan: _Plan,
        channel: Channel[_Arrays],
        stats: _LoaderStats,
        *,
        as_torch: bool,
        timeout_s: float,
        source: str,
    ) -> None:
        self._channel, self._stats = channel, stats
        self._as_torch, self._timeout_s, self._source = as_torch, timeout_s, source
        self._pid = os.getpid()
        self._step = 0
        # A daemon, so that a forgotten iterator never keeps the interpreter from ending; the
        # finalizer, which also runs at exit, lets it end by itself.
        thread = threading.Thread(
            target=_read_ahead, args=(plan, channel, stats), name="hsgd-io", daemon=True
        )
        self._stop = weakref.finalize(self, _stop, channel, thread, self._pid, timeout_s)
        thread.start()

    def __next__(self) -> Batch:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"iteration over {self._source} belongs to process {self._pid}, this is "
                f"{os.getpid()}; call iter(loader) here"
            )
        began = time.perf_counter()
        try:
            arrays = self._channel.get(self._timeout_s)
        except TimeoutError:
            self._channel.close()  # without waiting for a thread that the file system holds
            self._stop.detach()
            raise DataError(
                f"{self._source}: batch {self._step} did not arrive within {self._timeout_s} s; "
                "check the file system or raise timeout_s"
            ) from None
        except BaseException:
            self._stop()
            raise
        if arrays is None:
            self._stop()
            raise StopIteration
        self._stats.wait_s += time.perf_counter() - began
        self._stats.batches += 1
        self._stats.samples += len(next(iter(arrays.values())))
        self._step += 1
        return _as_tensors(arrays) if self._as_torch else arrays

    def close(self) -> None:
        """End the reading thread; the iteration is over."""
        self._stop()


def _as_tensors(arrays: _Arrays) -> Batch:
    """The same memory as torch tensors."""
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _read_ahead(plan: _Plan, channel: Channel[_Arrays], stats: ReadStats) -> None:
    """Body of the reading thread."""
    try:
        for batch in plan.batches(stats):
            if not channel.put(batch):
                return
    except BaseException as error:  # whatever it is, the training loop gets it
        channel.finish(error)
    else:
        channel.finish()


def _stop(channel: Channel[_Arrays], thread: threading.Thread, pid: int, timeout_s: float) -> None:
    """Release the thread and wait for it; a forked child has none, and locks may be held."""
    if os.getpid() == pid:
        channel.close()
        if thread is not threading.current_thread():  # the garbage collector may run anywhere
            thread.join(timeout_s)
