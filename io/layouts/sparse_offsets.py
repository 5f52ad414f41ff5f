"""sparse_offsets: where the rows of a sparse matrix begin, and how many columns it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsgd.errors import DataError

from ..format.chunk_bounds import check_stored_chunks
from ..format.data_map import Offsets
from ..format.filters import load_filters
from ..format.sparse_kind import PARTS, plain_dataset
from ..format.stored_rows import StoredRows
from ..format.supported_dtype import check_claim

if TYPE_CHECKING:
    import h5py

__all__ = ["sparse_offsets"]


def sparse_offsets(group: h5py.Group, file_bytes: int) -> Offsets:
    """Return where the rows of a matrix begin; raise DataError if its arrays do not fit."""
    where = f"{group.file.filename}: {group.name}"
    indptr = group["indptr"]
    if indptr.ndim != 1 or indptr.dtype.kind not in "iu" or not indptr.size:
        raise DataError(f"{where}: indptr is {indptr.shape} {indptr.dtype}; restore this file")
    check_claim(indptr, indptr.dtype, file_bytes, group.file.filename)
    if gaps := StoredRows().gaps(indptr):
        raise DataError(f"{where}: indptr: {gaps}; restore this file")
    check_stored_chunks(indptr)
    if missing := load_filters(indptr):
        raise DataError(f"{where}: {missing}")
    ends = indptr[()].astype(np.int64)
    lengths = np.diff(ends)
    sizes = [group[part].shape for part in PARTS]
    if ends[0] or lengths.min(initial=0) < 0 or any(size != (ends[-1],) for size in sizes):
        raise DataError(
            f"{where}: indptr runs from {ends[0]} to {ends[-1]}, and indices and data have the "
            f"shapes {sizes[0]} and {sizes[1]}; restore this file"
        )
    if group["indices"].dtype.kind not in "iu":
        raise DataError(f"{where}: indices are {group['indices'].dtype}; restore this file")
    rows, columns = _sides(group, where)
    if rows != len(lengths):
        raise DataError(f"{where}: indptr has {len(lengths)} rows, and its shape {rows}")
    longest = int(lengths.max(initial=0))
    return Offsets(-1, b"", 0, int(ends[-1]), longest, longest, columns, ends.tobytes())


def _sides(group: h5py.Group, where: str) -> tuple[int, int]:
    """Return the rows and columns of a matrix."""
    shape = group.attrs.get("shape", group.attrs.get("h5sparse_shape"))
    stored = plain_dataset(group, "shape")
    if shape is None and stored is not None and stored.shape == (2,):
        shape = stored[()][::-1] if stored.dtype.kind in "iu" else None
    sides = np.asarray(shape).tolist() if shape is not None else []
    if len(sides) != 2 or not all(isinstance(side, int) and side >= 0 for side in sides):
        raise DataError(f"{where}: its shape is {sides}, and a matrix has two sides")
    return int(sides[0]), int(sides[1])
