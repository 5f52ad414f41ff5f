"""DataMap: the place of every sample in its files; immutable, picklable, without open files."""

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
    """Position, checksums and statistics of a ragged field's offsets in one file."""

    offset: int  # byte position of the first offset; -1 if `held`
    checksums: bytes  # as in Extent
    first: int  # value of the first offset
    elements: int  # of all samples in the file
    longest: int  # elements of the longest sample
    largest_block: int  # elements of the largest checksum block
    columns: int = 0  # of a sparse matrix whose rows are samples
    held: bytes = b""  # int64, all offsets, if the file has them in another form or not at all


@dataclass(frozen=True)
class Extent:
    """Place of the rows of one field, or of the elements of a ragged field, in one file."""

    offset: int  # byte position of row 0; -1 for h5py, for `chunks`, and if `gathered`; 0 with
    # `positions`
    stored_dtype: np.dtype[Any]  # with the byte order of the file
    chunk_rows: int  # of one HDF5 chunk
    chunk_bytes: int  # of one HDF5 chunk
    refusal: str  # why HDF5 is not bypassed; "" if it is
    checksums: bytes = b""  # uint32 CRC-32C of each block of checksum_rows samples, if any
    offsets: Offsets | None = None  # of a ragged field
    chunks: Chunks | None = None  # of a field that is read in chunks, without HDF5
    linked: tuple[str, Identity] | None = None  # external file with the rows, and its identity
    gathered: bool = False  # rows are windows made of several parts (packed_map.py)
    unwritten: str = ""  # which rows were never written: HDF5 gives fill values
    positions: bytes = b""  # int64, byte position of each row, if rows lie apart
    places: tuple[str, ...] = ()  # of rows that h5py reads one by one: their groups in the file
    stored: str = ""  # name in the file, if it is not that of the field


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
    """Metadata of a dataset.

    Attributes:
        header: that of the index; None for an ordinary HDF5 file.
        left_out: name -> why an item that the caller did not exclude is not a field.
        windows: of a packed dataset, whose samples are windows of another dataset.
        group: field names are those inside this group of the files; "" is the whole file.
        access: how data behind a URL is read; None for files.
        packing: by field, attributes of fields whose stored values stand for others.
        note: how the layout of the files was understood; "" if rows are samples.
        sample_group: the group of the first sample, if groups of the file are samples.
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
    note: str = ""
    sample_group: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample over all fields; the average if some are ragged."""
        return -(-self.nbytes // max(1, self.num_samples))

    @property
    def nbytes(self) -> int:
        """Bytes of all samples, without offsets."""
        return sum(map(self.field_bytes, self.fields))

    @property
    def slab_counts(self) -> list[int]:
        return [slab.count for slab in self.slabs]

    @property
    def chunk_rows(self) -> int:
        """Samples of the largest HDF5 chunk; 1 without chunks, and for chunks of elements."""
        rows = (extent.chunk_rows for extent in self.extents() if extent.offsets is None)
        return max(rows, default=1)

    @property
    def checksum_rows(self) -> int:
        """Rows that one checksum covers; 0 without checksums."""
        return 0 if self.header is None else self.header.checksum_rows

    def extents(self) -> Iterator[Extent]:
        return (extent for slab in self.slabs for extent in slab.extents.values())

    def offsets(self, spec: FieldSpec) -> list[Offsets]:
        """Return the offsets of a field by file; empty if it is not ragged."""
        found = (slab.extents[spec.name].offsets for slab in self.slabs)
        return [offsets for offsets in found if offsets is not None]

    def field_bytes(self, spec: FieldSpec) -> int:
        """Return the bytes of all samples of a field, without offsets."""
        elements = sum(offsets.elements for offsets in self.offsets(spec))
        return (elements if spec.ragged else self.num_samples) * spec.row_bytes

    def longest(self, spec: FieldSpec) -> int:
        """Return the elements of the longest sample of a ragged field."""
        return max((offsets.longest for offsets in self.offsets(spec)), default=0)

    def block_bytes(self, spec: FieldSpec) -> int:
        """Return the most bytes of a field, or of its offsets, that one checksum covers."""
        rows = min(self.checksum_rows, max(self.slab_counts, default=0))
        if not spec.ragged:
            return spec.row_bytes * rows
        largest = max((offsets.largest_block for offsets in self.offsets(spec)), default=0)
        return max(spec.row_bytes * largest, 8 * (rows + 1))

    def fingerprint(self) -> str:
        """Return text that identifies this dataset, wherever its files lie: a uuid or digest."""
        if self.windows is not None:
            return f"{self.windows.source.fingerprint()} in windows of {self.windows.length}"
        if self.header is not None:
            return self.header.dataset_uuid
        specs: list[Any] = [(spec.name, spec.shape, spec.dtype.str) for spec in self.fields]
        sizes = [slab.identity[0] for slab in self.slabs]
        sizes += [identity[0] for _, identity in self.linked_files()]
        specs += [self.group] if self.group else []
        files = list(dict.fromkeys(slab.path for slab in self.slabs))
        specs += [file.rpartition("/")[2] for file in files] if len(files) > 1 else []
        return hashlib.sha256(json.dumps([specs, sizes]).encode()).hexdigest()[:32]

    def linked_files(self) -> list[tuple[str, Identity]]:
        """Return the files to which external links lead, each once."""
        return sorted({each.linked for each in self.extents() if each.linked is not None})

    def read_by(self) -> dict[str, str]:
        """Return by field how it is read.

        "preadv", or "range requests" behind a URL, with " + " and the filters of chunks; or "h5py:
        " and the reason.
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
        """Return by field which rows were never written, in the first file with such rows."""
        slabs = self.slabs if self.windows is None else self.windows.source.slabs
        found: dict[str, str] = {}
        for slab in slabs:
            for name, extent in slab.extents.items():
                if extent.unwritten:
                    found.setdefault(name, f"{slab.path}: {name!r}: {extent.unwritten}")
        return found

    def refusals(self) -> dict[str, str]:
        """Return by field why HDF5 is not bypassed; "" if it is."""
        first: dict[str, str] = {spec.name: "" for spec in self.fields}
        for slab in self.slabs:
            for name, extent in slab.extents.items():
                first[name] = first[name] or extent.refusal
        return first


@dataclass(frozen=True)
class Windows:
    """The source of the windows of a packed dataset."""

    source: DataMap  # the dataset of ragged samples
    length: int  # elements of a window
    crossing: frozenset[int]  # slabs that are one window with elements of several files
    tail: int  # elements after the last whole window, which are not read

    @property
    def name(self) -> str:
        """A field whose offsets say where documents begin; all fields have equal offsets."""
        return self.source.fields[0].name

    @property
    def chunked(self) -> bool:
        """True if a window can only be read with the whole chunk around it."""
        return any(extent.chunks is not None for extent in self.source.extents())
