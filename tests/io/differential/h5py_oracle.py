"""What h5py reads of a file, sample by sample, and whether a refusal of hsgd is true of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
from hsgd.io import Ragged

from random_files import RandomFile

__all__ = ["Truth", "rows_of", "truth_of"]

_KINDS = "biufc"
_TYPES = {"O": "has a variable-length or text type", "S": "has a variable-length or text type"}


@dataclass
class Truth:
    """The fields of a file as h5py reads them; `errors` has those that it does not."""

    made: RandomFile
    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, np.dtype[Any]] = field(default_factory=dict)  # as stored
    unnamed: set[str] = field(default_factory=set)  # dimension scales and text

    def sound(self) -> list[str]:
        """Return the names against which nothing can be said."""
        return [name for name in self.values if not self.reasons.get(name)]

    def inside(self, group: str) -> Truth:
        """Return what a group of the file holds."""
        start = f"{group}/"
        parts = self.values, self.errors, self.reasons, self.lengths, self.dtypes
        return Truth(
            self.made,
            *(
                {n[len(start) :]: what for n, what in p.items() if n.startswith(start)}
                for p in parts
            ),
        )

    def has_gaps(self) -> bool:
        """Return whether some rows were never written for sure."""
        return any(each.has_gaps for each in self.made.fields)

    def numeric(self) -> list[str]:
        return [name for name, read in self.values.items() if read.dtype.kind in _KINDS]

    def convertible(self) -> list[str]:
        """Return the numbers, and the rows of numbers of different lengths."""
        bases = {name: h5py.check_vlen_dtype(dtype) for name, dtype in self.dtypes.items()}
        ragged = [
            n for n, base in bases.items() if isinstance(base, np.dtype) and base.kind in _KINDS
        ]
        return [*self.numeric(), *ragged]

    def alike(self, names: Iterable[str]) -> list[str]:
        """Return those with the number of rows that most of them have."""
        by_rows: dict[int, list[str]] = {}
        for name in names:
            by_rows.setdefault(len(self.values[name]), []).append(name)
        return max(by_rows.values(), key=len, default=[])

    def check_refusal(self, message: str, names: Iterable[str] | None) -> None:
        """Raise AssertionError unless a refusal is one true line; `names` are the fields asked."""
        assert len(message.splitlines()) == 1, f"not one line: {message!r}"
        homes = [each.lies_in for each in self.made.fields if each.lies_in]
        if not any(home in message for home in homes):
            assert str(self.made.path) in message, f"does not name the file: {message!r}"
        asked = [*self.values, *self.errors] if names is None else list(names)
        if "first dimensions differ" in message:
            assert len({self.lengths[name] for name in asked}) > 1, message
            return
        if "no field to read" in message:
            assert not asked, message
            return
        for name in asked:
            shown = any(each in message for each in (name, repr(name)[1:-1], *homes))
            if shown and any(re.search(why, message) for why in self.reasons.get(name, ())):
                return
        raise AssertionError(f"untrue, or without the field: {message!r}")


def truth_of(made: RandomFile) -> Truth:
    """Read all fields of a file by h5py."""
    truth = Truth(made)
    known = {each.name: each.reasons for each in made.fields}
    with h5py.File(made.path, "r") as file:
        _walk(file["/"], "", frozenset(), truth)
        for name in truth.values.keys() | truth.errors.keys():
            table = known.get(name.rpartition("/")[0], [])
            truth.reasons[name] = list(known.get(name, table))
    for name, error in truth.errors.items():
        truth.reasons[name].append(re.escape(error[:60]))
    for name, dtype in truth.dtypes.items():
        if h5py.check_ref_dtype(dtype) is not None:
            truth.reasons[name].append("has references")
        elif dtype.kind not in _KINDS:
            truth.reasons[name].append(_TYPES.get(dtype.kind, "has type"))
    _leave_out_unnamed(truth)
    return truth


def _leave_out_unnamed(truth: Truth) -> None:
    """Remove dimension scales and text, which are fields only if there is nothing else."""
    if {*truth.values, *truth.errors} - truth.unnamed:
        for part in (truth.values, truth.errors, truth.reasons, truth.lengths, truth.dtypes):
            for name in truth.unnamed:
                part.pop(name, None)


def _walk(group: Any, prefix: str, above: frozenset[Any], truth: Truth) -> None:
    fatal = {each.name for each in truth.made.fields if each.ends_hdf5}
    for name in group:
        full = f"{prefix}{name}"
        try:
            item = group[name]
        except (KeyError, OSError, RuntimeError):
            continue
        if isinstance(name, bytes):
            continue
        info = h5py.h5o.get_info(item.id)
        key = info.fileno, info.addr
        own = h5py.h5o.get_info(group.id)
        if isinstance(item, h5py.Group):
            if key not in {*above, (own.fileno, own.addr)}:
                _walk(item, f"{full}/", above | {(own.fileno, own.addr)}, truth)
        elif isinstance(item, h5py.Dataset) and item.shape:
            is_text = item.id.get_type().get_class() == h5py.h5t.STRING
            truth.unnamed |= {full} if item.is_scale or is_text else set()
            if full in fatal:
                truth.lengths[full], truth.errors[full] = item.shape[0], "takes rows from"
                continue
            try:
                read = item[...]
            except (OSError, RuntimeError, TypeError, ValueError) as error:
                truth.errors[full] = (str(error).splitlines() or [""])[0]
                truth.lengths[full] = item.shape[0]
            else:
                _add(truth, full, item, read)


def _add(truth: Truth, name: str, item: h5py.Dataset, read: Any) -> None:
    """Add what was read; the columns of a table that are numbers are fields of their own."""
    members = item.dtype.names or ()
    numbers = [each for each in members if item.dtype[each].base.kind in _KINDS]
    for each in numbers:
        column = np.ascontiguousarray(read[each])
        truth.values[f"{name}/{each}"] = column.astype(column.dtype.newbyteorder("="))
        truth.dtypes[f"{name}/{each}"] = column.dtype
        truth.lengths[f"{name}/{each}"] = len(column)
    if not numbers:
        truth.values[name], truth.lengths[name] = _native(read, item), len(read)
        truth.dtypes[name] = item.dtype


def _native(read: Any, item: h5py.Dataset) -> Any:
    """Return what was read in native byte order; types with axes keep their first axis."""
    if item.dtype.kind in _KINDS:
        return np.ascontiguousarray(read).astype(read.dtype.newbyteorder("="))
    if isinstance(base := h5py.check_vlen_dtype(item.dtype), np.dtype):
        native = base.newbyteorder("=")
        for at, each in np.ndenumerate(read):
            read[at] = np.asarray(each).astype(native)
    return read if item.dtype.kind == "O" else np.zeros(item.shape, "V1")


def rows_of(values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return each sample as the bytes of its fields, in the order of their names."""
    return list(zip(*(_rows(values[name]) for name in sorted(values)), strict=True))


def _rows(values: Any) -> list[bytes]:
    if isinstance(values, Ragged) or values.dtype.kind == "O":
        return [np.asarray(each).tobytes() for each in values]
    if (
        values.dtype.kind in "fc"
        and values.dtype.itemsize in (16, 32)
        and values.dtype.char in "gG"
    ):
        # Of 16 bytes a long double has six that mean nothing.
        parts = (np.frombuffer(each.tobytes(), "u1").reshape(-1, 16) for each in values)
        return [each[:, :10].tobytes() for each in parts]
    return [each.tobytes() for each in np.ascontiguousarray(values)]
