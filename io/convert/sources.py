"""Sources for NumPy and HDF5 files and slab folders, and the choice of the source for a path."""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.attributes import Attributes, read_attributes
from ..format.chunk_bounds import check_stored_chunks
from ..format.fields import UnequalRows, choose_fields, linked_file, stored_name
from ..format.filters import load_filters
from ..format.opening import examined, first_line
from ..format.packing_of import packing_of
from ..format.ragged import Block, Ragged, ragged_of
from ..format.slab_folder import INDEX_NAME, FieldSpec, import_h5py, is_slab_folder
from ..format.stored_rows import StoredRows
from ..format.supported_dtype import NUMBERS, UnsupportedType
from ..format.table_columns import find_field, form_of
from ..layouts.files_of import files_of
from ..layouts.open_map import check_unique, open_map
from ..layouts.splits import refuse_splits
from ..order.epoch_order import IntArray
from ..reading.claimed_memory import claimed_memory
from ..reading.row_reader import RowReader
from .class_folders import IMAGE_SUFFIXES
from .joined_source import JoinedSource
from .record_sources import CsvSource, ImageFolderSource, ParquetSource, TarSource
from .source import Source, chosen
from .text_sources import TEXT_SUFFIXES, TextSource

__all__ = ["Hdf5Source", "NumpySource", "VlenSource", "lengths_of", "open_source"]

# Damaged archives, also inside a compressed member; encrypted ones; unknown compression methods.
_UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError)

PARQUET_SUFFIXES = frozenset({".parquet", ".pq"})
_ROWS = 1024  # ragged samples per block, while their size is unknown


def lengths_of(source: Source) -> dict[str, IntArray]:
    """Return the elements of every sample by ragged field; reads fields of unknown lengths."""
    found = {}
    for spec in source.specs:
        if spec.ragged:
            known = source.lengths(spec)
            found[spec.name] = _read_lengths(source, spec) if known is None else known
    return found


def _read_lengths(source: Source, spec: FieldSpec) -> IntArray:
    parts = [np.empty(0, np.int64)]
    for block in source.stream(spec, _ROWS):
        assert isinstance(block, Ragged)
        parts.append(block.lengths)
    return np.concatenate(parts)


class Hdf5Source(Source):
    """What open_map() opens: HDF5 files, whose samples may be groups, or a slab folder."""

    def __init__(self, path: Path, fields: Sequence[str] | None) -> None:
        self._data = open_map(path, fields)
        self._path = path
        self.unwritten, self.packing = self._data.unwritten(), self._data.packing
        self.specs, self.left_out = self._data.fields, self._data.left_out
        self.num_samples = self._data.num_samples
        self.notes = [f"{path}: {self._data.note}"] if self._data.note else []
        if self._data.sample_group:
            self.left_out_are = "groups and fields"
        linked = [Path(other) for other, _ in self._data.linked_files()]
        own = [path] if path.is_file() else []
        slabs = (Path(slab.path) for slab in self._data.slabs)
        self.files = list(dict.fromkeys([*own, *slabs, *linked]))

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        with RowReader(self._data) as reader:
            for row in range(start, self.num_samples, rows):
                count = min(rows, self.num_samples - row)
                if spec.ragged:
                    yield reader.read_ragged(spec.name, row, count)
                    continue
                what, nbytes = f"{count} rows of {spec.name!r}", count * spec.row_bytes
                with claimed_memory(str(self._path), what, nbytes):
                    block = np.empty((count, *spec.shape), spec.dtype)
                reader.read(spec.name, row, block)
                yield block

    def lengths(self, spec: FieldSpec) -> IntArray | None:
        held = [offsets.held for offsets in self._data.offsets(spec)]
        if not all(held):
            return None
        return np.concatenate([np.diff(np.frombuffer(ends, np.int64)) for ends in held])

    def attributes(self) -> Attributes:
        """Return the attributes of the file and its fields; of groups of samples packing alone."""
        path = self._path
        if path.is_dir():
            is_joined = self._data.header is None
            path = Path(self._data.slabs[0].path) if is_joined else path / INDEX_NAME
        first = self._data.sample_group
        names = {stored_name(first, spec.name): spec.name for spec in self.specs}
        with examined(path) as file:
            found = read_attributes(file, names)
        if not first:
            return found
        kept = Attributes(left_out=found.left_out)
        for place, values in found.values.items():
            name = names.get(place, place)
            for key, value in values.items():
                if not place or key in self.packing.get(name, {}):
                    kept.values.setdefault(name, {})[key] = value
                else:
                    kept.left_out[f"{place}@{key}"] = "an attribute of one sample, or of several"
        return kept


class VlenSource(Source):
    """An HDF5 file with fields of variable length ("vlen"), read by h5py."""

    def __init__(self, path: Path, fields: Sequence[str] | None) -> None:
        self._path = path
        with examined(path) as file:
            names, self.left_out = choose_fields(file, path, fields)
            found = {name: find_field(file, name) for name in names}
            self.specs = tuple(_vlen_spec(*found[name], path, name) for name in names)
            self.packing = packing_of(file, names)
            stored = StoredRows()
            gaps = {name: stored.gaps(dataset) for name, (dataset, _) in found.items()}
            for dataset, _ in found.values():
                check_stored_chunks(dataset)
            self.unwritten = {
                name: f"{path}: {name!r}: {what}" for name, what in gaps.items() if what
            }
            self.num_samples = int(found[names[0]][0].shape[0])
            linked = {linked_file(file, dataset) for dataset, _ in found.values()}
            self.files = [path, *sorted(other for other in linked if other is not None)]

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        with examined(self._path) as file:
            dataset, column = find_field(file, spec.name)
            load_filters(dataset)
            rows_of = dataset.fields(column) if column else dataset
            for row in range(start, self.num_samples, rows):
                try:
                    block = rows_of[row : row + rows]
                except (OSError, RuntimeError, ValueError) as error:
                    raise DataError(
                        f"{self._path}: h5py cannot read rows [{row}, {row + rows}) of "
                        f"{spec.name!r}: {first_line(error)}"
                    ) from error
                if spec.ragged:
                    yield ragged_of(block, spec.shape, spec.dtype)
                else:
                    yield block.astype(spec.dtype, copy=False)

    def attributes(self) -> Attributes:
        with examined(self._path) as file:
            return read_attributes(file, [spec.name for spec in self.specs])


def _vlen_spec(dataset: Any, column: str, path: Path, name: str) -> FieldSpec:
    h5py = import_h5py()
    if dataset.id.get_type().get_class() != h5py.h5t.VLEN:  # h5py itself lacks some dtypes
        shape, dtype = form_of(dataset, column, path, name)
        return FieldSpec(name, shape[1:], dtype.newbyteorder("="))
    base = h5py.check_vlen_dtype(dataset.dtype)
    dtype = np.dtype(base)
    if dtype.kind not in NUMBERS or len(dataset.shape) != 1:
        raise DataError(
            f"{path}: field {name!r} has shape {dataset.shape} of variable-length {base}; only one "
            "axis, of numbers, can be converted; name other fields with --fields"
        )
    return FieldSpec(name, (), dtype.newbyteorder("="), ragged=True)


class NumpySource(Source):
    """Arrays in .npy files, or members of one .npz file: field name -> (path, member or None)."""

    def __init__(self, files: dict[str, tuple[Path, str | None]], names: Sequence[str] | None):
        self._files = chosen(files, names)
        self.files = [path for path, _ in self._files.values()]
        self._stored = {}
        counts = {}
        specs = []
        for name, (path, _) in self._files.items():
            where = f"{path}: {name!r}"
            with self._open(name) as stream:
                shape, dtype = _read_header(stream, where)
                missing = math.prod(shape) * dtype.itemsize + stream.tell() - self._size(name)
            if missing > 0:  # before memory is allocated by the header
                raise _truncated(where, missing)
            self._stored[name] = dtype
            counts[name] = shape[0]
            specs.append(FieldSpec(name, shape[1:], dtype.newbyteorder("=")))
        if not counts:
            raise DataError(f"no arrays to convert; there are: {', '.join(files) or 'none'}")
        if len(set(counts.values())) != 1:
            text = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise DataError(f"first dimensions differ: {text}; choose the fields with --fields")
        self.specs = tuple(specs)
        self.num_samples = next(iter(counts.values()))

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[NDArray[Any]]:
        path = self._files[spec.name][0]
        dtype = self._stored[spec.name]
        with self._open(spec.name) as stream:
            _read_header(stream, f"{path}: {spec.name!r}")
            if start:
                stream.seek(start * spec.row_bytes, os.SEEK_CUR)
            for row in range(start, self.num_samples, rows):
                count = min(rows, self.num_samples - row)
                data = _read_exactly(stream, count * spec.row_bytes, f"{path}: {spec.name!r}")
                block = np.ndarray((count, *spec.shape), dtype, data)
                yield block.astype(spec.dtype, copy=False)

    def _size(self, name: str) -> int:
        path, member = self._files[name]
        if member is None:
            return path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            return archive.getinfo(member).file_size

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        path, member = self._files[name]
        try:
            if member is None:
                with open(path, "rb") as stream:
                    yield stream
            else:
                with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
                    yield stream
        except DataError:
            raise
        except _UNREADABLE as error:
            raise DataError(f"{path}: cannot read {name!r}: {first_line(error)}") from error


def open_source(
    source: str,
    fields: Sequence[str] | None = None,
    image_size: int | None = None,
    *,
    encoded: bool = False,
    text: bool = False,
) -> Source:
    """Return the source for a file, a folder, or several .npy files separated by commas.

    `image_size` and `encoded` are for images only, see ImageFolderSource; both together raise
    ValueError. With `text` columns of text become fields, also beside numbers.
    """
    if encoded and image_size is not None:
        raise ValueError("encoded images stay as they are; leave out --image-size or --encoded")
    check_unique(fields or ())
    if "," in source and not Path(source).exists():
        return NumpySource(_npy_files([Path(part.strip()) for part in source.split(",")]), fields)
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source}: no such file or folder, and no data set of that name")
    if path.is_dir():
        if is_slab_folder(path):
            return Hdf5Source(path, fields)
        return _open_folder(path, fields, image_size, encoded=encoded, text=text)
    if not path.is_file():  # opening a pipe would block
        raise DataError(f"{source}: neither a file nor a folder")
    if path.suffix == ".tar":
        return TarSource([path], fields, image_size, encoded=encoded)
    if path.suffix == ".csv":
        return CsvSource(path, fields)
    if path.suffix in PARQUET_SUFFIXES:
        return ParquetSource(path, fields, text=text)
    if path.suffix in TEXT_SUFFIXES:
        return TextSource([path], fields, whole=False)
    if path.suffix == ".npy":
        return NumpySource({"data": (path, None)}, fields)
    if path.suffix == ".npz":
        return NumpySource(_npz_members(path), fields)
    if not import_h5py().is_hdf5(path):
        raise DataError(
            f"{source}: not an HDF5 file, and its name does not end in .npy, .npz, .tar, .csv, "
            ".parquet, .pq, .txt or .jsonl; see hsgd data convert --help"
        )
    return _open_hdf5(path, fields)


def _open_hdf5(path: Path, fields: Sequence[str] | None) -> VlenSource | Hdf5Source:
    try:
        return Hdf5Source(path, fields)
    except UnsupportedType:
        return VlenSource(path, fields)  # which raises the same for other types


def _open_folder(
    path: Path, fields: Sequence[str] | None, image_size: int | None, *, encoded: bool, text: bool
) -> Source:
    found = sorted(path.glob("*.npy"))
    if found:
        return NumpySource(_npy_files(found), fields)
    archives = sorted(path.glob("*.tar"))
    refuse_splits(path, archives)
    if archives:
        return TarSource(archives, fields, image_size, encoded=encoded)
    if (parts := files_of(path)) is not None:
        try:
            return JoinedSource([(Path(file), _open_hdf5(Path(file), fields)) for file in parts])
        except UnequalRows:
            return Hdf5Source(path, fields)
    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in path.glob("*/**/*")):
        return ImageFolderSource(path, fields, image_size, encoded=encoded)
    files = sorted(file for file in path.iterdir() if file.suffix in PARQUET_SUFFIXES)
    refuse_splits(path, files)
    if files:
        return JoinedSource([(file, ParquetSource(file, fields, text=text)) for file in files])
    for suffix, whole in ((".txt", True), (".jsonl", False)):
        files = sorted(path.glob(f"*{suffix}"))
        refuse_splits(path, files)
        if files:
            return TextSource(files, fields, whole=whole)
    raise DataError(
        f"{path}: this folder holds no .npy, .tar, .parquet, .txt, .jsonl or HDF5 files, no images "
        "in class folders, no slabs"
    )


def _npy_files(paths: Sequence[Path]) -> dict[str, tuple[Path, str | None]]:
    files: dict[str, tuple[Path, str | None]] = {}
    for path in paths:
        if path.suffix != ".npy":
            raise DataError(f"{path}: only .npy files can be joined with commas")
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: not a file")
        if path.stem in files:
            raise DataError(f"{path}: a second file of the name {path.name}; rename one")
        files[path.stem] = (path, None)
    return files


def _npz_members(path: Path) -> dict[str, tuple[Path, str | None]]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable .npz file: {first_line(error)}") from None
    return {member.removesuffix(".npy"): (path, member) for member in members}


def _read_header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and stored dtype of an array; leave the stream at its first row."""
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"version {version} of the .npy format")
    except (ValueError, TypeError, SyntaxError, RecursionError, tokenize.TokenError) as error:
        raise DataError(f"{where}: not a readable .npy array: {first_line(error)}") from None
    if min(shape, default=0) < 0:
        raise DataError(f"{where}: not a readable .npy array: its shape is {shape}")
    if dtype.kind not in NUMBERS:
        raise DataError(f"{where} has dtype {dtype}; only numbers and bool can be converted")
    if not shape:
        raise DataError(f"{where} is a single number; choose the fields with --fields")
    if fortran and len(shape) > 1:
        raise DataError(f"{where} is stored by columns; save it with numpy.ascontiguousarray")
    return shape, dtype


def _truncated(where: str, missing: int) -> DataError:
    return DataError(f"{where} is truncated: {missing} bytes are missing; copy the file again")


def _read_exactly(stream: IO[bytes], count: int, where: str) -> bytes:
    """Read `count` bytes; a zip member may return them in parts."""
    parts: list[bytes] = []
    missing = count
    while missing:
        part = stream.read(missing)
        if not part:
            raise _truncated(where, missing)
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
