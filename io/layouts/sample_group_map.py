"""map_sample_groups: makes a DataMap of a file with a group for each sample.

The arrays of a field lie apart, one in each group. If all are contiguous, or one chunk each, the
map has the place of each; otherwise h5py reads them, by their names. If arrays of a field differ in
their first axis, the field is ragged, and each group a slab of one sample.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.errors import DataError

from ..format.chunks import Chunks, chunks_of
from ..format.data_map import DataMap, Extent, Offsets, SlabMap
from ..format.fields import names_in, stored_name
from ..format.filters import filters_of
from ..format.opening import Identity
from ..format.packing_of import check_packed_alike, packing_of
from ..format.slab_folder import FieldSpec, import_h5py
from ..format.sparse_kind import PARTS
from ..format.stored_rows import StoredRows
from ..format.supported_dtype import (
    NO_NUMBERS,
    UnsupportedType,
    check_claim,
    check_h5py_reads,
    is_stored_as_in_memory,
    supported_dtype,
)
from .file_map import map_file
from .sample_arrays import FirstArray, FoundArrays, SampleArrays
from .sample_groups import SampleGroups

if TYPE_CHECKING:
    import h5py

__all__ = ["map_sample_groups"]

_AT_ONCE = 4096  # groups
_APART = "its arrays are not all contiguous, or all one chunk with the same filters"


def map_sample_groups(
    file: h5py.File,
    path: Path | str,
    identity: Identity,
    groups: SampleGroups,
    names: Sequence[str] | None,
    group: str,
    ragged: Collection[str] = (),
) -> DataMap:
    """Examine the groups of an open file; each is a sample, in the order of their numbers.

    Groups without one of the fields are left out. Only hard links are followed.

    Args:
        file: the open file.
        path: its path or URL, for messages and the map.
        identity: of the file.
        groups: what find_sample_groups() found in it.
        names: of fields inside the groups; None for those that most groups have.
        group: the group that was asked for, "" for the whole file.
        ragged: fields that are ragged even if their arrays have equal shapes.

    Raises:
        DataError: the arrays of a field differ in type, in more than the first axis, or in packing,
            or cannot be read.
    """
    home = file[groups.home or "/"]
    left_out = names_in(home)[1]
    left_out |= {name: "only some groups have it" for name in groups.others if names is None}
    columns = [
        _Column(name.strip("/"), file, path, identity[0], is_ragged=name.strip("/") in ragged)
        for name in (groups.fields if names is None else names)
    ]
    columns = _begun(columns, home.id, groups, left_out if names is None else None)
    if not columns:
        raise DataError(f"{path}: no field of numbers in its groups ({', '.join(groups.fields)})")
    arrays = _arrays(file, identity, columns)
    places = _places(home.id, groups, columns, left_out, arrays)
    if not places:
        raise DataError(f"{path}: no group has all of {', '.join(c.name for c in columns)}")
    note = f"each of {len(places)} groups, {places[0]} to {places[-1]}, is read as one sample"
    if longer := [column.name for column in columns if column.is_ragged]:
        note += f", of any length in {', '.join(longer)}"
    return DataMap(
        str(path),
        tuple(column.spec() for column in columns),
        _slabs(file, path, identity, places, columns),
        len(places),
        None,
        left_out,
        group=group,
        packing={column.name: column.packing for column in columns if column.packing},
        note=note,
        sample_group=places[0],
    )


def _places(
    home: Any,
    groups: SampleGroups,
    columns: Sequence[_Column],
    left_out: dict[str, str],
    arrays: SampleArrays | None,
) -> tuple[str, ...]:
    """Add all groups to the columns; return those that have all fields, others go to `left_out`.

    Groups that `arrays` does not know are examined by h5py, and all if a field needs it.
    """
    found: list[str] = []

    def examine(names: Sequence[str]) -> None:
        for name in names:
            place = stored_name(groups.home, name)
            missing = _add(home, name, place, columns)
            if missing:
                left_out[name] = f"no {', '.join(missing)}"
            else:
                found.append(place)

    for start in range(0, len(groups.names), _AT_ONCE):
        names = groups.names[start : start + _AT_ONCE]
        if arrays is None or not all(column.is_located for column in columns):
            examine(names)
            continue
        those, begin = arrays.find(home, names), 0
        for stop in (*np.flatnonzero(~those.known).tolist(), len(names)):
            if all(column.is_located for column in columns):
                for number, column in enumerate(columns):
                    column.add_found(those, number, slice(begin, stop))
                found += [stored_name(groups.home, name) for name in names[begin:stop]]
                begin = stop
            examine(names[begin : stop + 1])
            begin = stop + 1
    return tuple(found)


def _slabs(
    file: h5py.File,
    path: Path | str,
    identity: Identity,
    places: tuple[str, ...],
    columns: Sequence[_Column],
) -> tuple[SlabMap, ...]:
    """Return one slab of all samples, or one for each sample if some fields are ragged."""
    if len(places) > 1 and not any(column.is_ragged for column in columns):
        extents = {column.name: column.extent(places) for column in columns}
        return (SlabMap(str(path), 0, len(places), identity, extents),)
    by_column = [
        [
            column.ragged_extent(number, place)
            or _ragged_extent(file, path, identity, place, column.name)
            for number, place in enumerate(places)
        ]
        if column.is_ragged
        else column.extents(places)
        for column in columns
    ]
    names = [column.name for column in columns]
    return tuple(
        SlabMap(str(path), number, 1, identity, dict(zip(names, extents, strict=True)))
        for number, extents in enumerate(zip(*by_column, strict=True))
    )


def _ragged_extent(
    file: h5py.File, path: Path | str, identity: Identity, place: str, name: str
) -> Extent:
    """Return the extent of one array as that of a ragged field with one sample."""
    _, slab = map_file(file, path, identity, 0, [name], group=place)
    found = _with_offsets(slab.extents[name], slab.count, stored_name(place, name))
    return found if slab.count else replace(found, offset=0, refusal="")


def _with_offsets(extent: Extent, rows: int, stored: str) -> Extent:
    """Return an extent as that of a ragged field, whose only sample has `rows` elements."""
    ends = np.array([0, rows], np.int64).tobytes()
    offsets = Offsets(-1, b"", 0, rows, rows, rows, held=ends)
    return replace(extent, offsets=offsets, stored=stored)


def _begun(
    columns: Sequence[_Column], home: Any, groups: SampleGroups, left_out: dict[str, str] | None
) -> list[_Column]:
    """Begin each column with its first array; other types go to `left_out`, if given."""
    found = []
    for column in columns:
        try:
            column.begin(next(filter(None, (_find(home, one, column) for one in groups.names))))
        except UnsupportedType as error:
            if left_out is None:
                raise DataError(str(error)) from None  # a conversion can read no such groups either
            left_out[column.name] = NO_NUMBERS
        else:
            found.append(column)
    return found


def _arrays(file: h5py.File, identity: Identity, columns: Sequence[_Column]) -> SampleArrays | None:
    """Return the finder of arrays that are stored as the first ones are."""
    if not all(column.is_located for column in columns):
        return None
    return SampleArrays(file, identity[0], [column.first_array() for column in columns])


def _add(home: Any, name: str, place: str, columns: Sequence[_Column]) -> list[str]:
    """Add a sample to all columns, or return the fields that it lacks."""
    h5py = import_h5py()

    found = _linked(h5py, home, [name.encode()], h5py.h5g.open) if name else home
    items = [found and _linked(h5py, found, column.steps, h5py.h5d.open) for column in columns]
    missing = [each.name for each, item in zip(columns, items, strict=True) if item is None]
    if not missing:
        for column, item in zip(columns, items, strict=True):
            column.add(item, f"{place}/{column.name}")
    return missing


def _find(home: Any, name: str, column: _Column) -> Any:
    """Return the array of a field in one sample; None if there is none."""
    h5py = import_h5py()

    return _linked(h5py, home, [*([name.encode()] if name else []), *column.steps], h5py.h5d.open)


def _linked(h5py: Any, group: Any, steps: Sequence[bytes], open_last: Any) -> Any:
    """Return what hard links lead to, opened; None if they lead nowhere or to something else."""
    for left in range(len(steps), 0, -1):
        step = steps[-left]
        try:
            if group.links.get_info(step).type != h5py.h5l.TYPE_HARD:
                return None
            group = (h5py.h5g.open if left > 1 else open_last)(group, step)
        except (KeyError, RuntimeError, TypeError, ValueError):
            return None  # no such link, or another kind of object
    return group


class _Column:
    """The arrays of one field, one for each sample."""

    def __init__(
        self, name: str, file: h5py.File, path: Path | str, file_bytes: int, *, is_ragged: bool
    ) -> None:
        self.name, self.steps = name, [step.encode() for step in name.split("/")]
        self.is_ragged = is_ragged
        self.packing: dict[str, Any] = {}
        self._file, self._path, self._file_bytes = file, path, file_bytes
        self._h5py = import_h5py()
        self._chunks: Chunks | None = None  # of the first array
        self._refusal, self._unwritten = "", ""
        self._stored = StoredRows()
        self._positions, self._sizes, self._masks = array("q"), array("q"), array("I")
        self._rows = array("q")  # of arrays in one piece, found by their headers; others -1

    def add(self, item: Any, place: str) -> None:
        """Add the array of the next sample, at `place` in the file. Raises DataError."""
        if item.shape != self._shape or not item.get_type().equal(self._type):
            self._check_form(item, place)
            self.is_ragged = True
        if self.packing or self._h5py.h5a.get_num_attrs(item):
            self._check_packing(place)
        if self.is_ragged or self._refusal:
            self._check_rows(item, place)
            self._append(-1, 0, 0)
        elif self._chunks is None:
            self._take_contiguous(item, place)
        else:
            self._take_chunk(item, place)

    def add_found(self, arrays: FoundArrays, number: int, samples: slice) -> None:
        """Add the arrays of some samples, of which this is field `number`."""
        rows = arrays.rows[number, samples]
        self.is_ragged = self.is_ragged or bool((rows != self._row_count).any())
        self._positions.frombytes(arrays.positions[number, samples].tobytes())
        self._sizes.frombytes(arrays.sizes[number, samples].tobytes())
        self._masks.frombytes(arrays.masks[number, samples].tobytes())
        self._rows.frombytes((rows if self._row_bytes else np.full_like(rows, -1)).tobytes())

    @property
    def is_located(self) -> bool:
        """True if the places of arrays in the file are wanted."""
        return not self._refusal and self._nbytes > 0

    @property
    def _row_count(self) -> int:
        return self._shape[0] if self._shape else 1

    @property
    def _row_bytes(self) -> int:
        """Bytes along the first axis of an array in one piece; 0 of one in a chunk."""
        return 0 if self._chunks is not None else self._nbytes // self._row_count

    def first_array(self) -> FirstArray:
        """Return the first array and its place."""
        place = self._first.id.get_offset(), self._nbytes, 0
        if self._chunks is not None:
            (position, size), masks = self._chunks.place(0), array("I", self._chunks.masks)
            place = position, size, masks[0]
        address = self._file.id.links.get_info(self._first.name.encode()).u
        return FirstArray(self.name, address, place, self._row_count, self._row_bytes)

    def begin(self, item: Any) -> None:
        """Take the form of all arrays from this one, the first. Raises DataError."""
        self._first, self._type = self._h5py.Dataset(item), item.get_type()
        self._shape = self._first.shape
        self._dtype = supported_dtype(self._first, self._path, self.name)
        if self._shape is None:
            raise DataError(f"{self._path}: {self._first.name} has no values; name other fields")
        check_claim(self._first, self._dtype, self._file_bytes, self._path)
        self._nbytes = math.prod(self._shape) * self._dtype.itemsize
        self.packing = packing_of(self._file, [self._first.name]).get(self._first.name, {})
        if self._file.driver not in ("sec2", "fileobj") or self._file.userblock_size:
            self._refusal = f"file driver {self._file.driver}, or a user block"
        elif not is_stored_as_in_memory(self._first, self._dtype):
            self._refusal = f"{self._dtype} is stored in a form of its own"
        elif self._first.chunks is not None and self._first.chunks == self._shape:
            found = chunks_of(self._first, self._file_bytes)
            self._chunks = None if isinstance(found, str) else found
            self._refusal = found if isinstance(found, str) else ""
            self._filters = filters_of(self._first.id.get_create_plist())
        elif item.get_offset() is None:
            self._refusal = _APART

    def _check_form(self, item: Any, place: str) -> None:
        """Raise DataError unless an array differs from the first one in its first axis alone."""
        other = self._h5py.Dataset(item)
        shape = other.shape
        alike = shape is not None and len(shape) == len(self._shape) > 0
        if not alike or shape[1:] != self._shape[1:] or not item.get_type().equal(self._type):
            raise DataError(
                f"{self._path}: has a group for each sample, and {place} is {shape} {other.dtype}, "
                f"but {self._first.name} {self._shape} {self._first.dtype}; one type, and shapes "
                "that differ in the first axis alone, are needed; name other fields"
            )

    def _check_packing(self, place: str) -> None:
        found = packing_of(self._file, [place]).get(place, {})
        check_packed_alike(self._path, (self._first.name, self.packing), (place, found))

    def _take_contiguous(self, item: Any, place: str) -> None:
        position = item.get_offset()  # None unless contiguous, in this file, and written
        if position is None or not self._nbytes:
            self._give_up(item, place)
            return
        self._keep(position, self._nbytes, 0, place)

    def _take_chunk(self, item: Any, place: str) -> None:
        assert self._chunks is not None
        create = item.get_create_plist()
        is_chunked = create.get_layout() == self._h5py.h5d.CHUNKED
        if (
            not is_chunked
            or create.get_chunk() != self._shape
            or filters_of(create) != self._filters
            or item.get_num_chunks() != 1
        ):
            self._give_up(item, place)
            return
        chunk = item.get_chunk_info(0)
        if not chunk.byte_offset or any(chunk.chunk_offset):
            raise DataError(
                f"{self._path}: damaged, the chunk of {place} lies at {tuple(chunk.chunk_offset)}, "
                f"in byte {chunk.byte_offset}; copy or convert it again"
            )
        self._keep(chunk.byte_offset, chunk.size, chunk.filter_mask, place)

    def _keep(self, position: int, nbytes: int, mask: int, place: str) -> None:
        if position + nbytes > self._file_bytes:
            raise DataError(
                f"{self._path}: truncated, {place} needs bytes [{position}, {position + nbytes}) "
                f"and the file ends at {self._file_bytes}; copy or convert it again"
            )
        self._append(position, nbytes, mask)

    def _append(self, position: int, nbytes: int, mask: int) -> None:
        self._positions.append(position)
        self._sizes.append(nbytes)
        self._masks.append(mask)
        self._rows.append(-1)

    def _give_up(self, item: Any, place: str) -> None:
        """Leave this field to h5py. Arrays until here were written, in this file."""
        self._refusal, self._chunks = _APART, None
        self._check_rows(item, place)
        self._append(-1, 0, 0)

    def _check_rows(self, item: Any, place: str) -> None:
        gaps = self._stored.gaps(self._h5py.Dataset(item))
        if gaps and not self._unwritten:
            self._unwritten = f"{place}: {gaps}"

    def spec(self) -> FieldSpec:
        shape = self._shape[1:] if self.is_ragged else self._shape
        return FieldSpec(self.name, shape, self._dtype.newbyteorder("="), self.is_ragged)

    def ragged_extent(self, number: int, place: str) -> Extent | None:
        """Return the extent of a ragged field in one sample, if its header has said it all."""
        rows = self._rows[number]
        if rows < 0 or self.steps[-1].decode() in PARTS:  # of a sparse matrix, perhaps
            return None
        found = Extent(self._positions[number], self._dtype, 1, self._dtype.itemsize, "")
        return _with_offsets(found, rows, f"{place}/{self.name}")

    def extents(self, places: tuple[str, ...]) -> Iterator[Extent]:
        """Yield where the array of each sample is, as extent() does for all."""
        whole = self.extent(())
        for number, place in enumerate(places):
            if self._refusal:
                yield replace(whole, places=(place,))
            elif whole.chunks is None:
                yield replace(whole, offset=self._positions[number], positions=b"")
            else:
                at, masks = slice(8 * number, 8 * number + 8), slice(4 * number, 4 * number + 4)
                found = whole.chunks
                stored = (found.offsets[at], found.sizes[at], found.masks[masks])
                offsets, sizes, mask = stored
                yield replace(
                    whole, chunks=replace(found, offsets=offsets, sizes=sizes, masks=mask)
                )

    def extent(self, places: tuple[str, ...]) -> Extent:
        """Return where the arrays are, `places` being the groups that hold them."""
        chunks, positions = None, b""
        if self._refusal:
            check_h5py_reads(self._first, self._refusal, self._path, self.name)
        elif self._chunks is None:
            positions = self._positions.tobytes()
        else:
            chunks = replace(
                self._chunks,
                shape=(1, *self._shape),
                row_shape=self._shape,
                offsets=self._positions.tobytes(),
                sizes=self._sizes.tobytes(),
                masks=self._masks.tobytes(),
            )
        return Extent(
            0 if positions else -1,
            self._dtype,
            1,
            self._nbytes,
            self._refusal,
            chunks=chunks,
            unwritten=self._unwritten,
            positions=positions,
            places=places if self._refusal else (),
        )
