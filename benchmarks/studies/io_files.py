"""The same samples as files of every candidate: slabs, HDF5 files, tar, MDS and FFCV's.

Owns what is written, and where it begins and ends in the page cache. Never measures. A sample is
`sample_bytes` bytes, the first eight its number, the others random from 0 to 15: half of them can
be saved by compression.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hsgd.io import convert_to_slabs

__all__ = [
    "PACKAGES",
    "SMALL",
    "DataSet",
    "available",
    "can_drop_caches",
    "drop_caches",
    "import_streaming",
    "make",
    "warm",
]

_BLOCK_BYTES = 32 << 20
_SHARD_BYTES = 64 << 20
PACKAGES = {  # that files of a kind need
    "tar": "webdataset",
    "mds": "streaming",
    "beton": "ffcv",
    "packed": "hdf5plugin",
    "packed.h5": "hdf5plugin",
}
_CHUNK_BYTES = 1 << 20
SMALL = frozenset({"tar", "mds"})  # kinds that hold a part of the samples
_SMALL_BYTES = 256 << 20  # and a quarter of all, at most
_DROP = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class DataSet:
    """`count` samples of `sample_bytes` in `folder`: slabs/, one.h5, tar/, mds/, beton, and
    compressed packed/ and packed.h5, as were made.
    """

    folder: Path
    sample_bytes: int
    count: int

    def files(self, kind: str) -> list[Path]:
        """The files that hold the samples for one kind of candidate."""
        found = self.folder / kind
        return [found] if found.is_file() else sorted(p for p in found.rglob("*") if p.is_file())


@functools.cache
def available(kind: str) -> bool:
    """Whether files of this kind can be made and read here."""
    package = PACKAGES.get(kind)
    try:
        if package == "streaming":
            import_streaming()
        elif package is not None:
            importlib.import_module(package)
    except Exception as error:  # not installed, or not with what else is installed here
        print(f"{package} cannot be used: {error}", file=sys.stderr)
        return False
    return True


def import_streaming() -> Any:
    """The package `streaming`, with stand-ins where torchvision was built for another torch: it
    wants that for images, which are not read here.
    """
    try:
        importlib.import_module("torchvision.transforms.functional")
    except (ImportError, RuntimeError):
        names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
        for name in (*names, "torchvision.datasets"):
            sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None))
        vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None
        vars(sys.modules["torchvision.datasets"])["VisionDataset"] = object
    return importlib.import_module("streaming")


def make(folder: Path, sample_bytes: int, total_bytes: int, kinds: set[str]) -> DataSet:
    """Write the files that are not there yet. tar and mds hold a quarter, at most 256 MB, which is
    enough for what is slow.
    """
    data = DataSet(folder, sample_bytes, max(256, total_bytes // sample_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    one = folder / "one.h5"
    if not one.exists():
        _write_one(one, data)
    if "slabs" in kinds and not (folder / "slabs").exists():
        convert_to_slabs(one, folder / "slabs", permute=False)
    if "packed" in kinds and available("packed") and not (folder / "packed").exists():
        convert_to_slabs(one, folder / "packed", permute=False, compress="lz4")
    for kind, write in _WRITERS.items():
        if kind in kinds and available(kind) and not (folder / kind).exists():
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


def _blocks(data: DataSet, limit_bytes: int | None = None) -> Iterator[np.ndarray]:
    random = np.random.default_rng(1)
    count = data.count
    if limit_bytes is not None:
        count = max(64, min(count // 4, limit_bytes // data.sample_bytes))
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
        for block in _blocks(data):
            dataset[row : row + len(block)] = block
            row += len(block)


def _write_tar(folder: Path, data: DataSet) -> None:
    folder.mkdir()
    number = 0
    for shard, block in enumerate(_blocks(data, _SMALL_BYTES)):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for row in block:
                entry = tarfile.TarInfo(f"{number:09d}.bin")
                entry.size = len(row)
                archive.addfile(entry, BytesIO(row.tobytes()))
                number += 1


def _write_mds(folder: Path, data: DataSet) -> None:
    writer_type = import_streaming().MDSWriter
    with writer_type(out=str(folder), columns={"x": "bytes"}, size_limit=_SHARD_BYTES) as writer:
        for block in _blocks(data, _SMALL_BYTES):
            for row in block:
                writer.write({"x": row.tobytes()})


def _write_packed(path: Path, data: DataSet) -> None:
    """Chunks of whole samples, as a careful user makes them."""
    import hdf5plugin

    rows = min(data.count, max(1, _CHUNK_BYTES // data.sample_bytes))
    filters = hdf5plugin.Blosc("lz4", 5, hdf5plugin.Blosc.SHUFFLE)
    _write_one(path, data, chunks=(rows, data.sample_bytes), **filters)


def _write_beton(path: Path, data: DataSet) -> None:
    from ffcv.fields import BytesField
    from ffcv.writer import DatasetWriter

    class Rows:
        file: h5py.File | None = None

        def __len__(self) -> int:
            return data.count

        def __getitem__(self, row: int) -> tuple[np.ndarray]:
            if self.file is None:  # each worker opens it for itself
                self.file = h5py.File(data.folder / "one.h5", "r")
            return (self.file["data"][row],)

    DatasetWriter(str(path), {"x": BytesField()}, num_workers=1).from_indexed_dataset(Rows())


_WRITERS: dict[str, Callable[[Path, DataSet], None]] = {
    "tar": _write_tar,
    "mds": _write_mds,
    "beton": _write_beton,
    "packed.h5": _write_packed,
}
