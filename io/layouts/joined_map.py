"""joined_map: makes one DataMap of several files, whose samples come one after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from hsgd.errors import DataError

from ..format.attributes import class_names_of
from ..format.data_map import DataMap
from ..format.fields import UnequalRows, stored_name
from ..format.opening import UnknownFields
from ..format.packing_of import Packing, packed_alike, packing_text
from ..format.slab_folder import FieldSpec
from ..remote.urls import is_url
from .files_of import Place
from .single_map import SingleMap

__all__ = ["check_alike", "joined_map"]


def joined_map(single: SingleMap, places: Sequence[Place], path: str) -> DataMap:
    """Examine several files as one dataset, `path` in messages.

    The fields are those of the first file. Raises DataError if the files differ, ValueError for
    what no file has.
    """
    if len({is_url(place) for place in places}) > 1:
        raise ValueError(f"{path}: files and URLs; use one kind")
    if single.layout == "files":
        return _samples(single, places, path)
    try:
        first = single.open(places[0])
    except (UnequalRows, UnknownFields):
        if single.layout != "auto" or len(places) == 1:
            raise
        try:
            return _samples(replace(single, layout="files"), places, path)
        except UnknownFields:
            pass
        raise
    return _joined([first, *_others(single, first, places)], path)


def _others(single: SingleMap, first: DataMap, places: Sequence[Place]) -> list[DataMap]:
    named = replace(single, names=[spec.name for spec in first.fields])
    return [named.open(place) for place in places[1:]]


def _samples(single: SingleMap, places: Sequence[Place], path: str) -> DataMap:
    """Join files that are samples; fields are ragged if only their first dimensions differ."""
    first = single.open(places[0])
    parts = [first, *_others(single, first, places)]
    longer = {
        spec.name
        for number, spec in enumerate(first.fields)
        if spec.shape and any(part.fields[number].shape != spec.shape for part in parts)
    }
    if longer:
        again = replace(single, names=[s.name for s in first.fields], ragged=frozenset(longer))
        parts = [again.open(place) for place in places]
    ends = [os.path.basename(os.fspath(place)) for place in (places[0], places[-1])]
    note = f"each of {len(places)} files, {ends[0]} to {ends[1]}, is read as one sample"
    if longer:
        note += f", of any length in {', '.join(sorted(longer))}"
    return replace(_joined(parts, path), note=note)


def _joined(parts: Sequence[DataMap], path: str) -> DataMap:
    first = parts[0]
    slabs, start = [], 0
    left_out, classes, widths = dict(first.left_out), _classes(first), _widths(first)
    for part in parts:
        if part.header is not None:
            raise DataError(
                f"{part.path}: a slab folder is a dataset of its own; join files, or read several "
                "datasets with MixedLoader"
            )
        check_alike(*((each.path, each.fields, each.packing) for each in (first, part)))
        if _widths(part) != widths:
            raise DataError(
                f"{part.path}: its matrices have {_widths(part)} columns, those of {first.path} "
                f"{widths}; keep the files apart"
            )
        if classes and _classes(part) != classes:
            raise DataError(
                f"{part.path}: its class_names are others than those of {first.path}, so equal "
                "labels stand for different classes; keep the files apart"
            )
        if part is not first:
            name = os.path.basename(part.path)
            left_out |= {f"{name}: {each}": why for each, why in part.left_out.items()}
        slabs += [replace(slab, start=slab.start + start) for slab in part.slabs]
        start += part.num_samples
    note = f"{first.note}, in the first of {len(parts)} files" if first.note else ""
    found = replace(first, path=path, slabs=tuple(slabs), num_samples=start)
    return replace(found, left_out=left_out, note=note)


def _widths(data: DataMap) -> list[int]:
    """Return the columns of sparse matrices, by field."""
    offsets = [each for spec in data.fields for each in data.offsets(spec)[:1]]
    return [each.columns for each in offsets]


def _classes(data: DataMap) -> dict[str, list[str]]:
    """Return the class names of a file's labels."""
    labels = {
        stored_name(data.group, spec.name): spec.name
        for spec in data.fields
        if spec.dtype.kind in "iu" and not spec.shape and not spec.ragged
    }
    found = class_names_of(data.slabs[0].path, labels) if labels else {}
    return {labels[stored]: names for stored, names in found.items()}


def check_alike(
    first: tuple[Place, Sequence[FieldSpec], Packing],
    other: tuple[Place, Sequence[FieldSpec], Packing],
) -> None:
    """Raise DataError unless two files have equal fields, whose equal values mean the same."""
    name = os.path.basename(first[0])
    if tuple(other[1]) != tuple(first[1]):
        raise DataError(
            f"{other[0]}: its fields are {_described(other[1])}, those of {name} "
            f"{_described(first[1])}; choose equal ones, or keep the files apart"
        )
    for field in sorted({*first[2], *other[2]}):
        found = [packing.get(field, {}) for packing in (first[2], other[2])]
        if not packed_alike(*found):
            texts = [packing_text(values) or "nothing" for values in found]
            raise DataError(
                f"{other[0]}: field {field!r} is packed with {texts[1]}, that of {name} with "
                f"{texts[0]}, so that equal values stand for different ones; unpack both, or keep "
                "the files apart"
            )


def _described(specs: Sequence[FieldSpec]) -> str:
    return ", ".join(
        f"{spec.name} {spec.dtype} {'of any length' if spec.ragged else spec.shape}"
        for spec in specs
    )
