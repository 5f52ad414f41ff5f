"""GroupedSource: an HDF5 file with one group per sample, in the order of the groups' numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.attributes import Attributes, read_attributes
from ..format.fields import left_out_line, names_in, stored_name
from ..format.filters import load_filters
from ..format.link_guard import hard_linked
from ..format.opening import examined, first_line
from ..format.packing_of import check_packed_alike, packing_of
from ..format.ragged import Block, ragged_of
from ..format.slab_folder import FieldSpec, import_h5py
from ..format.stored_rows import StoredRows
from ..format.supported_dtype import NO_NUMBERS, supported_dtype
from ..layouts.sample_groups import SampleGroups
from ..order.epoch_order import IntArray
from .source import Source

__all__ = ["GroupedSource"]


class GroupedSource(Source):
    """Samples that are groups of an HDF5 file.

    `fields` are names inside the groups; by default all that most groups have. A field is ragged if
    its arrays differ in their first axis only. Groups without one of the fields are left out.
    Raises DataError for arrays that differ otherwise.
    """

    def __init__(self, path: Path, groups: SampleGroups, fields: Sequence[str] | None) -> None:
        self._path, self._home = path, groups.home
        self.files = [path]
        self._names: list[str] = []
        self.unwritten: dict[str, str] = {}
        self.packing: dict[str, Any] = {}
        unused = dict.fromkeys(groups.others, "only some groups have it")
        with examined(path) as file:
            wanted = [name.strip("/") for name in (groups.fields if fields is None else fields)]
            self._columns = self._first_samples(file, groups, wanted, fields is None, unused)
            stored = StoredRows()
            home = file[self._home or "/"]
            self.left_out: dict[str, str] = names_in(home)[1]
            count = len(groups.names) + len(self.left_out)
            for name in groups.names:
                self._add(hard_linked(home, name), name, stored)
        for column in self._columns.values():
            column.lengths = np.array(column.sizes, np.int64)
        self.num_samples = len(self._names)
        self.specs = tuple(column.spec() for column in self._columns.values())
        self.left_out_are = f"{len(self.left_out)} of {count} groups"
        whole = f"{path}: each of {self.num_samples} groups, {self._place(self._names[0])} to "
        self.notes = [
            f"{whole}{self._place(self._names[-1])}, is read as one sample",
            *filter(None, [left_out_line(path, "fields", unused) if fields is None else ""]),
        ]

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        with examined(self._path) as file:
            home = file[self._home or "/"]
            for row in range(start, self.num_samples, rows):
                part = range(row, min(row + rows, self.num_samples))
                values = [self._read(home, spec, number) for number in part]
                if spec.ragged:
                    yield ragged_of(values, spec.shape, spec.dtype)
                else:
                    yield np.stack(values)

    def lengths(self, spec: FieldSpec) -> IntArray:
        return self._columns[spec.name].lengths

    def attributes(self) -> Attributes:
        """Return the attributes of the file and of packing, without those of single samples."""
        with examined(self._path) as file:
            first = self._place(self._names[0])
            places = {f"{first}/{name}": name for name in self._columns}
            found = read_attributes(file, places)
        kept = Attributes(left_out=found.left_out)
        for place, values in found.values.items():
            name = places.get(place, "")
            for key, value in values.items():
                if not place or key in self.packing.get(name, {}):
                    kept.values.setdefault(name, {})[key] = value
                else:
                    kept.left_out[f"{place}@{key}"] = "an attribute of one sample, or of several"
        return kept

    def _place(self, name: str) -> str:
        return stored_name(self._home, name)

    def _first_samples(
        self,
        file: Any,
        groups: SampleGroups,
        wanted: Sequence[str],
        choose: bool,
        unused: dict[str, str],
    ) -> dict[str, _Column]:
        """Return a column per field; with `choose` put fields of other types into `unused`."""
        columns = {}
        for name in wanted:
            found = (hard_linked(file, f"{self._place(one)}/{name}") for one in groups.names)
            first = next(item for item in found if isinstance(item, import_h5py().Dataset))
            try:
                dtype = supported_dtype(first, self._path, name)
            except DataError:
                if not choose:
                    raise
                unused[name] = NO_NUMBERS
                continue
            if missing := load_filters(first):
                raise DataError(f"{self._path}: field {name!r}: {missing}")
            columns[name] = _Column(name, dtype, first.name)
        if not columns:
            raise DataError(f"{self._path}: no field of numbers in its groups, nothing to convert")
        return columns

    def _add(self, sample: Any, name: str, stored: StoredRows) -> None:
        place = self._place(name)
        items = {field: hard_linked(sample, field) for field in self._columns}
        missing = [f for f, item in items.items() if not isinstance(item, import_h5py().Dataset)]
        if missing:
            self.left_out[name] = f"no {', '.join(missing)}"
            return
        packing = packing_of(sample, list(items))
        if not self._names:
            self.packing = packing
        else:
            first = self._place(self._names[0])
            check_packed_alike(self._path, (first, self.packing), (place, packing))
        for field, item in items.items():
            if gaps := stored.gaps(item):  # before the shape is read
                self.unwritten.setdefault(field, f"{self._path}: {place + '/' + field!r}: {gaps}")
            self._columns[field].add(item, self._path)
        self._names.append(name)

    def _read(self, home: Any, spec: FieldSpec, number: int) -> NDArray[Any]:
        where = f"{self._names[number]}/{spec.name}"
        try:
            values = np.asarray(home[where][()]).astype(spec.dtype, copy=False)
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            raise DataError(
                f"{self._path}: h5py cannot read {self._place(where)!r}: {first_line(error)}"
            ) from error
        length = int(self._columns[spec.name].lengths[number])
        if values.shape != ((length, *spec.shape) if spec.ragged else spec.shape):
            raise DataError(f"{self._path}: {self._place(where)!r} has changed meanwhile")
        return values


class _Column:
    """The shapes of one field in all samples."""

    def __init__(self, name: str, dtype: np.dtype[Any], first: str) -> None:
        self._name, self._dtype, self._first = name, dtype, first
        self._shape: tuple[int, ...] | None = None
        self.sizes: list[int] = []
        self.lengths: IntArray = np.empty(0, np.int64)

    def add(self, dataset: Any, path: Path) -> None:
        """Add a sample's dataset. Raises DataError if its type or shape does not fit the others."""
        dtype = supported_dtype(dataset, path, dataset.name)
        shape = dataset.shape
        if self._shape is None:
            self._shape, self._first = shape, dataset.name
        alike = None not in (shape, self._shape) and len(shape) == len(self._shape)
        if not alike or dtype != self._dtype or shape[1:] != self._shape[1:]:
            raise DataError(
                f"{path}: {dataset.name} is {shape} {dtype}, {self._first} {self._shape} "
                f"{self._dtype}; one type, and shapes that differ in the first axis alone, are "
                "needed; choose other fields with --fields"
            )
        self.sizes.append(shape[0] if shape else 1)

    def spec(self) -> FieldSpec:
        assert self._shape is not None
        dtype = self._dtype.newbyteorder("=")
        if len(set(self.sizes)) > 1:
            return FieldSpec(self._name, self._shape[1:], dtype, ragged=True)
        return FieldSpec(self._name, self._shape, dtype)
