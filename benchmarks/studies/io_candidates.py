"""Who reads: hsgd.io, its peers, and the limits; each a generator of batches as torch tensors.

Those with loaders of their own are in io_peers.py. Every one delivers uint8 tensors (samples,
sample_bytes) of the samples of one rank; the limits deliver bytes without samples.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
import torch
from hsgd.io import PartitionedLoader, ReadOptions
from torch.utils.data import DataLoader, Dataset, Subset

from studies import io_peers
from studies.io_files import BATCH, READ_BYTES, DataSet, part
from studies.io_packages import Candidate, import_streaming

__all__ = ["CANDIDATES", "fio_rate"]

_RING_BYTES = 128 << 20

Batches = Iterator[Any]


_loaders: dict[tuple[Any, ...], PartitionedLoader] = {}


def _hsgd(
    shuffle: str, kind: str = "slabs", how: ReadOptions | None = None
) -> Callable[[DataSet, int, int, int], Batches]:
    def read(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
        key = (data.folder, kind, shuffle, rank, ranks, how)
        if key not in _loaders:
            batch = min(BATCH, max(1, data.count // ranks))
            path = data.folder / kind
            _loaders[key] = PartitionedLoader(
                path, batch, rank, ranks, shuffle, read=how or ReadOptions()
            )
        _loaders[key].set_epoch(epoch)
        return (batch["data"] for batch in _loaders[key])

    return read


def _h5py(
    take: Callable[[h5py.Dataset, Any], np.ndarray], kind: str = "one.h5"
) -> Callable[[DataSet, int, int, int], Batches]:
    def read(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
        order = io_peers.shuffled(data.count, rank, ranks, epoch)
        with _opened(data, kind) as file:
            dataset = file["data"]
            for low in range(0, len(order), BATCH):
                yield torch.from_numpy(take(dataset, order[low : low + BATCH]))

    return read


def _one_by_one(dataset: h5py.Dataset, rows: Any) -> np.ndarray:
    return np.stack([dataset[row] for row in rows.tolist()])


def _sorted_selection(dataset: h5py.Dataset, rows: Any) -> np.ndarray:
    selected: np.ndarray = dataset[np.sort(rows)]
    return selected


def _memmap(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """Random batches of rows as raw bytes, copied out of the page cache by the loop itself."""
    order = io_peers.shuffled(data.count, rank, ranks, epoch)
    rows = io_peers.mapped(data)
    for low in range(0, len(order), BATCH):
        yield torch.from_numpy(rows[order[low : low + BATCH]])


def _opened(data: DataSet, kind: str) -> h5py.File:
    if kind == "packed.h5":
        import hdf5plugin  # noqa: F401, its import tells HDF5 the filter
    return h5py.File(data.folder / kind, "r")


def _h5py_slabs(kind: str) -> Callable[[DataSet, int, int, int], Batches]:
    def read(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
        start, stop = part(data.count, rank, ranks)
        rows = io_peers.rows_per_read(data)
        with _opened(data, kind) as file:
            dataset = file["data"]
            for low in range(start, stop, rows):
                slab = torch.from_numpy(dataset[low : min(low + rows, stop)])
                yield from slab.split(BATCH)

    return read


def _data_loader(workers: int) -> Callable[[DataSet, int, int, int], Batches]:
    def read(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
        class Rows(Dataset[Any]):
            rows: h5py.Dataset | None = None

            def __len__(self) -> int:
                return data.count

            def __getitem__(self, row: int) -> Any:
                if self.rows is None:  # each worker opens the file for itself
                    self.rows = h5py.File(data.folder / "one.h5", "r")["data"]
                return torch.from_numpy(self.rows[row])

        own = Subset(Rows(), range(*part(data.count, rank, ranks)))
        draw = torch.Generator().manual_seed(epoch)
        method = "fork" if workers else None
        yield from DataLoader(
            own, BATCH, shuffle=True, num_workers=workers, generator=draw,
            multiprocessing_context=method,
        )  # fmt: skip

    return read


def _webdataset(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    import webdataset

    shards = [str(path) for path in data.files("tar")]
    own = shards[rank::ranks] or shards[:1]
    stream = webdataset.WebDataset(own, shardshuffle=False, empty_check=False).shuffle(1000)
    yield from _in_batches(np.frombuffer(sample["bin"], np.uint8) for sample in stream)


def _streaming(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    stream = import_streaming().StreamingDataset(
        local=str(data.folder / "mds"), shuffle=True, batch_size=BATCH
    )
    yield from _in_batches(np.frombuffer(sample["x"], np.uint8) for sample in stream)


def _in_batches(rows: Iterator[np.ndarray]) -> Batches:
    """Whole batches of single rows."""
    while len(batch := list(itertools.islice(rows, BATCH))) == BATCH:
        yield torch.from_numpy(np.stack(batch))


_rings: dict[str, mmap.mmap] = {}


def _preadv(data: DataSet, rank: int, ranks: int, epoch: int) -> Batches:
    """The slabs of this rank into a ring as large as that of hsgd.io, without samples."""
    if "ring" not in _rings:
        _rings["ring"] = mmap.mmap(-1, _RING_BYTES)
        _rings["ring"].madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(_rings["ring"], np.uint8)[:] = 0
    ring = memoryview(_rings["ring"])
    tensor = torch.from_numpy(np.frombuffer(_rings["ring"], np.uint8))
    place = 0
    for path in [p for p in data.files("slabs") if p.name.startswith("slab-")][rank::ranks]:
        descriptor = os.open(path, os.O_RDONLY)
        offset = 0
        while got := os.preadv(descriptor, [ring[place : place + READ_BYTES]], offset):
            rows = got // data.sample_bytes
            if rows:
                filled = tensor[place : place + rows * data.sample_bytes]
                yield filled.view(rows, data.sample_bytes)
            offset += got
            place = (place + READ_BYTES) % _RING_BYTES
        os.close(descriptor)


def fio_rate(data: DataSet) -> float | None:
    """Bytes per second of fio over the slabs: direct, sequential, 4 MiB, iodepth 16; None without
    fio.
    """
    program = shutil.which("fio")
    if program is None:
        return None
    names = ":".join(str(p) for p in data.files("slabs") if p.name.startswith("slab-"))
    words = ["--name=limit", "--rw=read", "--bs=4M", "--direct=1", "--iodepth=16", "--readonly"]
    words += ["--ioengine=libaio", "--file_service_type=sequential", "--output-format=json"]
    done = subprocess.run(
        [program, *words, f"--filename={names}"], capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    if done.returncode:
        return None
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


CANDIDATES = (
    Candidate("hsgd", "hsgd.io", "hsgd", "block", "slabs", _hsgd("block")),
    Candidate("hsgd-order", "hsgd.io in order", "hsgd", "in-order", "slabs", _hsgd("none")),
    Candidate("hsgd-mapped", "hsgd.io, mapped", "hsgd", "in-order", "one.h5",
              _hsgd("none", "one.h5", ReadOptions(mapped=True)), True, "mapped"),
    Candidate("h5py-random", "h5py rows", "peer", "block", "one.h5", _h5py(_one_by_one)),
    Candidate("h5py-fancy", "h5py fancy", "peer", "block", "one.h5", _h5py(_sorted_selection)),
    Candidate("memmap", "np.memmap", "peer", "block", "one.h5", _memmap),
    Candidate("loader-0", "DataLoader 0", "peer", "block", "one.h5", _data_loader(0)),
    Candidate("loader-1", "DataLoader 1", "peer", "block", "one.h5", _data_loader(1), False),
    Candidate("loader-2", "DataLoader 2", "peer", "block", "one.h5", _data_loader(2), False),
    Candidate("webdataset", "WebDataset", "peer", "block", "tar", _webdataset),
    Candidate("streaming", "Streaming", "peer", "block", "mds", _streaming),
    Candidate("pyfive-fancy", "pyfive fancy", "peer", "block", "one.h5",
              io_peers.pyfive_fancy, False, packages=("pyfive",)),
    Candidate("h5coro-rows", "h5coro rows", "peer", "block", "chunked.h5",
              io_peers.h5coro_rows, False, packages=("h5coro",)),
    Candidate("litdata", "LitData", "peer", "block", "litdata",
              io_peers.litdata_stream(0, True), False),
    Candidate("litdata-2", "LitData, 2 workers", "peer", "block", "litdata",
              io_peers.litdata_stream(2, True), False),
    Candidate("spdl", "SPDL", "peer", "block", "one.h5",
              io_peers.spdl_rows, False, packages=("spdl",)),
    Candidate("grain", "Grain", "peer", "block", "one.h5",
              io_peers.grain_batches, False, packages=("grain",)),
    Candidate("grain-records", "Grain, ArrayRecord", "peer", "block", "records",
              io_peers.grain_records, False),
    Candidate("tensorstore", "TensorStore", "peer", "block", "zarr-rows",
              io_peers.tensorstore_rows, False),
    Candidate("pyfive-slabs", "pyfive slabs", "peer", "in-order", "one.h5",
              io_peers.pyfive_slabs, False, packages=("pyfive",)),
    Candidate("h5coro-slabs", "h5coro slabs", "peer", "in-order", "chunked.h5",
              io_peers.h5coro_slabs, False, packages=("h5coro",)),
    Candidate("litdata-order", "LitData in order", "peer", "in-order", "litdata",
              io_peers.litdata_stream(0, False), False),
    Candidate("spdl-slabs", "SPDL slabs", "peer", "in-order", "one.h5",
              io_peers.spdl_slabs, False, packages=("spdl",)),
    Candidate("grain-slabs", "Grain slabs", "peer", "in-order", "one.h5",
              io_peers.grain_slabs, False, packages=("grain",)),
    Candidate("tensorstore-slabs", "TensorStore slabs", "peer", "in-order", "zarr",
              io_peers.tensorstore_slabs, False),
    Candidate("h5py-slabs", "h5py slabs", "peer", "in-order", "one.h5", _h5py_slabs("one.h5")),
    Candidate("preadv", "preadv", "limit", "both", "slabs", _preadv),
    Candidate("hsgd-packed", "hsgd.io, Blosc", "hsgd", "block", "packed",
              _hsgd("block", "packed"), False, "packed"),
    Candidate("hsgd-packed-order", "hsgd.io, Blosc, in order", "hsgd", "in-order", "packed",
              _hsgd("none", "packed"), False, "packed"),
    Candidate("h5py-packed-fancy", "h5py fancy, Blosc", "peer", "block", "packed.h5",
              _h5py(_sorted_selection, "packed.h5"), False, "packed"),
    Candidate("h5py-packed-slabs", "h5py slabs, Blosc", "peer", "in-order", "packed.h5",
              _h5py_slabs("packed.h5"), False, "packed"),
)  # fmt: skip
