"""How LitData, Grain, SPDL, TensorStore, pyfive and h5coro read, each as its documentation has it.

Where a package leaves the choice (threads, processes, rows per read), it is what was fastest here.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
import torch

from studies.io_files import BATCH, READ_BYTES, DataSet, part, zarr_specification

__all__ = [
    "grain_batches",
    "grain_records",
    "grain_slabs",
    "h5coro_rows",
    "h5coro_slabs",
    "litdata_stream",
    "mapped",
    "pyfive_fancy",
    "pyfive_slabs",
    "rows_per_read",
    "shuffled",
    "spdl_rows",
    "spdl_slabs",
    "tensorstore_rows",
    "tensorstore_slabs",
]

_THREADS = 2
_CACHE_BYTES = 2 << 30  # more than the samples that TensorStore reads singly
_DECODED = 256  # samples that LitData decodes at once
_AHEAD = 4

Batches = Iterator[Any]
_kept: dict[tuple[Any, ...], Any] = {}


def shuffled(count: int, rank: int, ranks: int, epoch: int) -> np.ndarray:
    """The rows of this rank, shuffled."""
    return np.random.default_rng(epoch).permutation(np.arange(*part(count, rank, ranks)))


def rows_per_read(data: DataSet) -> int:
    """Of peers that read many at once."""
    return max(BATCH, READ_BYTES // data.sample_bytes // BATCH * BATCH)


def mapped(data: DataSet) -> np.memmap[Any, Any]:
    """The rows of one.h5 as they lie in the file."""
    with h5py.File(data.folder / "one.h5", "r") as file:
        offset = file["data"].id.get_offset()
    shape = (data.count, data.sample_bytes)
    return np.memmap(data.folder / "one.h5", np.uint8, "r", offset, shape)


def pyfive_fancy(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Batches of sorted rows."""
    import pyfive

    order = shuffled(data.count, rank, ranks, epoch)
    with pyfive.File(data.folder / "one.h5") as file:
        dataset = file["data"]
        for low in range(0, len(order), BATCH):
            yield torch.from_numpy(dataset[np.sort(order[low : low + BATCH])])


def pyfive_slabs(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Views of the mapped file: pyfive copies nothing where rows lie one after another."""
    import pyfive

    start, stop = part(data.count, rank, ranks)
    rows = rows_per_read(data)
    with pyfive.File(data.folder / "one.h5") as file:
        dataset = file["data"]
        for low in range(start, stop, rows):
            yield from torch.from_numpy(dataset[low : min(low + rows, stop)]).split(BATCH)


def _h5coro_reader(data: DataSet) -> tuple[Callable[[int, int], np.ndarray], int]:
    """What reads a range of rows, and how many there are. The dataset has chunks: of a contiguous
    one h5coro 1.0.7 returns other rows than those asked for, unless they are the first.
    """
    from h5coro import filedriver, h5coro

    path = data.folder / "chunked.h5"
    file = h5coro.H5Coro(str(path), filedriver.FileDriver, errorChecking=False)
    with h5py.File(path, "r") as opened:
        count = len(opened["data"])

    def read(low: int, high: int) -> np.ndarray:
        wanted = {"dataset": "/data", "hyperslice": [(low, high), (0, data.sample_bytes)]}
        rows: np.ndarray = file.readDatasets([wanted], block=True)["/data"]
        return rows

    return read, count


def h5coro_rows(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Row by row: one read has one range of a dataset."""
    read, count = _h5coro_reader(data)
    order = shuffled(count, rank, ranks, epoch)
    for low in range(0, len(order), BATCH):
        rows = [read(row, row + 1) for row in order[low : low + BATCH].tolist()]
        yield torch.from_numpy(np.concatenate(rows))


def h5coro_slabs(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Ranges of 4 MiB."""
    read, count = _h5coro_reader(data)
    start, stop = part(count, rank, ranks)
    rows = rows_per_read(data)
    for low in range(start, stop, rows):
        yield from torch.from_numpy(read(low, min(low + rows, stop))).split(BATCH)


@contextlib.contextmanager
def _job_of(rank: int, ranks: int) -> Iterator[None]:
    """What tells LitData which rank it serves."""
    words = {"WORLD_SIZE": str(ranks), "GLOBAL_RANK": str(rank), "NNODES": "1"}
    before = {name: os.environ.get(name) for name in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def litdata_stream(workers: int, shuffle: bool) -> Callable[[DataSet, int, int, int], Batches]:
    """StreamingDataLoader over what optimize() made. Its workers start anew in each turn: those
    that stay would first finish the turn that was broken off.
    """

    def read(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
        import litdata

        folder = str(data.folder / "litdata")
        with _job_of(rank, ranks):
            stream = litdata.StreamingDataset(
                folder, shuffle=shuffle, seed=epoch, batch_decode=_DECODED
            )
            yield from litdata.StreamingDataLoader(
                stream, batch_size=BATCH, num_workers=workers,
                multiprocessing_context="fork" if workers else None,
            )  # fmt: skip

    return read


def spdl_rows(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Its threads copy shuffled rows out of the mapped file, some batches at a time."""
    order = shuffled(data.count, rank, ranks, epoch)
    file = mapped(data)
    rows = rows_per_read(data)
    parts = [order[low : low + rows] for low in range(0, len(order), rows)]
    return _spdl(parts, lambda part: torch.from_numpy(file[part]), "completion")


def spdl_slabs(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Its threads read ranges of 4 MiB around HDF5."""
    start, stop = part(data.count, rank, ranks)
    offset = mapped(data).offset
    rows = rows_per_read(data)
    descriptor = os.open(data.folder / "one.h5", os.O_RDONLY)

    def read(low: int) -> Any:
        found = torch.empty((min(low + rows, stop) - low, data.sample_bytes), dtype=torch.uint8)
        os.preadv(descriptor, [found.numpy()], offset + low * data.sample_bytes)
        return found

    try:
        yield from _spdl(range(start, stop, rows), read, "input")
    finally:
        os.close(descriptor)


def _spdl(source: Any, read: Callable[[Any], Any], output_order: str) -> Batches:
    from spdl.pipeline import PipelineBuilder

    stages = PipelineBuilder().add_source(source)
    stages = stages.pipe(read, concurrency=_THREADS, output_order=output_order)
    pipeline = stages.add_sink(_AHEAD).build(num_threads=_THREADS)
    with pipeline.auto_stop():
        for found in pipeline.get_iterator(timeout=60):
            yield from found.split(BATCH)


def grain_batches(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Shuffled indices in batches, then one copy out of the mapped file for each batch; without
    threads, as Grain advises for what lies in memory.
    """
    import grain

    file = mapped(data)
    rows = grain.MapDataset.range(*part(data.count, rank, ranks)).seed(epoch).shuffle()
    batches = rows.batch(BATCH).map(lambda indices: file[indices])
    for batch in batches.to_iter_dataset(grain.ReadOptions(0, 0)):
        yield torch.from_numpy(batch)


def grain_records(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Its own format, ArrayRecord, read by its threads."""
    import grain

    source = grain.sources.ArrayRecordDataSource(str(data.folder / "records"))
    own = slice(*part(len(source), rank, ranks))
    rows = grain.MapDataset.source(source)[own].seed(epoch).shuffle()
    batches = rows.map(lambda record: np.frombuffer(record, np.uint8)).batch(BATCH)
    for batch in batches.to_iter_dataset(grain.ReadOptions(_THREADS, 4 * _AHEAD)):
        yield torch.from_numpy(batch)


def grain_slabs(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Its threads copy ranges of 4 MiB out of the mapped file."""
    import grain

    start, stop = part(data.count, rank, ranks)
    file = mapped(data)
    rows = rows_per_read(data)
    lows = grain.MapDataset.range(start, stop, rows)
    slabs = lows.map(lambda low: np.array(file[low : min(low + rows, stop)]))
    for slab in slabs.to_iter_dataset(grain.ReadOptions(_THREADS, _AHEAD)):
        yield from torch.from_numpy(slab).split(BATCH)


def _zarr(data: DataSet, kind: str, context: dict[str, Any]) -> Any:
    import tensorstore

    key = (kind, data.folder)
    if key not in _kept:
        _kept[key] = tensorstore.open(
            zarr_specification(data.folder / kind), read=True, context=tensorstore.Context(context)
        ).result()
    return _kept[key]


def _in_turn(futures: Iterator[Any], ahead: int) -> Batches:
    """What the futures bring, with `ahead` of them on their way."""
    begun: deque[Any] = deque()
    for future in futures:
        begun.append(future)
        if len(begun) > ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def tensorstore_rows(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Shuffled rows of chunks of 256 KiB, which stay in its cache."""
    array = _zarr(data, "zarr-rows", {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    order = shuffled(array.shape[0], rank, ranks, epoch)
    batches = (order[low : low + BATCH] for low in range(0, len(order), BATCH))
    for found in _in_turn((array[rows].read() for rows in batches), _AHEAD):
        yield torch.from_numpy(found)


def tensorstore_slabs(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Whole chunks of 4 MiB, by mapping their files."""
    array = _zarr(data, "zarr", {"file_io_mode": {"mode": "memmap"}})
    start, stop = part(data.count, rank, ranks)
    rows = array.chunk_layout.read_chunk.shape[0]
    ranges = ((low, min(low - low % rows + rows, stop)) for low in _chunk_starts(start, stop, rows))
    for found in _in_turn((array[low:high].read() for low, high in ranges), _AHEAD // 2):
        yield from torch.from_numpy(found).split(BATCH)


def _chunk_starts(start: int, stop: int, rows: int) -> Iterator[int]:
    yield start
    yield from range(start - start % rows + rows, stop, rows)
