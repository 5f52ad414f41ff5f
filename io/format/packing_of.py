"""Attributes of fields whose stored values stand for others: scaled, or a fill value.

These are the attributes of netCDF and HDF-EOS; hsgd delivers values as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.errors import DataError

from .fields import stored_name
from .slab_folder import import_h5py

if TYPE_CHECKING:
    import h5py

__all__ = [
    "FILLS",
    "PACKING_ATTRIBUTES",
    "Packing",
    "check_packed_alike",
    "packed_alike",
    "packing_of",
    "packing_text",
    "packing_warnings",
]

FILLS = ("_FillValue", "missing_value", "MissingValue")
"""Attributes that mark missing values."""

Packing = Mapping[str, Mapping[str, Any]]  # field -> attribute -> numbers or text

# Attribute -> the value that changes nothing.
PACKING_ATTRIBUTES: dict[str, float | str | None] = {
    "scale_factor": 1.0,
    "add_offset": 0.0,
    "_Unsigned": "false",
    "_FillValue": None,
    "missing_value": None,
    "ScaleFactor": 1.0,
    "Offset": 0.0,
    "MissingValue": None,
}


def packing_of(file: h5py.Group, fields: Iterable[str], group: str = "") -> dict[str, Any]:
    """Return the packing attributes of each field of `group` that has any.

    Attributes without effect are left out: a scale of 1, an offset of 0, and NaN for missing
    values. Raises what h5py raises for damaged attributes.
    """
    found = {}
    for name in fields:
        stored = stored_name(group, name)
        # What a table says holds for its columns.
        place = (stored if stored in file else stored.rpartition("/")[0]).encode()
        values = {
            key: _read(file, place, key) for key in PACKING_ATTRIBUTES if _has(file, place, key)
        }
        plain = {
            key
            for key, v in values.items()
            if v == PACKING_ATTRIBUTES[key] or (v != v and key in FILLS)
        }
        values = {key: v for key, v in values.items() if key not in plain}
        if values:
            found[name] = values
    return found


def packed_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether equal stored values mean the same; NaN, too, is equal to itself."""
    return repr(one) == repr(other)


def check_packed_alike(
    path: Path | str, first: tuple[str, Mapping[str, Any]], other: tuple[str, Mapping[str, Any]]
) -> None:
    """Raise DataError if two arrays of a file, each (name, packing), are not packed_alike()."""
    if not packed_alike(first[1], other[1]):
        raise DataError(
            f"{path}: {other[0]} is packed by other attributes than {first[0]}, so that equal "
            "values stand for different ones; unpack all"
        )


def packing_text(values: Mapping[str, Any]) -> str:
    """Return the attributes of a field in one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def packing_warnings(path: str, packing: Packing, what: str) -> list[str]:
    """Return a line for each field; `what` says what is done with the values."""
    return [
        f"{path}: field {name!r} is packed ({packing_text(values)}): {what}"
        for name, values in packing.items()
    ]


def _has(file: h5py.Group, place: bytes, name: str) -> bool:
    return bool(import_h5py().h5a.exists(file.id, name.encode(), obj_name=place))


def _read(file: h5py.Group, place: bytes, name: str) -> Any:
    """Return a number or text, a list of numbers, or "set" for anything else."""
    h5py = import_h5py()

    attribute = h5py.h5a.open(file.id, name.encode(), obj_name=place)
    try:
        dtype = attribute.dtype
        if attribute.shape == () and h5py.check_string_dtype(dtype) is not None:
            found = file[place].attrs[name]
            return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
    except (TypeError, ValueError):  # h5py has no dtype for some HDF5 types
        return "set"
    if attribute.shape is None or dtype.kind not in "biufS":
        return "set"
    values = np.empty(attribute.shape, dtype)
    attribute.read(values)
    if values.dtype.kind == "S":
        return b"".join(values.ravel().tolist()).decode("utf-8", "replace")
    plain: Any = values.ravel().tolist()
    return plain[0] if len(plain) == 1 else plain
