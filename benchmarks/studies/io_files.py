"""The same samples as files of every candidate: slabs, HDF5, tar, MDS, Zarr and others' own.

A sample is `sample_bytes` bytes, the first eight its number, the others random from 0 to 15: half
of them can be saved by compression.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hsgd.io import convert_to_slabs

from studies.io_packages import import_streaming

__all__ = [
    "BATCH",
    "LITDATA_ROWS",
    "READ_BYTES",
    "SMALL",
    "DataSet",
    "can_drop_caches",
    "drop_caches",
    "make",
    "part",
    "rows_of_one",
    "warm",
    "write_litdata",
    "write_mds",
    "zarr_specification",
]

BATCH = 64
READ_BYTES = 4 << 20  # of peers that read many rows at once
_BLOCK_BYTES = 32 << 20
_SHARD_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_ZARR_BYTES = 256 << 10  # of a chunk that is read for single samples
LITDATA_ROWS = 512
SMALL = frozenset(  # kinds that hold a part of the samples
    {"tar", "mds", "litdata", "records", "zarr-rows", "chunked.h5"}
)
_SMALL_BYTES = 256 << 20  # and a quarter of all, at most
_DROP = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class DataSet:
    """`count` samples of `sample_bytes` in `folder`: slabs/, one.h5, tar/, mds/, litdata/, records,
    zarr/, zarr-rows/, chunked.h5, and compressed packed/ and packed.h5, as were made.
    """

    folder: Path
    sample_bytes: int
    count: int

    def files(self, kind: str) -> list[Path]:
        """The files that hold the samples for one kind of candidate."""
        found = self.folder / kind
        return [found] if found.is_file() else sorted(p for p in found.rglob("*") if p.is_file())


def make(folder: Path, sample_bytes: int, total_bytes: int, kinds: set[str]) -> DataSet:
    """Write the files that are not there yet. Kinds of SMALL hold a quarter, at most 256 MB, which
    is enough for what is slow.
    """
    data = DataSet(folder, sample_bytes, max(256, total_bytes // sample_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    one = folder / "one.h5"
    if not one.exists():
        _write_one(one, data)
    if "slabs" in kinds and not (folder / "slabs").exists():
        convert_to_slabs(one, folder / "slabs", permute=False)
    if "packed" in kinds and not (folder / "packed").exists():
        convert_to_slabs(one, folder / "packed", permute=False, compress="lz4")
    for kind, write in _WRITERS.items():
        if kind in kinds and not (folder / kind).exists():
            write(folder / kind, data)
    return data


def warm(data: DataSet, kind: str) -> None:
    """Read the files once, so that they lie in the page cache."""
    buffer = bytearray(8 << 20)
    for path in data.files(kind):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def can_drop_caches() -> bool:
    """Whether cold runs are possible: the kernel lets root alone drop the page cache."""
    return os.access(_DROP, os.W_OK)


def drop_caches() -> None:
    """Bring everything to the disk and forget the page cache."""
    os.sync()
    _DROP.write_text("3\n")


def part(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows of a rank, of `count`."""
    return count * rank // ranks, count * (rank + 1) // ranks


def _small_count(data: DataSet) -> int:
    return max(64, min(data.count // 4, _SMALL_BYTES // data.sample_bytes))


def _blocks(data: DataSet, count: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(1)
    rows = max(1, _BLOCK_BYTES // data.sample_bytes)
    for start in range(0, count, rows):
        block = random.integers(0, 16, (min(rows, count - start), data.sample_bytes), np.uint8)
        numbers = np.arange(start, start + len(block))
        block[:, :8] = numbers[:, None].view(np.uint8)
        yield block


def _write_one(path: Path, data: DataSet, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        shape = (data.count, data.sample_bytes)
        dataset = file.create_dataset("data", shape, "u1", **options)
        row = 0
        for block in _blocks(data, data.count):
            dataset[row : row + len(block)] = block
            row += len(block)


def _write_tar(folder: Path, data: DataSet) -> None:
    folder.mkdir()
    number = 0
    for shard, block in enumerate(_blocks(data, _small_count(data))):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for row in block:
                entry = tarfile.TarInfo(f"{number:09d}.bin")
                entry.size = len(row)
                archive.addfile(entry, BytesIO(row.tobytes()))
                number += 1


def write_mds(folder: Path, columns: dict[str, str], samples: Iterable[dict[str, Any]]) -> None:
    """Streaming's format; shards of 64 MiB, as it does by itself."""
    writer_type = import_streaming().MDSWriter
    with writer_type(out=str(folder), columns=columns, size_limit=_SHARD_BYTES) as writer:
        for sample in samples:
            writer.write(sample)


def write_litdata(
    folder: Path, produce: Callable[[Any], Any], inputs: list[Any], **options: Any
) -> None:
    """What `produce` yields for each input, in LitData's format, by a process that it starts; in
    chunks of 64 MB, unless `options` say others.
    """
    import litdata

    options = options or {"chunk_bytes": "64MB"}
    with contextlib.redirect_stdout(sys.stderr):
        litdata.optimize(
            produce, inputs, str(folder), num_workers=1, reorder_files=False, **options
        )


def rows_of_one(path: str, count: int, low: int) -> Iterator[Any]:
    """Rows of an HDF5 file below `count`, as tensors: LITDATA_ROWS from `low` on."""
    import torch

    with h5py.File(path, "r") as file:
        for row in file["data"][low : min(low + LITDATA_ROWS, count)]:
            yield torch.from_numpy(row)


def _write_mds(folder: Path, data: DataSet) -> None:
    rows = (row for block in _blocks(data, _small_count(data)) for row in block)
    write_mds(folder, {"x": "bytes"}, ({"x": row.tobytes()} for row in rows))


def _write_packed(path: Path, data: DataSet) -> None:
    """Chunks of whole samples, as a careful user makes them."""
    import hdf5plugin

    rows = min(data.count, max(1, _CHUNK_BYTES // data.sample_bytes))
    filters = hdf5plugin.Blosc("lz4", 5, hdf5plugin.Blosc.SHUFFLE)
    _write_one(path, data, chunks=(rows, data.sample_bytes), **filters)


def _write_chunked(path: Path, data: DataSet) -> None:
    rows = max(1, _CHUNK_BYTES // data.sample_bytes)
    _write_one(path, replace(data, count=_small_count(data)), chunks=(rows, data.sample_bytes))


def _write_records(path: Path, data: DataSet) -> None:
    """A record per group, without compression: what random access is advised to have."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for block in _blocks(data, _small_count(data)):
        for row in block:
            writer.write(row.tobytes())
    writer.close()


def _write_litdata(folder: Path, data: DataSet) -> None:
    count = _small_count(data)
    rows = functools.partial(rows_of_one, str(data.folder / "one.h5"), count)
    write_litdata(folder, rows, list(range(0, count, LITDATA_ROWS)))


def zarr_specification(folder: Path) -> dict[str, Any]:
    """How TensorStore opens a Zarr array that nobody changes."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder)},
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def _write_zarr(folder: Path, data: DataSet, chunk_bytes: int, count: int) -> None:
    """Chunks of whole samples, without compression."""
    import tensorstore

    rows = max(1, chunk_bytes // data.sample_bytes)
    grid = {"name": "regular", "configuration": {"chunk_shape": [rows, data.sample_bytes]}}
    metadata = {
        "shape": [count, data.sample_bytes],
        "data_type": "uint8",
        "chunk_grid": grid,
        "codecs": [{"name": "bytes"}],
    }
    specification = {**zarr_specification(folder), "metadata": metadata}
    array = tensorstore.open(specification, create=True).result()
    low = 0
    for block in _blocks(data, count):
        array[low : low + len(block)] = block
        low += len(block)


_WRITERS: dict[str, Callable[[Path, DataSet], None]] = {
    "tar": _write_tar,
    "mds": _write_mds,
    "packed.h5": _write_packed,
    "chunked.h5": _write_chunked,
    "records": _write_records,
    "litdata": _write_litdata,
    "zarr": lambda folder, data: _write_zarr(folder, data, READ_BYTES, data.count),
    "zarr-rows": lambda folder, data: _write_zarr(folder, data, _ZARR_BYTES, _small_count(data)),
}
