"""map_file: the place of the rows of each field of one file, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.errors import DataError

from ..format.chunks import Chunks, chunks_of
from ..format.data_map import Extent, Offsets, SlabMap
from ..format.fields import linked_file, stored_name
from ..format.opening import Identity, identity_of
from ..format.slab_folder import (
    CHECKSUMS,
    LARGEST_BLOCK,
    LONGEST,
    OFFSETS,
    VALUES,
    FieldSpec,
    import_h5py,
)
from ..format.sparse_kind import sparse_parent
from ..format.stored_rows import StoredRows
from ..format.supported_dtype import check_claim, check_h5py_reads, is_stored_as_in_memory
from ..format.table_columns import find_field, form_of
from .sparse_offsets import sparse_offsets

if TYPE_CHECKING:
    import h5py

__all__ = ["FieldMaps", "map_file"]

_CHUNKED = "chunked layout"
_WITH_USER_BLOCK = (1, 14, 4)


def map_file(
    file: h5py.File,
    path: Path | str,
    identity: Identity,
    start: int,
    names: Sequence[str],
    checksum_rows: int = 0,
    group: str = "",
) -> tuple[tuple[FieldSpec, ...], SlabMap]:
    """Return specs and extents of datasets; with `checksum_rows` they must have checksums."""
    fields = FieldMaps(file, path, identity[0], checksum_rows)
    found = {name: fields.field(name, stored_name(group, name)) for name in names}
    extents = {name: extent for name, (_, extent, _) in found.items()}
    samples = next(iter(found.values()))[2]
    specs = tuple(spec for spec, _, _ in found.values())
    return specs, SlabMap(str(path), start, samples, identity, extents)


class FieldMaps:
    """The places of fields of one open file of `size` bytes."""

    def __init__(
        self, file: h5py.File, path: Path | str, size: int, checksum_rows: int = 0
    ) -> None:
        self._file, self._path, self._size = file, path, size
        self._checksum_rows = checksum_rows
        self._stored_rows = StoredRows()
        self._matrices: dict[str, Offsets] = {}

    def field(self, name: str, stored: str) -> tuple[FieldSpec, Extent, int]:
        """Return form, place and number of samples of a field, `stored` in the file."""
        item, column = find_field(self._file, stored)
        has_offsets = not column and LONGEST in item.attrs
        dataset = item[VALUES] if has_offsets else item
        shape, dtype = form_of(dataset, column, self._path, name)
        stored_dtype = dataset.dtype if column else dtype
        unwritten = self._stored_rows.gaps(dataset)
        linked, refusal, chunks = self._storage(dataset, dtype, stored_dtype, column)
        if refusal:
            check_h5py_reads(dataset, refusal, self._path, name)
        offsets, samples = self._matrix_offsets(stored), shape[0]
        if has_offsets:
            offsets = _map_offsets(self._file, stored, self._path, self._checksum_rows, self._size)
            samples = self._file[f"{stored}/{OFFSETS}"].shape[0] - 1
            if chunks is None and not dtype.isnative:
                refusal = "its values are in another byte order"
            _check_ragged(dataset, refusal, self._path, name)
            refusal = ""
        elif offsets is not None:
            samples = len(offsets.held) // 8 - 1
        in_chunk = dataset.chunks or (1,)
        extent = Extent(
            -1 if refusal or chunks is not None else int(dataset.id.get_offset() or 0),
            dtype,
            in_chunk[0],
            math.prod(in_chunk) * stored_dtype.itemsize,
            refusal,
            _read_checksums(dataset, self._path, samples, self._checksum_rows),
            offsets,
            chunks,
            linked,
            unwritten=unwritten,
        )
        is_ragged = offsets is not None
        return FieldSpec(name, shape[1:], dtype.newbyteorder("="), is_ragged), extent, samples

    def _storage(
        self, dataset: h5py.Dataset, dtype: np.dtype[Any], stored_dtype: np.dtype[Any], column: str
    ) -> tuple[tuple[str, Identity] | None, str, Chunks | None]:
        """Return the file behind an external link, why h5py must read it, and its chunks if not."""
        other = linked_file(self._file, dataset)
        linked = None if other is None else (str(other), identity_of(other.stat()))
        file_bytes = self._size if linked is None else linked[1][0]
        check_claim(dataset, stored_dtype, file_bytes, self._path)
        home = self._file if other is None else dataset.file
        refusal = "a column of a table" if column else ""
        refusal = refusal or _bypass_refusal(home, dataset, dtype, file_bytes, other or self._path)
        if linked is not None:
            return linked, f"external link to {linked[0]}", None
        if refusal != _CHUNKED:
            return None, refusal, None
        found = chunks_of(dataset, self._size)
        return (None, found, None) if isinstance(found, str) else (None, "", found)

    def _matrix_offsets(self, stored: str) -> Offsets | None:
        """Return the offsets of a field that is a part of a matrix by rows, else None."""
        home = stored.rpartition("/")[0]
        if home not in self._matrices:
            group = sparse_parent(self._file, stored)
            if group is None:
                return None
            self._matrices[home] = sparse_offsets(group, self._size)
        return self._matrices[home]


def _check_ragged(dataset: h5py.Dataset, refusal: str, path: Path | str, name: str) -> None:
    if refusal and dataset.size:
        raise DataError(
            f"{path}: ragged field {name!r}: {refusal}; change that, or restore this file"
        )


def _map_offsets(
    file: h5py.File, name: str, path: Path | str, checksum_rows: int, file_bytes: int
) -> Offsets:
    """Return where a ragged field's offsets lie; raise DataError if they cannot be a slab's."""
    dataset, values = file[f"{name}/{OFFSETS}"], file[f"{name}/{VALUES}"]
    refusal = _bypass_refusal(file, dataset, dataset.dtype, file_bytes, path)
    numbers = [file[name].attrs.get(key) for key in (LONGEST, LARGEST_BLOCK)]
    plain = all(isinstance(number, np.integer) and number >= 0 for number in numbers)
    if refusal or dataset.dtype != np.int64 or not plain:
        raise DataError(
            f"{path}: ragged field {name!r}: its offsets or attributes are not those of a slab; "
            "restore this file"
        )
    first, last = int(dataset[0]), int(dataset[-1])
    elements, longest, largest = int(values.shape[0]), *(int(n) for n in numbers)
    if last - first != elements or not longest <= largest <= elements:
        raise DataError(
            f"{path}: ragged field {name!r} has {elements} elements, its offsets are [{first}, "
            f"{last}] and its longest sample and block {longest} and {largest}; restore this file"
        )
    checksums = _read_checksums(dataset, path, dataset.shape[0] - 1, checksum_rows)
    return Offsets(int(dataset.id.get_offset()), checksums, first, elements, longest, largest)


def _read_checksums(dataset: h5py.Dataset, path: Path | str, samples: int, rows: int) -> bytes:
    """Return the checksums of a dataset, one per `rows` samples; b"" if `rows` is 0."""
    if not rows:
        return b""
    found = np.asarray(dataset.attrs[CHECKSUMS])
    blocks = -(-samples // rows)
    if found.dtype != np.uint32 or found.shape != (blocks,):
        raise DataError(
            f"{path}: {dataset.name} has {found.size} checksums of {found.dtype}, {blocks} of "
            "uint32 are needed; restore this slab"
        )
    return found.tobytes()


def _bypass_refusal(
    file: h5py.File, dataset: h5py.Dataset, dtype: np.dtype[Any], file_bytes: int, path: Path | str
) -> str:
    """Return why rows cannot be read without HDF5; "" if they can, _CHUNKED if chunks prevent it.

    Needed are: a plain file or object; contiguous layout without external files;
    a plain number or bool, in the file exactly as in memory except for byte order; allocated space
    of exactly the size of the rows. Rows that end after the file raise DataError.
    """
    h5py = import_h5py()

    if dataset.is_virtual:
        return "virtual dataset"
    create = dataset.id.get_create_plist()
    if create.get_layout() != h5py.h5d.CONTIGUOUS and not dataset.chunks:
        return "compact layout"
    if file.driver not in ("sec2", "fileobj"):  # of open_hdf5() and of MetadataFile
        return f"file driver {file.driver}"
    if create.get_external_count():
        return "external files"
    if not is_stored_as_in_memory(dataset, dtype):
        return f"{dtype} is stored in a form of its own"
    if dataset.shape[0] and not dataset.size:
        return ""  # rows without bytes
    if dataset.chunks:
        # Until then places of chunks do not count the user block.
        is_old = h5py.version.hdf5_version_tuple < _WITH_USER_BLOCK
        return "user block, and HDF5 is too old" if file.userblock_size and is_old else _CHUNKED
    if not dataset.size or dataset.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
        return "no space allocated"
    offset = dataset.id.get_offset()
    if offset is None or dataset.id.get_storage_size() != dataset.nbytes:
        return "storage size differs from that of the rows"
    if offset + dataset.nbytes > file_bytes:
        raise DataError(
            f"{path}: truncated, {dataset.name} needs bytes [{offset}, {offset + dataset.nbytes}) "
            f"and the file ends at {file_bytes}; copy or convert it again"
        )
    return ""
