"""map_file: the place of the rows of each field of one file, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.errors import DataError

from ..format.chunks import chunks_of
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
from ..format.stored_rows import StoredRows
from ..format.supported_dtype import check_claim, check_h5py_reads, is_stored_as_in_memory
from ..format.table_columns import find_field, form_of

if TYPE_CHECKING:
    import h5py

__all__ = ["map_file"]

_CHUNKED = "chunked layout"


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
    size = identity[0]
    specs, extents, stored_rows = [], {}, StoredRows()
    for name in names:
        stored = stored_name(group, name)
        item, column = find_field(file, stored)
        ragged = not column and LONGEST in item.attrs
        dataset = item[VALUES] if ragged else item
        shape, dtype = form_of(dataset, column, path, name)
        stored_dtype = dataset.dtype if column else dtype
        unwritten = stored_rows.gaps(dataset)
        specs.append(FieldSpec(name, shape[1:], dtype.newbyteorder("="), ragged))
        other = linked_file(file, dataset)
        linked = None if other is None else (str(other), identity_of(other.stat()))
        file_bytes = size if linked is None else linked[1][0]
        check_claim(dataset, stored_dtype, file_bytes, path)
        home = file if other is None else dataset.file
        refusal = "a column of a table" if column else ""
        refusal = refusal or _bypass_refusal(home, dataset, dtype, file_bytes, other or path)
        mapped = None
        if linked is not None:
            refusal = f"external link to {linked[0]}"
        elif refusal == _CHUNKED:
            found = chunks_of(dataset, size)
            refusal, mapped = (found, None) if isinstance(found, str) else ("", found)
        if refusal:
            check_h5py_reads(dataset, refusal, path, name)
        offsets = _map_offsets(file, stored, path, checksum_rows, size) if ragged else None
        if offsets is not None:
            if mapped is None and not dtype.isnative:
                refusal = "its values are in another byte order"
            _check_ragged(dataset, refusal, path, name)
            refusal = ""
        offset = -1 if refusal or mapped is not None else int(dataset.id.get_offset() or 0)
        chunks = dataset.chunks or (1,)
        samples = dataset.shape[0] if offsets is None else file[f"{stored}/{OFFSETS}"].shape[0] - 1
        checksums = _read_checksums(dataset, path, samples, checksum_rows)
        extents[name] = Extent(
            offset,
            dtype,
            chunks[0],
            math.prod(chunks) * stored_dtype.itemsize,
            refusal,
            checksums,
            offsets,
            mapped,
            linked,
            unwritten=unwritten,
        )
    return tuple(specs), SlabMap(str(path), start, samples, identity, extents)


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

    Needed are: a plain file or object without user block; contiguous layout without external files;
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
    if file.userblock_size:
        return f"user block of {file.userblock_size} bytes"
    if create.get_external_count():
        return "external files"
    if not is_stored_as_in_memory(dataset, dtype):
        return f"{dtype} is stored in a form of its own"
    if dataset.shape[0] and not dataset.size:
        return ""  # rows without bytes
    if dataset.chunks:
        return _CHUNKED
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
