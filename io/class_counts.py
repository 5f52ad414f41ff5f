"""The classes of a field of labels: their names, and how many samples each has."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from .format.attributes import class_names_of
from .format.data_map import DataMap
from .format.fields import stored_name
from .format.slab_folder import FieldSpec
from .order.epoch_order import IntArray
from .reading.row_reader import RowReader

__all__ = ["ClassCounts", "class_counts"]

_MOST_SAMPLES = 1 << 26  # labels of larger datasets are not counted
_ROWS = 1 << 20


@dataclass(frozen=True)
class ClassCounts:
    """The classes of one field."""

    names: list[str]  # by label
    samples: list[int] | None = None  # of each class; None if not counted: a URL, or too many
    nameless: int = 0  # samples whose label has no name


def class_counts(data: DataMap) -> dict[str, ClassCounts]:
    """Return the classes of each integer field that has class_names; local, blocks while it reads.

    Raises DataError for labels that cannot be read.
    """
    labels = {
        stored_name(data.group, spec.name): spec
        for spec in data.fields
        if spec.dtype.kind in "iu"
        and not (spec.shape or spec.ragged)
        and data.slabs[0].extents[spec.name].linked is None
    }
    found = {}
    several = data.header is None and data.access is None and not os.path.isfile(data.path)
    home = data.slabs[0].path if several else data.path
    for stored, names in (class_names_of(home, labels) if labels else {}).items():
        spec = labels[stored]
        found[spec.name] = ClassCounts(names)
        if data.access is None and data.num_samples <= _MOST_SAMPLES:
            samples = _count(data, spec, len(names))
            nameless = data.num_samples - int(samples.sum())
            found[spec.name] = ClassCounts(names, samples.tolist(), nameless)
    return found


def _count(data: DataMap, spec: FieldSpec, classes: int) -> IntArray:
    counts = np.zeros(classes, np.int64)
    with RowReader(data) as reader:
        for row in range(0, data.num_samples, _ROWS):
            labels = np.empty(min(_ROWS, data.num_samples - row), spec.dtype)
            reader.read(spec.name, row, labels)
            known = labels[(labels >= 0) & (labels < classes)]
            counts += np.bincount(known.astype(np.int64), minlength=classes)
    return counts
