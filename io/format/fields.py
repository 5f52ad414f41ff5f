"""The datasets of an HDF5 file that are fields: all that have samples, under each of their names.

Soft and external links are followed if they are safe: the target exists, is a plain file, and does
not lead back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hsgd.errors import DataError, one_line

from .link_guard import LinkGuard
from .opening import UnknownFields
from .slab_folder import LONGEST, OFFSETS, VALUES, import_h5py
from .sparse_kind import BY_COLUMNS, PARTS, is_anndata, sparse_kind
from .stored_rows import StoredRows
from .table_columns import columns_of

if TYPE_CHECKING:
    import h5py

__all__ = [
    "MATLAB_ORDER",
    "FoundFields",
    "UnequalRows",
    "choose_fields",
    "find_fields",
    "inner_name",
    "is_matlab",
    "left_out_line",
    "linked_file",
    "names_in",
    "stored_name",
]

_MOST_AGAIN = 100_000  # names in groups visited before: groups in many groups could take forever
_MOST_STEPS = 1_000  # on the way that one link leads
MATLAB_ORDER = "MATLAB's dimensions come in reverse, so its last one must be that of samples"
_CELLS = ("X", "obs", "obsm")  # of AnnData: what has a row for each cell
_SHOWN = 5
_What = TypeVar("_What")
_DANGLING = (KeyError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class UnequalRows(DataError):
    """Fields have different first dimensions."""


@dataclass
class FoundFields:
    """The fields found in a file, by name, in the order of names."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # first axis: samples
    left_out: dict[str, str] = field(default_factory=dict)  # why an item is not a field
    broken: dict[str, str] = field(default_factory=dict)  # why a field cannot be used
    unnamed: dict[str, str] = field(default_factory=dict)  # why a field is read only if it is named

    def inside(self, group: str) -> FoundFields:
        """Return those of one group, by their names inside it."""
        return FoundFields(
            _below(group, self.shapes),
            _below(group, self.left_out),
            _below(group, self.broken),
            _below(group, self.unnamed),
        )

    def some_groups(self) -> str:
        """Return the first groups with fields, for messages."""
        groups = sorted({name.rpartition("/")[0] for name in self.shapes} - {""})
        return ", ".join(groups[:_SHOWN]) or "none"


def _below(group: str, named: Mapping[str, _What]) -> dict[str, _What]:
    start = f"{group}/"
    return {name[len(start) :]: what for name, what in named.items() if name.startswith(start)}


def find_fields(file: h5py.File) -> FoundFields:
    """Return all fields of an open file."""
    found = FoundFields()
    _Walk(file, found).visit(file["/"], "", frozenset())
    if is_anndata(file):
        for name in found.shapes:
            if name.partition("/")[0] not in _CELLS or name.endswith("/categories"):
                found.unnamed[name] = "AnnData has it beside its cells"
    return found


def choose_fields(
    file: h5py.File,
    path: Path | str,
    names: Sequence[str] | None,
    group: str = "",
    found: FoundFields | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the datasets to use, in the order of the file or as given, and why others are not.

    Text, dimension scales, as netCDF's coordinates are, and what AnnData does not store by cells
    must be named, unless there is nothing else. `found` are the fields of the file, if known.
    """
    found = found or find_fields(file)
    if group:
        groups, found = found.some_groups(), found.inside(group)
        if not found.shapes and not found.broken:
            raise UnknownFields(
                f"{path}: no group {group!r} with fields; groups that have some: {groups}"
            )
    shapes = found.shapes
    known = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"
    chosen = [name for name in shapes if name not in found.unnamed] or list(shapes)
    chosen = chosen if names is None else [name.strip("/") for name in names]
    broken = [name for name in found.broken if names is None or name in chosen]
    if broken:
        raise DataError(f"{found.broken[broken[0]]}, or name other fields than {broken[0]!r}")
    unknown = [name for name in chosen if name not in shapes]
    if unknown:
        reasons = [f"{name}: {found.left_out[name]}" for name in unknown if name in found.left_out]
        why = f" ({', '.join(reasons)})" if reasons else ""
        raise UnknownFields(f"{path}: no field {', '.join(unknown)}{why}; there are: {known}")
    if not chosen:
        reasons = [f"{name}: {why}" for name, why in list(found.left_out.items())[:5]]
        raise DataError(
            f"{path}: no field to read; there are: {known}"
            + (f"; left out: {', '.join(reasons)}" if reasons else "")
        )
    if len({shapes[name][0] for name in chosen}) > 1:
        hint = f"; {MATLAB_ORDER}" if is_matlab(file, stored_name(group, chosen[0])) else ""
        raise UnequalRows(f"{path}: first dimensions differ: {known}; name the fields to use{hint}")
    unnamed = {name: why for name, why in found.unnamed.items() if name not in chosen}
    return chosen, found.left_out | unnamed if names is None else {}


def is_matlab(file: h5py.File, stored: str) -> bool:
    """Return whether MATLAB (v7.3) wrote a dataset, by its name in the file."""
    return stored in file and "MATLAB_class" in file[stored].attrs


def names_in(group: h5py.Group) -> tuple[list[str], dict[str, str]]:
    """Return the names in a group, sorted, and why others cannot be used."""
    found = list(group)
    names = sorted(name for name in found if isinstance(name, str))
    odd = sorted(name for name in found if isinstance(name, bytes))
    shown = (name.decode("utf-8", "backslashreplace") for name in odd)
    return names, dict.fromkeys(shown, "its name is not UTF-8; rename it")


def linked_file(file: h5py.File, item: Any) -> Path | None:
    """Return the file to which an external link led; None if it is `file`."""
    h5py = import_h5py()

    if h5py.h5o.get_info(item.id).fileno == h5py.h5o.get_info(file.id).fileno:
        return None
    return Path(item.file.filename).absolute()


def inner_name(group: str | None) -> str:
    """Return a group's name without outer slashes; "" for the whole file. Raises TypeError."""
    if group is not None and not isinstance(group, str):
        raise TypeError(f'group={group!r}; use the name of a group, such as "train"')
    return "" if group is None else group.strip("/")


def stored_name(group: str, name: str) -> str:
    """Return the name of a field in the file."""
    return f"{group}/{name}" if group else name


def left_out_line(path: str | os.PathLike[str], what: str, reasons: Mapping[str, str]) -> str:
    """Return a line that names what was left out, and why; "" for nothing."""
    if not reasons:
        return ""
    shown = [f"{name!r} ({why})" for name, why in list(reasons.items())[:_SHOWN]]
    more = [f"{len(reasons) - _SHOWN} more"] if len(reasons) > _SHOWN else []
    return one_line(f"{os.fspath(path)}: {what} left out: {', '.join([*shown, *more])}")


class _Walk:
    """One walk over a file, which fills `found`."""

    def __init__(self, file: h5py.File, found: FoundFields) -> None:
        self._file, self._found = file, found
        self._met: set[tuple[int, int]] = set()
        self._again = 0
        self._stored = StoredRows()
        self._h5py = import_h5py()

    def visit(self, group: Any, prefix: str, above: frozenset[tuple[int, int]]) -> None:
        """Visit the items of a group; `above` are the groups that hold it."""
        own = self._identity(group)
        names, unnamed = names_in(group)
        self._found.left_out.update({f"{prefix}{name}": why for name, why in unnamed.items()})
        if own in self._met:
            self._again += len(names)
        self._met.add(own)
        if self._again > _MOST_AGAIN:
            raise DataError(
                f"{self._file.filename}: its groups are held by several others, which makes more "
                f"than {_MOST_AGAIN} names; copy the datasets into a file without such links"
            )
        for name in names:
            full = f"{prefix}{name}"
            try:
                reason, item = self._open(group, name)
            except DataError as error:  # of the linked file
                self._found.broken[full] = str(error)
                continue
            if reason:
                self._found.left_out[full] = reason
            elif isinstance(item, self._h5py.Group) and LONGEST not in item.attrs:
                kind = sparse_kind(item)
                if kind == "csr" and linked_file(self._file, item) is None:
                    shape = (max(0, item["indptr"].size - 1),)
                    self._found.shapes |= {f"{full}/{part}": shape for part in PARTS}
                elif kind == "csc":
                    self._found.left_out[full] = BY_COLUMNS
                elif self._identity(item) in {*above, own}:
                    self._found.left_out[full] = "a link back to a group that holds it"
                else:
                    self.visit(item, f"{full}/", above | {own})
            elif not isinstance(item, self._h5py.Datatype):
                self._take(full, item)

    def _take(self, name: str, item: Any) -> None:
        if LONGEST not in item.attrs and self._stored.opens_sources(item):
            try:
                self._stored.gaps(item)
            except DataError as error:
                self._found.broken[name] = str(error)
                return
        if LONGEST in item.attrs and linked_file(self._file, item) is not None:
            self._found.left_out[name] = "a ragged field of another file; convert that file"
        elif LONGEST in item.attrs:
            self._found.shapes[name] = (item[OFFSETS].shape[0] - 1, *item[VALUES].shape[1:])
        elif item.shape is None:
            self._found.left_out[name] = "it has no values"
        elif not item.shape:
            self._found.left_out[name] = "a single value, not one for each sample"
        else:
            columns, others = columns_of(item)
            self._found.left_out.update(
                {f"{name}/{other}": "a column of another type than numbers" for other in others}
                if columns
                else {}
            )
            found = {f"{name}/{column}": shape for column, shape in columns.items()}
            self._found.shapes.update(found or {name: item.shape})
            if self._h5py.h5ds.is_scale(item.id):
                self._found.unnamed.update(dict.fromkeys(found or [name], "a dimension scale"))
            elif item.id.get_type().get_class() == self._h5py.h5t.STRING:
                self._found.unnamed[name] = "it holds text"

    def _open(self, group: Any, name: str) -> tuple[str, Any]:
        """Return an item by name, or why it is not followed; raise errors behind hard links."""
        try:
            link = group.get(name, getlink=True)
        except TypeError as error:  # a user-defined link
            return str(error), None
        if isinstance(link, self._h5py.HardLink):
            return "", group[name]
        try:
            reason = LinkGuard(_MOST_STEPS).obstacle(group, name)
            if reason:
                return reason, None
            return "", group[name]
        except DataError:
            raise
        except _DANGLING:
            where = link.path
            if isinstance(link, self._h5py.ExternalLink):
                where = f"{link.filename}:{link.path}"
            return f"a link to {where}, where nothing is", None

    def _identity(self, item: Any) -> tuple[int, int]:
        info = self._h5py.h5o.get_info(item.id)
        return info.fileno, info.addr
