"""The slab folder on disk: names of its files, and their attributes.

A folder holds slab-00000.h5, slab-00001.h5, ... and index.h5. Every slab is plain HDF5: one
contiguous, 4-KiB-aligned dataset per field, space allocated early, no user block, little-endian,
with the attributes of `SlabHeader`. If compressed, a dataset has chunks of whole rows. The
attribute crc32c of a dataset has the CRC-32C of each block of `checksum_rows` rows; a block has
about 4 MiB over all fields. index.h5 shows all slabs as one virtual dataset per field, so that any
HDF5 program can read the whole, and ends with a checksum of its own (index_checksum.py).

A ragged field is a group with the attributes LONGEST and LARGEST_BLOCK and two datasets: values,
the elements of all samples one after the other, and offsets (int64). Sample i of a slab has the
elements offsets[i] to offsets[i + 1], counted from the first of the whole dataset. Block i of
values has the elements of the samples of block i; block i of offsets has one offset more than
samples.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsgd.errors import DataError

from ..needed_for import needed_for

if TYPE_CHECKING:
    import h5py

__all__ = [
    "CHECKSUMS",
    "FORMAT_VERSION",
    "INDEX_NAME",
    "LARGEST_BLOCK",
    "LIBVER",
    "LONGEST",
    "OFFSETS",
    "SOURCE_ORDER",
    "VALUES",
    "WHOLE",
    "FieldSpec",
    "SlabHeader",
    "import_h5py",
    "is_slab_folder",
    "read_header",
    "slab_name",
    "slab_number",
]

FORMAT_VERSION = 2
INDEX_NAME = "index.h5"
CHECKSUMS = "crc32c"  # attribute of a dataset: unsigned 32-bit, one for each block
SOURCE_ORDER = -1  # permutation_seed of a folder that keeps the order of its source
WHOLE = -1  # slab_index of index.h5
VALUES, OFFSETS = "values", "offsets"  # the datasets of a ragged field, in a group of its name
# Attributes of that group, in elements: of the longest sample and of the largest block.
LONGEST, LARGEST_BLOCK = "longest_sample", "largest_block"
# Metadata of this version has checksums: if damaged, it gives an error; older versions can crash
# HDF5. Virtual datasets need 1.10 anyway.
LIBVER = ("v110", "v110")
_TEXTS = frozenset({"dataset_uuid", "source_digest"})
_LEAST = {"slab_index": WHOLE, "permutation_seed": SOURCE_ORDER, "num_slabs": 1, "checksum_rows": 1}
_MOST = 1 << 62  # of each number except a seed: sums of two fit in 64 bits
_SLAB = re.compile(r"slab-([0-9]{5,18})\.h5")


def import_h5py() -> Any:
    """Import h5py on first use."""
    with needed_for("hsgd.io", "h5py"):
        import h5py
    return h5py


def slab_name(slab: int) -> str:
    """Return the file name of slab number `slab`."""
    return f"slab-{slab:05d}.h5"


def slab_number(name: str) -> int | None:
    """Return the number of the slab with this file name; None for other names."""
    found = _SLAB.fullmatch(name)
    return int(found[1]) if found and slab_name(int(found[1])) == name else None


@dataclass(frozen=True)
class FieldSpec:
    """One field: its name, shape without the sample axis, and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ragged: bool = False  # a sample has any number of elements of this shape and dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample's value, or of one element of a ragged field."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SlabHeader:
    """The root attributes of a slab, and of the index (slab_index -1, all samples)."""

    format_version: int
    dataset_uuid: str
    slab_index: int
    num_slabs: int
    global_start: int
    num_samples: int
    permutation_seed: int
    source_digest: str
    checksum_rows: int
    sealed: bool


def read_header(file: h5py.File) -> SlabHeader | None:
    """Return a file's header; None if hsgd did not write it. DataError for other versions."""
    attrs = file.attrs  # h5py makes a new object each time
    if "format_version" not in attrs or "dataset_uuid" not in attrs:
        return None
    version = _read_attribute(file.filename, attrs, "format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{file.filename}: format_version {version}, this hsgd reads {FORMAT_VERSION}; "
            "convert the data again or install the matching hsgd"
        )
    path = file.filename
    values = {f.name: _read_attribute(path, attrs, f.name) for f in fields(SlabHeader)}
    values["sealed"] = bool(values["sealed"])
    return SlabHeader(**values)


def _read_attribute(path: str, attrs: h5py.AttributeManager, name: str) -> Any:
    if name not in attrs:
        raise DataError(f"{path}: attribute {name} is missing; convert again")
    value = attrs[name]
    if name in _TEXTS:
        if isinstance(value, bytes) and value.isascii():
            return value.decode()
    elif isinstance(value, np.integer):
        number = int(value)
        if number >= _LEAST.get(name, 0) and (number <= _MOST or name == "permutation_seed"):
            return number
    raise DataError(
        f"{path}: attribute {name} is {str(value)[:40]!r}, which hsgd never writes; "
        "restore this file or convert again"
    )


def is_slab_folder(path: Path) -> bool:
    """Return whether `path` is a folder with an index file."""
    return (path / INDEX_NAME).is_file()
