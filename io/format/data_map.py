"""The metadata of a dataset: where every sample lies in its files.

All of it is immutable and picklable and holds no open handle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..remote.object_reader import RemoteAccess
from .chunks import Chunks
from .opening import Identity
from .packing_of import Packing
from .slab_folder import FieldSpec, SlabHeader

__all__ = ["DataMap", "Extent", "Offsets", "SlabMap", "Windows"]


@dataclass(frozen=True)
class Offsets:
    """Where the offsets of a ragged field lie in one file, and what they point at.

    offset: of the first, in bytes. checksums: as in Extent. first: the value of the first.
    elements: of all samples in the file; of the longest sample; of the largest checksum block.
    """

    offset: int
    checksums: bytes
    first: int
    elements: int
    longest: int
    largest_block: int


@dataclass(frozen=True)
class Extent:
    """Where the rows of one field, or the elements of a ragged one, lie in one file.

    offset: of row 0, in bytes, -1 where HDF5 is not bypassed; refusal says why not, "" where it is.
    stored_dtype: with the byte order of the file. chunk_rows, chunk_bytes: of one HDF5 chunk.
    checksums: unsigned 32-bit CRC-32C of each block of checksum_rows samples, empty without.
    offsets: of a ragged field. chunks: of a field that is read by chunks, around HDF5; its offset
    is -1. linked: the file behind an external link in which the rows lie, and what it was.
    gathered: rows are windows that have to be put together (packed_map.py); its offset is -1.
    unwritten: what of the rows nobody ever wrote, for which HDF5 gives fill values.
    """

    offset: int
    stored_dtype: np.dtype[Any]
    chunk_rows: int
    chunk_bytes: int
    refusal: str
    checksums: bytes = b""
    offsets: Offsets | None = None
    chunks: Chunks | None = None
    linked: tuple[str, Identity] | None = None
    gathered: bool = False
    unwritten: str = ""


@dataclass(frozen=True)
class SlabMap:
    """One file: its samples are rows [start, start + count) of the dataset."""

    path: str
    start: int
    count: int
    identity: Identity
    extents: dict[str, Extent]


@dataclass(frozen=True)
class DataMap:
    """Metadata of a dataset. header is that of the index, None for an ordinary HDF5 file.

    left_out: what the caller did not choose away and is no field all the same, by name, and why.
    windows: of a packed dataset, whose samples are windows of that of another. group: the names of
    fields are those inside this group of the files; "" for the whole file. access: how what lies
    behind a URL is read; None for files. packing: attributes of fields whose values stand for
    others, by field.
    """

    path: str
    fields: tuple[FieldSpec, ...]
    slabs: tuple[SlabMap, ...]
    num_samples: int
    header: SlabHeader | None
    left_out: Mapping[str, str] = field(default_factory=dict)
    windows: Windows | None = None
    group: str = ""
    access: RemoteAccess | None = None
    packing: Packing = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample over all fields, on average where some are ragged."""
        return -(-self.nbytes // max(1, self.num_samples))

    @property
    def nbytes(self) -> int:
        """Bytes of all samples, without offsets."""
        return sum(map(self.field_bytes, self.fields))

    @property
    def slab_counts(self) -> list[int]:
        """Samples per file."""
        return [slab.count for slab in self.slabs]

    @property
    def chunk_rows(self) -> int:
        """Samples of the largest HDF5 chunk; 1 without chunks, and where they hold elements."""
        rows = (extent.chunk_rows for extent in self.extents() if extent.offsets is None)
        return max(rows, default=1)

    @property
    def checksum_rows(self) -> int:
        """Rows that one checksum covers; 0 when there are no checksums."""
        return 0 if self.header is None else self.header.checksum_rows

    def extents(self) -> Iterator[Extent]:
        """Yield those of all files and fields."""
        return (extent for slab in self.slabs for extent in slab.extents.values())

    def offsets(self, spec: FieldSpec) -> list[Offsets]:
        """Return the offsets of a field by file; none if it is not ragged."""
        found = (slab.extents[spec.name].offsets for slab in self.slabs)
        return [offsets for offsets in found if offsets is not None]

    def field_bytes(self, spec: FieldSpec) -> int:
        """Count the bytes of all samples of a field, without offsets."""
        elements = sum(offsets.elements for offsets in self.offsets(spec))
        return (elements if spec.ragged else self.num_samples) * spec.row_bytes

    def longest(self, spec: FieldSpec) -> int:
        """Return the number of elements of the longest sample of a ragged field."""
        return max((offsets.longest for offsets in self.offsets(spec)), default=0)

    def block_bytes(self, spec: FieldSpec) -> int:
        """Return the most bytes of a field, or of its offsets, that one checksum covers."""
        rows = min(self.checksum_rows, max(self.slab_counts, default=0))
        if not spec.ragged:
            return spec.row_bytes * rows
        largest = max((offsets.largest_block for offsets in self.offsets(spec)), default=0)
        return max(spec.row_bytes * largest, 8 * (rows + 1))

    def fingerprint(self) -> str:
        """Tell this dataset from others, wherever its files lie.

        Returns the uuid of slabs, else a digest of fields and sizes.
        """
        if self.windows is not None:
            return f"{self.windows.source.fingerprint()} in windows of {self.windows.length}"
        if self.header is not None:
            return self.header.dataset_uuid
        specs: list[Any] = [(spec.name, spec.shape, spec.dtype.str) for spec in self.fields]
        sizes = [slab.identity[0] for slab in self.slabs]
        sizes += [identity[0] for _, identity in self.linked_files()]
        specs += [self.group] if self.group else []
        return hashlib.sha256(json.dumps([specs, sizes]).encode()).hexdigest()[:32]

    def linked_files(self) -> list[tuple[str, Identity]]:
        """List the files that external links lead to, each once."""
        return sorted({each.linked for each in self.extents() if each.linked is not None})

    def read_by(self) -> dict[str, str]:
        """Say by field how it is read.

        "preadv", or "range requests" behind a URL, and " + " and the filters of chunks; or "h5py: "
        and why.
        """
        if self.windows is not None:
            return self.windows.source.read_by()
        found = {}
        way = "preadv" if self.access is None else "range requests"
        for name, refusal in self.refusals().items():
            chunks = self.slabs[0].extents[name].chunks
            plain = way if chunks is None else f"{way} + {chunks.names}"
            found[name] = f"h5py: {refusal}" if refusal else plain
        return found

    def unwritten(self) -> dict[str, str]:
        """Say by field what of it nobody ever wrote, in the first file with such rows."""
        slabs = self.slabs if self.windows is None else self.windows.source.slabs
        found: dict[str, str] = {}
        for slab in slabs:
            for name, extent in slab.extents.items():
                if extent.unwritten:
                    found.setdefault(name, f"{slab.path}: {name!r}: {extent.unwritten}")
        return found

    def refusals(self) -> dict[str, str]:
        """Say by field why HDF5 is not bypassed; "" where it is."""
        first: dict[str, str] = {spec.name: "" for spec in self.fields}
        for slab in self.slabs:
            for name, extent in slab.extents.items():
                first[name] = first[name] or extent.refusal
        return first


@dataclass(frozen=True)
class Windows:
    """Where the windows come from. source: the dataset of ragged samples. crossing: slabs of the
    packed dataset that are one window each, with elements of several files. tail: elements behind
    the last whole window, which nobody gets.
    """

    source: DataMap
    length: int
    crossing: frozenset[int]
    tail: int

    @property
    def name(self) -> str:
        """A field whose offsets say where documents begin; all have the same."""
        return self.source.fields[0].name

    @property
    def chunked(self) -> bool:
        """Whether a window cannot be read without the chunk that it is in."""
        return any(extent.chunks is not None for extent in self.source.extents())
