"""map_numbered, map_sources: make DataMaps of rows that lie in several datasets.

Such are the images of an Eiger detector, whose master file links data_000001, data_000002 and so on
(NeXus, NXdata), mostly in other files, and virtual datasets of ranges of rows, whose sources are
read without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsgd.errors import DataError

from ..format.data_map import DataMap, Extent, SlabMap
from ..format.fields import FoundFields, stored_name
from ..format.link_guard import named_file
from ..format.opening import examined, identity_of
from ..format.packing_of import check_packed_alike, packing_of
from ..format.slab_folder import FieldSpec, import_h5py
from ..format.stored_rows import source_rows
from ..format.table_columns import find_field
from .file_map import FieldMaps

if TYPE_CHECKING:
    import h5py

__all__ = ["map_numbered", "map_sources"]

_NUMBERED = re.compile(r"(|.*/)data_([0-9]{6})")


class _OtherForm(DataError):
    """Parts differ in type or shape."""


@dataclass(frozen=True)
class _Part:
    """Rows of one dataset."""

    path: Path
    stored: str  # name of the dataset there
    first: int  # row there; -1 for all rows
    count: int


def map_numbered(
    file: h5py.File, path: Path | str, names: Sequence[str] | None, group: str, fields: FoundFields
) -> DataMap | None:
    """Join the datasets data_000001, data_000002 ... of a group "data" to a field "data" in it.

    Returns None if there are none, the group has such a field, or others are wanted. Raises
    DataError if a dataset is missing among them, or does not fit.
    """
    found = fields.inside(group) if group else fields
    matches = [match for match in map(_NUMBERED.fullmatch, found.shapes) if match]
    homes = {match[1] for match in matches}
    if len(homes) != 1 or isinstance(path, str):
        return None
    home = homes.pop()
    field = f"{home}data"
    if f"/{stored_name(group, home)}".rstrip("/").rpartition("/")[2] != "data":
        return None
    if field in found.shapes:
        return None
    if names is not None and [name.strip("/") for name in names] != [field]:
        return None
    absent = {**found.left_out, **found.broken}
    for name, why in absent.items():
        if _NUMBERED.fullmatch(name):
            raise DataError(f"{path}: {name!r}: {why}; restore it, or name the fields to use")
    for one, other in pairwise(matches):
        if int(other[2]) != int(one[2]) + 1:
            raise DataError(
                f"{path}: {other[0]!r} comes after {one[0]!r}; restore what is missing, or name "
                "the fields to use"
            )
    parts = []
    for match in matches:
        item = file[stored_name(group, match[0])]
        parts.append(_Part(Path(item.file.filename).absolute(), item.name, -1, item.shape[0]))
    specs, slabs = _slabs([(field, parts)], path)
    packing = packing_of(file, [match[0] for match in matches], group)
    first, *later = [(repr(match[0]), packing.get(match[0], {})) for match in matches]
    for each in later:
        check_packed_alike(path, first, each)
    others = {name: "beside the images" for name in found.shapes if not _NUMBERED.fullmatch(name)}
    note = f"{len(matches)} datasets, {matches[0][0]} to {matches[-1][0]}, are read as one, {field}"
    samples = sum(slab.count for slab in slabs)
    left_out = {} if names is not None else found.left_out | others
    return DataMap(
        *(str(path), specs, slabs, samples, None, left_out),
        group=group,
        packing={field: first[1]} if first[1] else {},
        note=note,
    )


def map_sources(file: h5py.File, data: DataMap) -> DataMap:
    """Return a map of the sources of virtual datasets, or `data` if HDF5 must read some rows.

    All fields must be virtual, with ranges of whole rows from equal places of equal files.
    """
    columns = []
    for spec in data.fields:
        item, column = find_field(file, stored_name(data.group, spec.name))
        parts = [] if column else _parts_of(item)
        if not parts or data.slabs[0].extents[spec.name].unwritten:
            return data
        columns.append((spec.name, parts))
    if len({tuple((part.path, part.count) for part in parts) for _, parts in columns}) != 1:
        return data
    try:
        specs, slabs = _slabs(columns, data.path)
    except _OtherForm:
        return data
    extents = [extent for slab in slabs for extent in slab.extents.values()]
    if specs != data.fields or any(extent.refusal for extent in extents):
        return data
    return replace(data, slabs=slabs)


def _parts_of(item: Any) -> list[_Part]:
    """Return the sources of a virtual dataset in the order of its rows; [] for other datasets."""
    if not isinstance(item, import_h5py().Dataset) or not item.is_virtual:
        return []
    found = []
    for name, stored, target, source in source_rows(item):
        place, reason = Path(item.file.filename), ""
        if name != ".":
            place, reason = named_file(place, name, "HDF5_VDS_PREFIX")
        if reason or target is None or source is None:
            return []
        count = target[1] - target[0]
        found.append((target[0], _Part(place.absolute(), stored, source, count)))
    found.sort(key=lambda pair: pair[0])
    starts = [start for start, _ in found]
    stops = [start + part.count for start, part in found]
    return [part for _, part in found] if starts == [0, *stops[:-1]] else []


def _slabs(
    columns: Sequence[tuple[str, Sequence[_Part]]], path: Path | str
) -> tuple[tuple[FieldSpec, ...], tuple[SlabMap, ...]]:
    """Return fields, and a slab for each part; fields have equal paths and counts of parts."""
    slabs: list[SlabMap] = []
    specs: tuple[FieldSpec, ...] = ()
    start = 0
    for number, part in enumerate(columns[0][1]):
        with examined(part.path) as file:
            identity = identity_of(part.path.stat())
            fields = FieldMaps(file, part.path, identity[0])
            of_slab = []
            for name, parts in columns:
                spec, extent, rows = fields.field(name, parts[number].stored)
                of_slab.append((spec, _extent_of(parts[number], spec, extent, rows)))
        if slabs and tuple(spec for spec, _ in of_slab) != specs:
            raise _OtherForm(
                f"{path}: {part.stored!r} of {part.path} is {of_slab[0][0].shape} "
                f"{of_slab[0][0].dtype}, the first part {specs[0].shape} {specs[0].dtype}"
            )
        specs = tuple(spec for spec, _ in of_slab)
        extents = {spec.name: extent for spec, extent in of_slab}
        slabs.append(SlabMap(str(part.path), start, part.count, identity, extents))
        start += part.count
    return specs, tuple(slabs)


def _extent_of(part: _Part, spec: FieldSpec, whole: Extent, rows: int) -> Extent:
    """Return the extent of a part of a dataset; with a refusal if it cannot be read alone."""
    if part.first == 0 or (part.first < 0 and rows == part.count):
        return replace(whole, stored=part.stored)
    if part.first < 0 or whole.refusal or whole.chunks is not None or whole.offsets is not None:
        return replace(whole, refusal="not all of a dataset")
    return replace(whole, offset=whole.offset + part.first * spec.row_bytes)
