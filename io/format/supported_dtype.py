"""supported_dtype: which datasets become tensors, and which of them only h5py reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.errors import DataError

from .chunk_bounds import check_stored_chunks
from .filters import load_filters
from .opening import first_line
from .slab_folder import import_h5py

if TYPE_CHECKING:
    import h5py

__all__ = [
    "NO_NUMBERS",
    "NUMBERS",
    "UnsupportedType",
    "check_claim",
    "check_h5py_reads",
    "is_stored_as_in_memory",
    "supported_dtype",
]

NUMBERS = "biufc"
"""Kinds of dtypes that become tensors: bool, integers, floats, complex."""
NO_NUMBERS = "it holds neither numbers nor bool"
"""Why a field that was not asked for is left out."""
_MOST_BYTES = 1 << 62  # of a dataset; positions are 64-bit numbers


class UnsupportedType(DataError):
    """A dataset holds neither numbers nor bool."""


def supported_dtype(dataset: h5py.Dataset, path: Path | str, name: str) -> np.dtype[Any]:
    """Return the dtype of a dataset; raise DataError if it cannot become a tensor."""
    try:
        dtype: np.dtype[Any] = dataset.dtype
    except (TypeError, ValueError) as error:  # h5py has no dtype for some HDF5 types
        raise UnsupportedType(
            f"{path}: field {name!r}: {first_line(error)}; name other fields"
        ) from None
    if dtype.kind not in NUMBERS:
        what = "a variable-length or text type" if dtype.kind in "OSU" else f"type {dtype}"
        if import_h5py().check_ref_dtype(dtype) is not None:
            what = "references"
        raise UnsupportedType(
            f"{path}: field {name!r} has {what}; only numbers and bool can be read, "
            "name the fields to use"
        )
    plain: np.dtype[Any] = np.dtype(dtype.str)  # without h5py's metadata on enumerations
    return plain


def is_stored_as_in_memory(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> bool:
    """Return whether values are plain numbers or bool, in the file as in memory but for byte order.

    `dtype` is that of supported_dtype().
    """
    exact = import_h5py().h5t.py_create(dtype, logical=True) == dataset.id.get_type()
    return dtype.kind != "c" and dtype.itemsize <= 8 and bool(exact)


def check_h5py_reads(dataset: h5py.Dataset, refusal: str, path: Path | str, name: str) -> None:
    """Raise DataError for a dataset that h5py must read and cannot, or not safely; local."""
    if isinstance(path, str):
        raise DataError(
            f"{path}: field {name!r}: {refusal}, which only h5py reads, and only from files; "
            "convert it with hsgd data convert, copy it, or name other fields"
        )
    check_stored_chunks(dataset)
    if missing := load_filters(dataset):
        raise DataError(f"{path}: field {name!r}: {missing}")


def check_claim(
    dataset: h5py.Dataset, dtype: np.dtype[Any], file_bytes: int, path: Path | str
) -> None:
    """Raise DataError for a shape that no file of this size can have: memory is planned by it."""
    rows, *row = dataset.shape or (1,)
    nbytes = rows * max(1, math.prod(row) * dtype.itemsize)
    create = dataset.id.get_create_plist()
    elsewhere = dataset.is_virtual or create.get_external_count()
    if nbytes > _MOST_BYTES or (nbytes > max(1 << 40, file_bytes << 20) and not elsewhere):
        raise DataError(
            f"{path}: {dataset.name} claims the shape {dataset.shape}, {nbytes} bytes, in a file "
            f"of {file_bytes}; restore this file"
        )
