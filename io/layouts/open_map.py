"""open_map: makes a DataMap of files or URLs, without reading samples."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.errors import DataError

from ..format.chunks import chunks_of
from ..format.data_map import DataMap, Extent, Offsets, SlabMap
from ..format.fields import choose_fields, inner_name, linked_file, stored_name
from ..format.index_checksum import check_index
from ..format.opening import (
    Folder,
    Identity,
    LocalFolder,
    RemoteFolder,
    UnknownFields,
    examined,
    examined_object,
    identity_of,
)
from ..format.packing_of import packing_of
from ..format.slab_folder import (
    CHECKSUMS,
    INDEX_NAME,
    LARGEST_BLOCK,
    LONGEST,
    OFFSETS,
    VALUES,
    FieldSpec,
    SlabHeader,
    import_h5py,
    is_slab_folder,
    read_header,
    slab_name,
)
from ..format.stored_rows import StoredRows
from ..format.supported_dtype import check_claim, check_h5py_reads, is_stored_as_in_memory
from ..format.table_columns import find_field, form_of
from ..remote.metadata_file import MetadataFile
from ..remote.object_reader import ObjectMissing, ObjectReader, RemoteAccess
from ..remote.urls import is_url, names_a_file, parent_url, url_of
from .sample_group_map import map_sample_groups
from .sample_groups import find_sample_groups

if TYPE_CHECKING:
    import h5py

__all__ = [
    "check_unique",
    "open_map",
    "open_undamaged",
]

_CHUNKED = "chunked layout"
_MOST_MISSING = 1024  # and as many slabs as exist: more missing ones are refused at once


def open_map(
    path: str | os.PathLike[str],
    fields: Sequence[str] | None = None,
    group: str | None = None,
    access: RemoteAccess | None = None,
) -> DataMap:
    """Examine a slab folder, its index file, an ordinary HDF5 file, or the URL of one.

    Soft and external links are followed. Single values and links that lead nowhere are named in
    left_out.

    Args:
        path: a path or URL (https, http or s3).
        fields: names of the datasets to use; by default all, which must have the same first
            dimension.
        group: of the files: it replaces the whole file, and names are those inside it.
        access: how long requests to a server are repeated.

    Raises:
        DataError: something is missing, truncated, foreign, unsealed, or of a type that cannot
            become a tensor; names the file.
        ValueError: unknown names of fields or of the group.
    """
    if isinstance(fields, str):
        raise TypeError(f"fields={fields!r} is one string; use a list of names")
    if not all(isinstance(name, str) for name in fields or ()):
        raise TypeError(f"fields={fields!r}; use a list of names")
    check_unique(fields or ())
    inside_of = inner_name(group)
    if is_url(path):
        return _map_url(url_of(path), fields, inside_of, access or RemoteAccess())
    location = Path(path).absolute()
    if location.is_dir():
        if not is_slab_folder(location):
            inside = ", ".join(sorted(p.name for p in location.iterdir() if is_slab_folder(p)))
            remedy = f"it holds {inside}" if inside else "make one: hsgd data convert SRC DST"
            raise DataError(f"{location}: no slab folder, {INDEX_NAME} is missing; {remedy}")
        return _map_folder(LocalFolder(location), fields, inside_of)
    with examined(location) as file:
        data = _map_single(file, location, identity_of(location.stat()), fields, inside_of)
    return data or _map_folder(LocalFolder(location.parent), fields, inside_of)


def _map_url(url: str, names: Sequence[str] | None, group: str, access: RemoteAccess) -> DataMap:
    """Do open_map() for a file or a folder behind a URL."""
    reader = ObjectReader(replace(access, disk=None))  # metadata is small, and not cached
    data, folder = None, url
    if names_a_file(url):
        content, folder = MetadataFile(url, reader), parent_url(url)
        with examined_object(content) as file:
            data = _map_single(file, url, content.identity, names, group)
    if data is None:
        home = RemoteFolder(folder, reader)
        if not home.has(INDEX_NAME):
            raise ObjectMissing(
                f"{url}: no slab folder, {INDEX_NAME} is missing; check the URL, which of one file "
                "ends in .h5"
            )
        data = _map_folder(home, names, group)
    return replace(data, access=access)


def _map_single(
    file: h5py.File,
    path: Path | str,
    identity: Identity,
    names: Sequence[str] | None,
    group: str,
) -> DataMap | None:
    """Examine one open file as a dataset; return None for the index of a slab folder."""
    header = read_header(file)
    if header is not None and header.slab_index < 0:
        return None
    if header is not None and not header.sealed:
        raise DataError(f"{path}: not sealed (writing was cut off); convert again")
    if header is None:
        groups = find_sample_groups(file, group)
        if groups is not None and groups.are_meant(names):
            return map_sample_groups(file, path, identity, groups, names, group)
    chosen, left_out = choose_fields(file, path, names, group)
    specs, slab = _map_file(file, path, identity, 0, chosen, group=group)
    return DataMap(
        str(path),
        specs,
        (slab,),
        slab.count,
        None,
        left_out,
        group=group,
        packing=packing_of(file, chosen, group),
    )


def check_unique(names: Sequence[str]) -> None:
    """Raise ValueError if a field is named twice."""
    plain = [name.strip("/") for name in names]
    twice = [name for place, name in enumerate(plain) if name in plain[:place]]
    if twice:
        raise ValueError(f"field {twice[0]!r} is named twice; name each field once")


@contextmanager
def _open_index(folder: Folder) -> Iterator[tuple[h5py.File, SlabHeader]]:
    index_path = folder.place(INDEX_NAME)
    if isinstance(index_path, Path):
        check_index(index_path)
    with folder.examined(INDEX_NAME) as file:
        index = read_header(file)
        if index is None:
            raise DataError(f"{index_path}: not written by hsgd; convert the data again")
        if not index.sealed:
            raise DataError(f"{index_path}: not sealed (writing was cut off); convert again")
        present = folder.expect(index.num_slabs)
        if present is not None and index.num_slabs > 2 * present + _MOST_MISSING:
            raise DataError(
                f"{index_path}: attribute num_slabs is {index.num_slabs}, and {present} slabs are "
                "there; restore the slabs or this file, or convert again"
            )
        yield file, index


def _map_folder(folder: Folder, names: Sequence[str] | None, group: str) -> DataMap:
    """Examine the index and every slab, and check that they belong together."""
    # Virtual datasets are for other programs: their maps have no checksum and load slowly.
    with _open_index(folder) as (file, index):
        specs, slabs = _map_slabs(folder, index, names, group)
        packing = packing_of(file, [spec.name for spec in specs], group)
    samples = sum(slab.count for slab in slabs)
    return DataMap(folder.path, specs, slabs, samples, index, group=group, packing=packing)


def _map_slabs(
    folder: Folder, index: SlabHeader, names: Sequence[str] | None, group: str
) -> tuple[tuple[FieldSpec, ...], tuple[SlabMap, ...]]:
    slabs: list[SlabMap] = []
    specs: tuple[FieldSpec, ...] = ()
    start = 0
    for number in range(index.num_slabs):
        chosen = [spec.name for spec in specs] if slabs else None
        slab_specs, slab = _map_slab(folder, index, number, start, names, group, chosen)
        if slabs and slab_specs != specs:
            raise DataError(
                f"{slab.path}: fields differ from those of slab 0; restore slab {number}"
            )
        specs = slab_specs
        slabs.append(slab)
        start += slab.count
    if start != index.num_samples:
        raise DataError(
            f"{folder.path}: {start} samples in the slabs, {index.num_samples} in the index; "
            "convert again"
        )
    return specs, tuple(slabs)


def _map_slab(
    folder: Folder,
    index: SlabHeader,
    number: int,
    start: int | None,
    names: Sequence[str] | None = None,
    group: str = "",
    chosen: Sequence[str] | None = None,
) -> tuple[tuple[FieldSpec, ...], SlabMap]:
    """Examine one slab.

    `start` is its first sample, None if only its header says so. `chosen` are the fields if they
    were already chosen from `names`.
    """
    name = slab_name(number)
    path = folder.place(name)
    if not folder.has(name):
        raise DataError(
            f"{path}: slab {number} of {index.num_slabs} is missing; restore it or convert again"
        )
    with folder.examined(name) as file:
        header = read_header(file)
        if start is None:
            start = 0 if header is None else header.global_start
        _check_slab(path, header, index, number, start)
        if chosen is None:
            chosen = choose_fields(file, path, names, group)[0]
        specs, slab = _map_file(
            file, path, folder.identity(name), start, chosen, index.checksum_rows, group
        )
        if header is not None and header.num_samples != slab.count:
            raise DataError(
                f"{path}: {slab.count} samples, its header says {header.num_samples}; "
                f"restore slab {number}"
            )
    return specs, slab


def open_undamaged(path: str | os.PathLike[str]) -> tuple[DataMap, list[str]]:
    """Call open_map(), but leave out damaged slabs; also return a line for each of these.

    Raises as open_map() for other damage, such as that of the index, and for all errors of URLs,
    whose servers may fail without damage.
    """
    try:
        return open_map(path), []
    except DataError:
        location = Path(path).absolute()
        home = location.parent if location.name == INDEX_NAME else location
        if is_url(path) or not is_slab_folder(home):
            raise
        folder = LocalFolder(home)
        with _open_index(folder) as (_, index):
            pass
        specs, slabs, damage = _usable_slabs(folder, index)
        if not damage:
            raise
    samples = sum(slab.count for slab in slabs)
    return DataMap(folder.path, specs, tuple(slabs), samples, index), damage


def _usable_slabs(
    folder: Folder, index: SlabHeader
) -> tuple[tuple[FieldSpec, ...], list[SlabMap], list[str]]:
    """Return the fields of most slabs, the usable slabs, and why the others cannot be used.

    The usable slabs are numbered as if there were no others.
    """
    opened: list[tuple[tuple[FieldSpec, ...], SlabMap] | str] = []
    start: int | None = 0
    for number in range(index.num_slabs):
        try:
            specs, slab = _map_slab(folder, index, number, start)
        except (DataError, UnknownFields) as error:
            opened.append(str(error))
            start = None
            continue
        opened.append((specs, slab))
        start = slab.start + slab.count
    usual = Counter(one[0] for one in opened if not isinstance(one, str)).most_common(1)
    fields = usual[0][0] if usual else ()
    slabs, damage, start = [], [], 0
    for number, one in enumerate(opened):
        if isinstance(one, str):
            damage.append(one)
        elif one[0] == fields:
            slabs.append(replace(one[1], start=start))
            start += one[1].count
        else:
            damage.append(
                f"{one[1].path}: fields differ from those of most slabs; restore slab {number}"
            )
    return fields, slabs, damage


def _check_slab(
    path: Path | str, header: SlabHeader | None, index: SlabHeader, number: int, start: int
) -> None:
    """Raise DataError for a slab that is unsealed, or not slab `number` of this dataset."""
    if header is None:
        raise DataError(f"{path}: foreign file, not a slab of hsgd; restore slab {number}")
    if not header.sealed:
        raise DataError(f"{path}: not sealed (writing was cut off); convert again")
    if header.dataset_uuid != index.dataset_uuid:
        raise DataError(
            f"{path}: slab of another dataset ({header.dataset_uuid}, the index has "
            f"{index.dataset_uuid}); restore slab {number}"
        )
    if header.checksum_rows != index.checksum_rows:
        raise DataError(
            f"{path}: a checksum for {header.checksum_rows} rows, the index says "
            f"{index.checksum_rows}; restore slab {number}"
        )
    found = (header.slab_index, header.num_slabs, header.global_start)
    wanted = (number, index.num_slabs, start)
    if found != wanted:
        raise DataError(
            f"{path}: says (slab, slabs, first sample) = {found}, expected {wanted}; "
            "restore the original file names"
        )


def _map_file(
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
