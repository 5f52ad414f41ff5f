"""The attributes that users gave an HDF5 file: units, titles and the like.

No dataset is opened to read them: HDF5 crashes on the damaged map of a virtual dataset, and an
index may have lost its checksum.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.errors import DataError

from ..remote.metadata_file import MetadataFile
from ..remote.object_reader import ObjectReader, RemoteAccess
from ..remote.urls import child_url, is_url, names_a_file, url_of
from .index_checksum import check_index, check_index_stream
from .opening import examined, examined_object, first_line
from .slab_folder import INDEX_NAME, LIBVER, SlabHeader, import_h5py, read_header

if TYPE_CHECKING:
    import h5py

__all__ = [
    "Attributes",
    "class_attributes",
    "class_names",
    "class_names_of",
    "common_attributes",
    "read_attributes",
    "write_attributes",
]

_OWN = frozenset(header_field.name for header_field in fields(SlabHeader))
_CLASS_NAMES = "class_names"
_DIFFERS = "it differs between the files"
_UNREADABLE = (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@dataclass
class Attributes:
    """The attributes of a file and its objects."""

    # By object ("" is the file) and name: the value and its type for h5py.
    values: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # by OBJECT@NAME: why


def class_attributes(field: str, names: Sequence[str]) -> Attributes:
    """Return `names` as the attribute class_names of `field`, which holds class numbers."""
    text = import_h5py().string_dtype()
    return Attributes({field: {_CLASS_NAMES: (np.array(names, dtype=object), text)}})


def class_names(path: str | os.PathLike[str], field: str = "label") -> list[str]:
    """Return the names of a field's numbers; empty if the file does not have them.

    For converted images these are their folders, for a user's own file its attribute class_names.
    Raises as open_map() does.
    """
    with _index_of(path) as file:
        location = file.filename
        link = file.get(field, getlink=True)
        if link is None or isinstance(link, import_h5py().ExternalLink):
            raise DataError(f"{location}: no field {field!r}; there are: {', '.join(sorted(file))}")
        return _names_at(file, field)


def class_names_of(path: str | os.PathLike[str], fields: Iterable[str]) -> dict[str, list[str]]:
    """Return class_names() of several fields, without fields that have none.

    A field whose arrays lie in groups, one for each sample, has none.
    """
    with _index_of(path) as file:
        found = {field: _names_at(file, field) for field in fields if field in file}
    return {field: names for field, names in found.items() if names}


def _names_at(file: h5py.File, field: str) -> list[str]:
    found = None
    if import_h5py().h5a.exists(file.id, _CLASS_NAMES.encode(), obj_name=field.encode()):
        found = _value(_open(file, field, name=_CLASS_NAMES.encode()))
    home, _, part = field.rpartition("/")
    names = file.get(f"{home}/categories") if part == "codes" else None  # of AnnData
    if found is None and isinstance(names, import_h5py().Dataset):
        found = names[()]
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "OSU":
        return []  # the attribute means something else
    return [n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in found]


def _index_of(path: str | os.PathLike[str]) -> AbstractContextManager[h5py.File]:
    """Open the file of a dataset that has the attributes of its fields."""
    if is_url(path):
        url = url_of(path)
        url = url if names_a_file(url) else child_url(url, INDEX_NAME)
        content = MetadataFile(url, ObjectReader(RemoteAccess()))
        if url.endswith(f"/{INDEX_NAME}"):
            _check_content(content)
        return examined_object(content)
    location = Path(path).absolute()
    location = location / INDEX_NAME if location.is_dir() else location
    if location.name == INDEX_NAME and location.is_file():
        check_index(location)
    return examined(location)


def _check_content(content: MetadataFile) -> None:
    try:
        check_index_stream(content, content.url)
    except DataError:  # an OSError as well
        raise
    except OSError:
        if content.failure is None:
            raise
        raise content.failure from None


def read_attributes(file: h5py.File, names: Iterable[str]) -> Attributes:
    """Return the attributes of an open file, of the datasets `names`, and of their groups."""
    found = Attributes()
    ours = read_header(file) is not None
    with _scratch() as scratch:
        for place in _with_parents(names):
            if place and place not in file:  # a column of a table
                continue
            for name in sorted(_names(file, place or "/")):
                if not place and name in _OWN:
                    if not ours:
                        found.left_out[f"@{name}"] = "hsgd has an attribute of this name itself"
                    continue
                reason, value = _read(file, place or "/", name, scratch)
                if reason:
                    found.left_out[f"{place}@{name}"] = reason
                else:
                    found.values.setdefault(place, {})[name] = value
    return found


def write_attributes(file: h5py.File, attributes: Attributes) -> None:
    """Write attributes to the objects of the same names."""
    for place, values in attributes.values.items():
        for name, (value, dtype) in values.items():
            _write(file[place or "/"], name, value, dtype)


def common_attributes(parts: Sequence[Attributes], path: Path) -> Attributes:
    """Return the attributes that are equal in all parts; others are left out.

    Raises DataError for class names that differ.
    """
    found = Attributes()
    for part in parts:
        found.left_out.update(part.left_out)
    places = {place: None for part in parts for place in part.values}
    for place in places:
        names = {name: None for part in parts for name in part.values.get(place, {})}
        for name in names:
            several = [part.values.get(place, {}).get(name) for part in parts]
            first = several[0]
            if first is not None and all(_are_equal(first, other) for other in several[1:]):
                found.values.setdefault(place, {})[name] = first
            elif name == _CLASS_NAMES and None not in several:
                raise DataError(
                    f"{path}: its files have other class_names of {place!r}, so equal labels stand "
                    "for different classes; convert them apart"
                )
            else:
                found.left_out.setdefault(f"{place}@{name}", _DIFFERS)
    return found


def _with_parents(names: Iterable[str]) -> list[str]:
    """Return "" for the file, then each name after the groups that hold it."""
    found = {"": None}
    for name in names:
        steps = name.strip("/").split("/")
        found.update({"/".join(steps[: count + 1]): None for count in range(len(steps))})
    return list(found)


def _open(file: h5py.File, place: str, **which: bytes | int) -> Any:
    return import_h5py().h5a.open(file.id, obj_name=place.encode(), **which)


def _names(file: h5py.File, place: str) -> Iterator[str]:
    """Yield the names of an object's attributes. Raises OSError if its header is damaged."""
    import_h5py().h5a.exists(file.id, b"any", obj_name=place.encode())
    with contextlib.suppress(OSError):  # there are no more
        for index in itertools.count():
            yield _open(file, place, index=index).name.decode("utf-8", "surrogateescape")


def _value(attribute: Any) -> Any:
    """Return what h5py would make of an open attribute."""
    h5py = import_h5py()

    if attribute.shape is None:
        return h5py.Empty(attribute.dtype)
    base, inner = attribute.dtype.subdtype or (attribute.dtype, ())
    found = np.zeros(attribute.shape + inner, base)
    attribute.read(found, mtype=h5py.h5t.py_create(attribute.dtype))
    text = h5py.check_string_dtype(base)
    if text is not None and text.length is None:
        flat = [each.decode("utf-8", "surrogateescape") for each in found.flat]
        found = np.array(flat, base).reshape(found.shape)
    return found if found.ndim else found[()]


def _read(
    file: h5py.File, place: str, name: str, scratch: h5py.File
) -> tuple[str, tuple[Any, Any]]:
    """Return why an attribute cannot be copied to HDF5 ("" if it can), and its value and type."""
    nothing = (None, None)
    try:
        attribute = _open(file, place, name=name.encode("utf-8", "surrogateescape"))
        dtype = attribute.dtype
        if _has_reference(dtype):
            return "a reference, which leads nowhere in another file", nothing
        value = _value(attribute)
        _write(scratch, name, value, dtype)
    except _UNREADABLE as error:
        return first_line(error), nothing
    return "", (value, dtype)


def _write(item: Any, name: str, value: Any, dtype: Any) -> None:
    h5py = import_h5py()

    if isinstance(value, h5py.Empty):
        item.attrs[name] = value
    else:
        item.attrs.create(name, value, dtype=dtype)


def _has_reference(dtype: np.dtype[Any]) -> bool:
    """Return whether values of this type refer to other objects in their file."""
    h5py = import_h5py()

    if h5py.check_ref_dtype(dtype) is not None:
        return True
    inside = [] if dtype.fields is None else [part[0] for part in dtype.fields.values()]
    if dtype.subdtype is not None:
        inside.append(dtype.subdtype[0])
    base = h5py.check_vlen_dtype(dtype)
    if isinstance(base, np.dtype):
        inside.append(base)
    return any(map(_has_reference, inside))


def _are_equal(one: tuple[Any, Any], other: tuple[Any, Any] | None) -> bool:
    if other is None or one[1] != other[1]:
        return False
    first, second = np.asarray(one[0]), np.asarray(other[0])
    if first.dtype.hasobject or second.dtype.hasobject:
        return bool(repr(first.tolist()) == repr(second.tolist()))
    return first.shape == second.shape and first.tobytes() == second.tobytes()


def _scratch() -> Any:
    h5py = import_h5py()

    return h5py.File("scratch", "w", driver="core", backing_store=False, libver=LIBVER)
