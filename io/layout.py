"""The slab folder on disk: what it looks like, and how one is written whole or not at all.

A folder holds slab-00000.h5, slab-00001.h5, ... and index.h5. Every slab is plain HDF5: one
contiguous, 4-KiB-aligned dataset per field, space allocated early, no user block, little-endian,
with the attributes of `SlabHeader`. The attribute crc32c of a dataset has the CRC-32C of each of
its blocks of `checksum_rows` rows, which all fields together make about 4 MiB. index.h5 shows all
slabs as one virtual dataset per field, so that any HDF5 program reads the whole.

Owns names, attributes and the writing: a sibling folder under a temporary name, everything fsynced,
then one rename. Never reads samples (reader.py) and knows nothing of where they come from
(convert.py).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hsgd.io import native
from numpy.typing import NDArray

from hsgd.errors import DataError, MissingExtra

if TYPE_CHECKING:
    import h5py

__all__ = [
    "ALIGNMENT_BYTES",
    "CHECKSUMS",
    "FORMAT_VERSION",
    "INDEX_NAME",
    "FieldSpec",
    "SlabFolderWriter",
    "SlabHeader",
    "import_h5py",
    "is_slab_folder",
    "read_header",
    "slab_name",
    "staged_folder",
]

FORMAT_VERSION = 2
ALIGNMENT_BYTES = 4096
INDEX_NAME = "index.h5"
CHECKSUMS = "crc32c"  # attribute of a dataset: unsigned 32-bit, one for each block
CHECKSUM_BYTES = 4 << 20  # a block of all fields, about
# Metadata of this version carries checksums: damaged, it gives an error where older forms can crash
# HDF5. Virtual datasets need 1.10 anyway.
_LIBVER = ("v110", "v110")
SOURCE_ORDER = -1  # permutation_seed of a folder that keeps the order of its source
_OWN_FILES = re.compile(r"(index|slab-\d{5,})\.h5")
_WHOLE = -1  # slab_index of index.h5
_TEXTS = frozenset({"dataset_uuid", "source_digest"})
_LEAST = {
    "slab_index": _WHOLE,
    "permutation_seed": SOURCE_ORDER,
    "num_slabs": 1,
    "checksum_rows": 1,
}


def import_h5py() -> Any:
    """The h5py module, imported when it is first needed."""
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra(f"hsgd.io needs h5py ({error}); pip install 'hsgd[io]'") from None
    return h5py


def slab_name(slab: int) -> str:
    """File name of slab number `slab`."""
    return f"slab-{slab:05d}.h5"


@dataclass(frozen=True)
class FieldSpec:
    """One field of every sample: its name, shape without the sample axis, and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample's value."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


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
    """The header of an open file; None when the file was not written by hsgd.

    Raises DataError for another format_version.
    """
    if "format_version" not in file.attrs or "dataset_uuid" not in file.attrs:
        return None
    version = _read_attribute(file, "format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{file.filename}: format_version {version}, this hsgd reads {FORMAT_VERSION}; "
            "convert the data again or install the matching hsgd"
        )
    values = {field.name: _read_attribute(file, field.name) for field in fields(SlabHeader)}
    values["sealed"] = bool(values["sealed"])
    return SlabHeader(**values)


def _read_attribute(file: h5py.File, name: str) -> Any:
    """An attribute as text or number, as its name asks."""
    if name not in file.attrs:
        raise DataError(f"{file.filename}: attribute {name} is missing; convert again")
    value = file.attrs[name]
    if name in _TEXTS:
        if isinstance(value, bytes) and value.isascii():
            return value.decode()
    elif isinstance(value, np.integer) and value >= _LEAST.get(name, 0):
        return int(value)
    raise DataError(
        f"{file.filename}: attribute {name} is {str(value)[:40]!r}, which hsgd never writes; "
        "restore this file or convert again"
    )


def is_slab_folder(path: Path) -> bool:
    """True when `path` is a folder with an index file."""
    return (path / INDEX_NAME).is_file()


@contextmanager
def staged_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside `target` that becomes `target` when the block ends well, else vanishes.

    An existing target is refused, or with overwrite=True replaced once the new one is complete, but
    only when it holds nothing besides slab folders. Raises DataError; failures to write inside the
    block become DataError too.
    """
    target = Path(target).absolute()
    _check_target(target, overwrite)
    token = uuid.uuid4().hex[:12]
    staged = target.parent / f".{target.name}.tmp-{token}"
    old = target.parent / f".{target.name}.old-{token}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.mkdir()
        yield staged
        _sync_folder(staged)
        if target.exists():
            _check_target(target, overwrite)
            target.rename(old)
        staged.rename(target)
        _sync_folder(target.parent)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        if isinstance(error, DataError):
            raise
        remedy = "; free space or choose another disk" if error.errno == errno.ENOSPC else ""
        reason = error.strerror or str(error)
        raise DataError(f"cannot write {error.filename or target}: {reason}{remedy}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


class SlabFolderWriter:
    """Writes one dataset into an empty folder (of `staged_folder`): create, write rows, seal.

    Slabs exist with their full size from the start; rows are written in any order straight to their
    place in the file, and nothing counts until `seal` has written the digest and the seal into
    every slab and `write_index` has added the index.

    owned: the slabs that this writer makes (all by default); others have a writer elsewhere, with
    the same dataset_uuid, and one of the writers adds the index when all have sealed.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[FieldSpec],
        num_samples: int,
        num_slabs: int,
        seed: int,
        *,
        dataset_uuid: str | None = None,
        owned: Sequence[int] | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.bounds = [slab * num_samples // num_slabs for slab in range(num_slabs + 1)]
        self._folder = folder
        self._seed = seed
        row_bytes = sum(spec.row_bytes for spec in self.specs)
        self._checksum_rows = max(1, CHECKSUM_BYTES // max(1, row_bytes))
        self._uuid = dataset_uuid or uuid.uuid4().hex
        self.owned = tuple(range(num_slabs) if owned is None else owned)
        self._offsets = {slab: self._create_slab(slab) for slab in self.owned}

    def write(self, slab: int, spec: FieldSpec, row: int, values: NDArray[Any]) -> None:
        """Put `values` (rows of field `spec`, native, contiguous) at row `row` of the slab."""
        data = values.reshape(-1).view(np.uint8).data
        offset = self._offsets[slab][spec.name] + row * spec.row_bytes
        file = os.open(self._folder / slab_name(slab), os.O_WRONLY | os.O_CLOEXEC)
        try:
            while data:
                written = os.pwrite(file, data, offset)
                data, offset = data[written:], offset + written
        finally:
            os.close(file)

    def read_back(self, slab: int, spec: FieldSpec) -> NDArray[Any]:
        """All rows of a field in the slab, as written so far."""
        return self._read_rows(slab, spec, 0, self.bounds[slab + 1] - self.bounds[slab])

    def seal(self, source_digest: str) -> None:
        """Declare the owned slabs complete, with their checksums, and bring them to the disk."""
        h5py = import_h5py()

        for slab in self.owned:
            path = self._folder / slab_name(slab)
            with h5py.File(path, "r+", locking=False) as file:
                file.attrs.modify("source_digest", np.bytes_(source_digest.ljust(64)))
                for spec in self.specs:
                    file[spec.name].attrs.modify(CHECKSUMS, self._checksums_of(slab, spec))
                file.attrs.modify("sealed", np.uint8(1))
            _sync_file(path)

    def _read_rows(self, slab: int, spec: FieldSpec, row: int, rows: int) -> NDArray[Any]:
        with open(self._folder / slab_name(slab), "rb") as file:
            file.seek(self._offsets[slab][spec.name] + row * spec.row_bytes)
            flat = np.fromfile(file, spec.dtype, rows * int(np.prod(spec.shape, dtype=np.int64)))
        return flat.reshape((rows, *spec.shape))

    def _checksums_of(self, slab: int, spec: FieldSpec) -> NDArray[np.uint32]:
        rows, step = self.bounds[slab + 1] - self.bounds[slab], self._checksum_rows
        blocks = (
            self._read_rows(slab, spec, row, min(step, rows - row)) for row in range(0, rows, step)
        )
        return np.array([native.crc32c(block) for block in blocks], np.uint32)

    def _create_slab(self, slab: int) -> dict[str, int]:
        """Make a slab with all space allocated; field name -> byte offset of its rows."""
        h5py = import_h5py()

        start, stop = self.bounds[slab], self.bounds[slab + 1]
        path = self._folder / slab_name(slab)
        offsets = {}
        with h5py.File(
            path,
            "x",
            libver=_LIBVER,
            locking=False,
            alignment_threshold=1,
            alignment_interval=ALIGNMENT_BYTES,
        ) as file:
            self._write_header(file, slab, start, stop - start, " " * 64, sealed=False)
            for spec in self.specs:
                dataset = _create_contiguous(file, spec, stop - start)
                blocks = -(-(stop - start) // self._checksum_rows)
                file[spec.name].attrs[CHECKSUMS] = np.zeros(blocks, np.uint32)
                offset = dataset.get_offset()
                if offset is None or offset % ALIGNMENT_BYTES:
                    raise DataError(f"{path}: HDF5 put {spec.name!r} at {offset}, not aligned")
                offsets[spec.name] = int(offset)
        _reserve(path)
        return offsets

    def _write_header(
        self, file: h5py.File, slab: int, start: int, count: int, digest: str, *, sealed: bool
    ) -> None:
        attrs = file.attrs
        attrs["format_version"] = np.int64(FORMAT_VERSION)
        attrs["dataset_uuid"] = np.bytes_(self._uuid)
        attrs["slab_index"] = np.int64(slab)
        attrs["num_slabs"] = np.int64(len(self.bounds) - 1)
        attrs["global_start"] = np.int64(start)
        attrs["num_samples"] = np.int64(count)
        attrs["permutation_seed"] = np.int64(self._seed)
        attrs["source_digest"] = np.bytes_(digest)
        attrs["checksum_rows"] = np.int64(self._checksum_rows)
        attrs["sealed"] = np.uint8(sealed)

    def write_index(self, source_digest: str) -> None:
        """Add the index, after all slabs of all writers were sealed."""
        h5py = import_h5py()

        path = self._folder / INDEX_NAME
        total = self.bounds[-1]
        with h5py.File(path, "x", libver=_LIBVER, locking=False) as file:
            self._write_header(file, _WHOLE, 0, total, source_digest, sealed=True)
            for spec in self.specs:
                layout = h5py.VirtualLayout((total, *spec.shape), spec.dtype)
                for slab in range(len(self.bounds) - 1):
                    start, stop = self.bounds[slab], self.bounds[slab + 1]
                    layout[start:stop] = h5py.VirtualSource(
                        slab_name(slab), spec.name, (stop - start, *spec.shape), spec.dtype
                    )
                file.create_virtual_dataset(spec.name, layout)
        _sync_file(path)
        _sync_folder(self._folder)


def _create_contiguous(file: h5py.File, spec: FieldSpec, rows: int) -> h5py.h5d.DatasetID:
    """A contiguous dataset whose space exists at once and is not filled."""
    h5py = import_h5py()

    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    kind = h5py.h5t.py_create(spec.dtype, logical=True)
    space = h5py.h5s.create_simple((rows, *spec.shape))
    return h5py.h5d.create(file.id, spec.name.encode(), kind, space, create, link)


def _reserve(path: Path) -> None:
    """Take the disk space of a sparse file, so that a full disk shows at once."""
    with open(path, "rb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not every file system can
                raise


def _check_target(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise DataError(f"{target} exists and is not a folder; choose another name")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise DataError(f"{target} exists; choose another name or replace it with --overwrite")
    for entry in target.rglob("*"):
        own = _OWN_FILES.fullmatch(entry.name) and is_slab_folder(entry.parent)
        if not own and not entry.is_dir():
            raise DataError(f"{target} holds {entry}, which is no slab: not replaced, move it away")


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
