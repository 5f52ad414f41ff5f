"""SlabFolderWriter: writes the files of one dataset into an empty folder.

A slab is called slab-00003.h5.part until its rows, checksums and seal are on disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.attributes import Attributes, write_attributes
from ..format.chunk_compression import Compression
from ..format.index_checksum import append_checksum
from ..format.opening import first_line
from ..format.slab_folder import (
    CHECKSUMS,
    FORMAT_VERSION,
    INDEX_NAME,
    LARGEST_BLOCK,
    LIBVER,
    LONGEST,
    OFFSETS,
    VALUES,
    WHOLE,
    FieldSpec,
    import_h5py,
    slab_name,
)
from ..order.epoch_order import IntArray
from ..reading import row_copies
from .staged_folder import sync_file, sync_folder

if TYPE_CHECKING:
    import h5py

__all__ = ["ALIGNMENT_BYTES", "SlabFolderWriter"]

ALIGNMENT_BYTES = 4096
CHECKSUM_BYTES = 4 << 20  # about, of all fields of a block
_CHUNKS_PER_BLOCK = 4  # of ragged samples, which may cross chunks
_COPY_BYTES = 1 << 20
_ERRNO = re.compile(r"errno = (\d+)")
_PACKERS = 4  # threads that compress


@dataclass(frozen=True)
class Column:
    """One dataset of every slab."""

    spec: FieldSpec
    bounds: Sequence[int]  # slab k holds samples [bounds[k], bounds[k + 1])
    ends: IntArray | None = None  # where elements of each sample end; None if a sample is one row
    extra: int = 0  # rows after the last sample of a slab

    def rows(self, slab: int) -> int:
        return int(self.cut(slab, self.bounds[slab + 1] - self.bounds[slab])[0, 1])

    def first(self, slab: int) -> int:
        """Return the rows in the slabs before."""
        return self.bounds[slab] if self.ends is None else int(self.ends[self.bounds[slab]])

    def cut(self, slab: int, samples: int) -> IntArray:
        """Return rows [start, stop) of a slab's blocks of `samples` samples, shape (blocks, 2)."""
        first, last = self.bounds[slab], self.bounds[slab + 1]
        starts = np.arange(first, last, samples)
        stops = np.minimum(starts + samples, last)
        if self.ends is not None:
            starts, stops, first = self.ends[starts], self.ends[stops], int(self.ends[first])
        return np.stack([starts - first, stops - first + self.extra], axis=1)


class SlabFolderWriter:
    """Writer of one dataset into a folder (of `staged_folder`): create, write rows, seal.

    Slabs have their full size from the start. Rows are written in any order, straight to their
    place in the file. They count only after `seal` has written digest and seal into every slab and
    `write_index` has added the index.

    Args:
        owned: the slabs that this writer makes. Other writers with the same dataset_uuid make the
            others; one of the writers adds the index when all have sealed.
        ends: where the elements of each sample end, by ragged field, in the order of the slabs:
            int64, 0 and then one for each sample.
        compress: compress sealed slabs in chunks (chunks.Compression).
        resumed: continue with the slabs, and their rows, left by an earlier writer with the same
            arguments; slabs that it sealed stay.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[FieldSpec],
        num_samples: int,
        num_slabs: int,
        seed: int,
        *,
        dataset_uuid: str,
        owned: Sequence[int],
        ends: Mapping[str, IntArray],
        compress: str | None,
        resumed: bool,
    ) -> None:
        self.specs = tuple(specs)
        self.bounds = [slab * num_samples // num_slabs for slab in range(num_slabs + 1)]
        self._folder = folder
        self._seed = seed
        self._ends = ends
        self._compress = compress
        self._columns = {column.spec.name: column for column in self._make_columns()}
        total = sum(
            column.first(num_slabs) * column.spec.row_bytes for column in self._columns.values()
        )
        self._checksum_rows = max(1, CHECKSUM_BYTES * num_samples // max(1, total))
        self._uuid = dataset_uuid
        self.owned = owned
        self._offsets: dict[int, dict[str, int]] = {}
        for slab in self.owned:
            if resumed and not self._sealed_path(slab).exists():
                self._offsets[slab] = self._renew_slab(slab)
            elif resumed:  # the earlier writer may have ended between rename and unlink
                self._path(slab).unlink(missing_ok=True)
            else:
                self._sealed_path(slab).unlink(missing_ok=True)
                self._offsets[slab] = self._create_slab(self._path(slab), slab)
                _reserve(self._path(slab))

    def write(self, slab: int, spec: FieldSpec, row: int, values: NDArray[Any]) -> None:
        """Write rows, or elements of a ragged field, to a slab; native byte order, contiguous."""
        self._write(slab, self._columns[_stored_name(spec)], row, values)

    def write_offsets(self, slab: int, spec: FieldSpec) -> None:
        """Write the offsets of a ragged field to a slab; do nothing for others."""
        if spec.ragged:
            ends = self._ends[spec.name][self.bounds[slab] : self.bounds[slab + 1] + 1]
            self._write(slab, self._columns[f"{spec.name}/{OFFSETS}"], 0, ends)

    def slab_bytes(self, slab: int, spec: FieldSpec) -> int:
        return self._columns[_stored_name(spec)].rows(slab) * spec.row_bytes

    def read_back(self, slab: int, spec: FieldSpec) -> NDArray[Any]:
        """Return all rows, or elements, of a field in a slab, as written so far."""
        column = self._columns[_stored_name(spec)]
        return self._read_rows(slab, column, 0, column.rows(slab))

    def sync(self) -> None:
        """Flush all rows to disk."""
        for slab in self._offsets:
            sync_file(self._path(slab))

    def seal(self, source_digest: str) -> None:
        """Mark the owned slabs as complete, with their checksums, and flush them to disk."""
        h5py = import_h5py()

        for slab in self._offsets:
            path = self._path(slab)
            sealed = path if self._compress is None else path.with_suffix(".packed")
            if self._compress is not None:
                self._pack(slab, sealed, self._compress)
            with _writing(sealed), h5py.File(sealed, "r+", locking=False) as file:
                file.attrs.modify("source_digest", np.bytes_(source_digest.ljust(64)))
                for name, column in self._columns.items():
                    file[name].attrs.modify(CHECKSUMS, self._checksums_of(slab, column))
                file.attrs.modify("sealed", np.uint8(1))
            sync_file(sealed)
            sealed.rename(self._sealed_path(slab))
            path.unlink(missing_ok=True)

    def write_index(self, source_digest: str, attributes: Attributes) -> None:
        """Add the index, with the user's attributes, after all writers have sealed all slabs."""
        h5py = import_h5py()

        path = self._folder / f"{INDEX_NAME}.part"
        with _writing(path), h5py.File(path, "w", libver=LIBVER, locking=False) as file:
            self._write_header(file, WHOLE, 0, self.bounds[-1], source_digest, sealed=True)
            for name, column in self._columns.items():
                spec, slabs = column.spec, len(self.bounds) - 1
                total = column.first(slabs) + column.extra
                layout = h5py.VirtualLayout((total, *spec.shape), spec.dtype)
                for slab in range(slabs):
                    start, rows = column.first(slab), column.rows(slab)
                    if rows and spec.row_bytes:
                        # HDF5 reads % in the name of a source as the number of a block.
                        source = h5py.VirtualSource(
                            slab_name(slab),
                            name.replace("%", "%%"),
                            (rows, *spec.shape),
                            spec.dtype,
                        )
                        # The last offset of a slab is the first of the next slab.
                        rows -= column.extra if slab < slabs - 1 else 0
                        layout[start : start + rows] = source[:rows]
                if total and spec.row_bytes:
                    file.create_virtual_dataset(name, layout)
                else:  # nothing to map
                    file.create_dataset(name, (total, *spec.shape), spec.dtype)
            write_attributes(file, attributes)
        append_checksum(path)
        sync_file(path)
        path.rename(self._folder / INDEX_NAME)
        sync_folder(self._folder)

    def _path(self, slab: int) -> Path:
        return self._folder / f"{slab_name(slab)}.part"

    def _sealed_path(self, slab: int) -> Path:
        return self._folder / slab_name(slab)

    def _make_columns(self) -> Iterator[Column]:
        for spec in self.specs:
            if not spec.ragged:
                yield Column(spec, self.bounds)
            else:
                values = FieldSpec(f"{spec.name}/{VALUES}", spec.shape, spec.dtype)
                yield Column(values, self.bounds, self._ends[spec.name])
                offsets = FieldSpec(f"{spec.name}/{OFFSETS}", (), np.dtype(np.int64))
                yield Column(offsets, self.bounds, extra=1)

    def _write(self, slab: int, column: Column, row: int, values: NDArray[Any]) -> None:
        data = values.reshape(-1).view(np.uint8).data
        offset = self._offsets[slab][column.spec.name] + row * column.spec.row_bytes
        file = os.open(self._path(slab), os.O_WRONLY | os.O_CLOEXEC)
        try:
            while data:
                written = os.pwrite(file, data, offset)
                data, offset = data[written:], offset + written
        finally:
            os.close(file)

    def _read_rows(self, slab: int, column: Column, row: int, rows: int) -> NDArray[Any]:
        spec = column.spec
        with open(self._path(slab), "rb") as file:
            file.seek(self._offsets[slab][spec.name] + row * spec.row_bytes)
            flat = np.fromfile(file, spec.dtype, rows * int(np.prod(spec.shape, dtype=np.int64)))
        return flat.reshape((rows, *spec.shape))

    def _checksums_of(self, slab: int, column: Column) -> NDArray[np.uint32]:
        blocks = column.cut(slab, self._checksum_rows).tolist()
        rows = (self._read_rows(slab, column, start, stop - start) for start, stop in blocks)
        return np.array([row_copies.crc32c(block) for block in rows], np.uint32)

    def _pack(self, slab: int, target: Path, compress: str) -> None:
        """Make a copy of a slab at `target` with compressed chunks."""
        h5py = import_h5py()

        self._create_slab(target, slab, compress)
        with (
            _writing(target),
            h5py.File(target, "r+", locking=False) as file,
            ThreadPoolExecutor(_PACKERS, "hsgd-compress") as pool,
        ):
            for name, column in self._columns.items():
                dataset = file[name]
                if dataset.chunks is None:
                    for start, stop in column.cut(slab, self._checksum_rows).tolist():
                        if stop > start:
                            dataset[start:stop] = self._read_rows(slab, column, start, stop - start)
                    continue
                rows = column.rows(slab)
                step = dataset.chunks[0]
                blocks = [(low, min(low + step, rows)) for low in range(0, rows, step)]
                compression = Compression(compress, column.spec.dtype.itemsize)

                def encode(
                    start: int,
                    stop: int,
                    column: Column = column,
                    compression: Compression = compression,
                    step: int = step,
                ) -> tuple[bytes, int]:
                    block = np.zeros((step, *column.spec.shape), column.spec.dtype)
                    block[: stop - start] = self._read_rows(slab, column, start, stop - start)
                    return compression.encode(block)

                for low in range(0, len(blocks), 2 * _PACKERS):
                    part = blocks[low : low + 2 * _PACKERS]
                    for (start, _), (data, mask) in zip(
                        part, pool.map(lambda cut: encode(*cut), part), strict=True
                    ):
                        place = (start, *(0 for _ in column.spec.shape))
                        dataset.id.write_direct_chunk(place, data, mask)

    def _create_slab(self, path: Path, slab: int, compress: str | None = None) -> dict[str, int]:
        """Make a slab without rows; return dataset name -> byte offset of its rows.

        With `compress` it has chunks, which have no offset; offsets of ragged fields stay
        contiguous.
        """
        h5py = import_h5py()

        start, stop = self.bounds[slab], self.bounds[slab + 1]
        offsets = {}
        with (
            _writing(path),
            h5py.File(
                path,
                "w",
                libver=LIBVER,
                locking=False,
                alignment_threshold=1,
                alignment_interval=ALIGNMENT_BYTES,
            ) as file,
        ):
            self._write_header(file, slab, start, stop - start, " " * 64, sealed=False)
            for name, column in self._columns.items():
                rows = column.rows(slab)
                packed = compress is not None and column.spec.row_bytes > 0
                chunk_rows = min(self._chunk_rows(column), rows) if packed else 0
                dataset = _create_dataset(file, column.spec, rows, chunk_rows, compress)
                blocks = len(column.cut(slab, self._checksum_rows))
                file[name].attrs[CHECKSUMS] = np.zeros(blocks, np.uint32)
                has_bytes = rows and column.spec.row_bytes and not chunk_rows
                offset = dataset.get_offset() if has_bytes else 0
                if offset is None or offset % ALIGNMENT_BYTES:
                    raise DataError(f"{path}: HDF5 put {name!r} at {offset}, not aligned")
                offsets[name] = int(offset)
            for name, ends in self._ends.items():
                largest = np.diff(self._columns[f"{name}/{VALUES}"].cut(slab, self._checksum_rows))
                file[name].attrs[LARGEST_BLOCK] = np.int64(largest.max())
                file[name].attrs[LONGEST] = np.int64(np.diff(ends[start : stop + 1]).max())
        return offsets

    def _chunk_rows(self, column: Column) -> int:
        """Return the rows, or elements, of a chunk; 0 for offsets, which have no chunks."""
        if column.ends is not None:
            return max(1, CHECKSUM_BYTES // _CHUNKS_PER_BLOCK // max(1, column.spec.row_bytes))
        return 0 if column.extra else self._checksum_rows

    def _renew_slab(self, slab: int) -> dict[str, int]:
        """Keep the rows of a slab, and write new metadata around them.

        A process killed while it sealed the slab has left metadata that HDF5 refuses. The layout of
        a slab depends only on its fields and rows, so a new slab's metadata fits.
        """
        path = self._path(slab)
        fresh = path.with_suffix(".new")
        offsets = self._create_slab(fresh, slab)
        with open(fresh, "rb") as source, open(path, "r+b") as sink:
            end = 0
            for name in sorted(offsets, key=lambda name: offsets[name]):
                column = self._columns[name]
                if rows := column.rows(slab):
                    _copy(source, sink, end, offsets[name])
                    end = offsets[name] + rows * column.spec.row_bytes
            size = os.fstat(source.fileno()).st_size
            _copy(source, sink, end, size)
            sink.truncate(size)
        fresh.unlink()
        return offsets

    def _write_header(
        self, file: h5py.File, slab: int, start: int, count: int, digest: str, *, sealed: bool
    ) -> None:
        attrs = file.attrs
        attrs["format_version"] = np.int64(FORMAT_VERSION)
        attrs["dataset_uuid"] = np.bytes_(self._uuid)
        attrs["slab_index"] = np.int64(slab)
        attrs["num_slabs"] = np.int64(len(self.bounds) - 1)
        attrs["global_start"] = np.int64(start)
        attrs["num_samples"] = np.int64(count)
        attrs["permutation_seed"] = np.int64(self._seed)
        attrs["source_digest"] = np.bytes_(digest)
        attrs["checksum_rows"] = np.int64(self._checksum_rows)
        attrs["sealed"] = np.uint8(sealed)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn h5py's errors of writing a file into OSError with the system's error number.

    h5py raises OSError without a number, or RuntimeError when a file is closed; one line of its
    text has the number. A RuntimeError without a number is not the disk's and is raised as it is.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = _ERRNO.search(str(error))
        if found is not None:
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        if isinstance(error, OSError) and not isinstance(error, DataError) and error.errno is None:
            raise OSError(errno.EIO, first_line(error), str(path)) from error
        raise


def _stored_name(spec: FieldSpec) -> str:
    return f"{spec.name}/{VALUES}" if spec.ragged else spec.name


def _create_dataset(
    file: h5py.File, spec: FieldSpec, rows: int, chunk_rows: int, compress: str | None
) -> h5py.h5d.DatasetID:
    """Make an unfilled dataset: contiguous and allocated, or in chunks of `chunk_rows`."""
    h5py = import_h5py()

    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if chunk_rows and compress is not None:
        create.set_chunk((chunk_rows, *spec.shape))
        Compression(compress, spec.dtype.itemsize).set_filters(create)
    else:
        create.set_layout(h5py.h5d.CONTIGUOUS)
        create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    kind = h5py.h5t.py_create(spec.dtype, logical=True)
    space = h5py.h5s.create_simple((rows, *spec.shape))
    return h5py.h5d.create(file.id, spec.name.encode(), kind, space, create, link)


def _copy(source: Any, sink: Any, start: int, stop: int) -> None:
    """Copy bytes [start, stop) of a file to the same place in another."""
    source.seek(start)
    sink.seek(start)
    while start < stop:
        data = source.read(min(_COPY_BYTES, stop - start))
        sink.write(data)
        start += len(data)


def _reserve(path: Path) -> None:
    """Allocate the disk space of a sparse file, so that a full disk is noticed at once."""
    with open(path, "rb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file system cannot reserve
                raise
