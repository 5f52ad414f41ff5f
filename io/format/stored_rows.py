"""StoredRows: whether the rows of a dataset were ever written; HDF5 gives fill values for others.

Virtual datasets and their sources at any depth, files of external storage, and missing chunks are
checked before HDF5 reads them, or reads the shape of a virtual dataset: HDF5 opens whatever a
source names, and follows a circle of sources until the process dies.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsgd.errors import DataError

from .chunk_bounds import check_chunk_shape, check_stored_chunks
from .link_guard import LinkGuard, named_file, no_file
from .opening import open_hdf5
from .slab_folder import import_h5py

if TYPE_CHECKING:
    import h5py

__all__ = ["StoredRows", "source_rows", "unwritten_lines"]

_DEEPEST = 16  # virtual datasets of virtual datasets
_MOST_TILES = 4096  # parts of a virtual dataset, other than ranges of rows, that are united


def unwritten_lines(unwritten: Iterable[str], *, accepted: bool, option: str) -> list[str]:
    """Return warnings for DataMap.unwritten(); raise DataError unless accepted, by `option`."""
    lines = list(unwritten)
    if lines and not accepted:
        raise DataError(
            f"{lines[0]}, and HDF5 would give fill values; write them, name other fields, or take "
            f"the fill values with {option}"
        )
    return [f"{line}; samples have fill values there" for line in lines]


class StoredRows:
    """Checks of the datasets of one file; each is checked once, however often it is a source."""

    def __init__(self) -> None:
        self._h5py = import_h5py()
        self._above: list[tuple[Any, str]] = []  # virtual datasets whose sources are being checked
        self._seen: dict[Any, str] = {}

    def gaps(self, dataset: h5py.Dataset) -> str:
        """Return which rows of a dataset were never written, in words with counts; "" for none.

        Raises DataError naming file, dataset and source if a source, rows of a source, or a file of
        external storage is missing.
        """
        info = self._h5py.h5o.get_info(dataset.id)
        key = (*_file_of(dataset), info.addr)
        where = f"{dataset.file.filename}: {dataset.name}"
        if any(key == other for other, _ in self._above):
            ways = [name for _, name in self._above]
            raise DataError(
                f"{where} is virtual and takes its rows from itself, through {' and '.join(ways)}; "
                "write it anew"
            )
        if len(self._above) > _DEEPEST:
            raise DataError(
                f"{where}: virtual datasets of virtual datasets, more than {_DEEPEST} deep; write "
                "one without the others"
            )
        if key not in self._seen:
            create = dataset.id.get_create_plist()
            if create.get_layout() == self._h5py.h5d.VIRTUAL:
                self._above.append((key, where))
                try:
                    self._seen[key] = self._virtual_gaps(dataset, create)
                finally:
                    self._above.pop()
            elif create.get_external_count():
                _check_external(dataset, create)
                self._seen[key] = ""
            else:
                check_chunk_shape(dataset)
                if self._above:  # HDF5 reads the sources of virtual datasets
                    check_stored_chunks(dataset)
                self._seen[key] = _plain_gaps(dataset, create)
        return self._seen[key]

    def opens_sources(self, dataset: h5py.Dataset) -> bool:
        """Return whether HDF5 opens sources of a dataset as soon as its shape is read."""
        create = dataset.id.get_create_plist()
        return create.get_layout() == self._h5py.h5d.VIRTUAL and any(
            _is_endless(create.get_virtual_vspace(n)) for n in range(create.get_virtual_count())
        )

    def _virtual_gaps(self, dataset: h5py.Dataset, create: Any) -> str:
        where = f"{dataset.file.filename}: {dataset.name}"
        if dataset.file.driver == "fileobj":
            raise DataError(f"{where} is virtual, and its sources are not read from a URL; copy it")
        by_file: dict[str, list[int]] = {}
        for number in range(create.get_virtual_count()):
            by_file.setdefault(create.get_virtual_filename(number), []).append(number)
        found: dict[int, tuple[str, tuple[int, ...]]] = {}
        told: list[str] = []
        for name, numbers in by_file.items():
            with self._source_file(dataset, name, where) as file:
                for number in numbers:
                    source = create.get_virtual_dsetname(number).replace("%%", "%")
                    full, item = f"{file.filename}: {source}", self._source(file, source, where)
                    gaps = self._source_gaps(item, where)  # before the shape is read
                    told += [f"of the source {full}, {gaps}"] if gaps else []
                    found[number] = full, item.shape or ()
        for number, (full, shape) in found.items():
            spaces = create.get_virtual_srcspace(number), create.get_virtual_vspace(number)
            if not _holds(*spaces, shape, dataset.shape):
                raise DataError(
                    f"{where} takes rows from {full}, which has the shape {shape} and not all that "
                    "is taken from it; restore it"
                )
        if unmapped := _unmapped(dataset, create):
            told.insert(0, f"{unmapped} of {math.prod(dataset.shape)} values have no source")
        more = f", and {len(told) - 1} more" if len(told) > 1 else ""
        return told[0] + more if told else ""

    def _source_gaps(self, source: h5py.Dataset, where: str) -> str:
        try:
            return self.gaps(source)
        except DataError as error:
            if len(self._above) > 1 or str(error).startswith(where):
                raise
            raise DataError(f"{where}: {error}") from None

    def _source(self, file: h5py.File, name: str, where: str) -> h5py.Dataset:
        try:
            reason = LinkGuard().obstacle(file["/"], name)
            if not reason and isinstance(file[name], self._h5py.Dataset):
                return file[name]
        except DataError:
            raise
        except (KeyError, LookupError, OSError, RuntimeError, ValueError):
            reason = ""
        raise DataError(
            f"{where} takes rows from {file.filename}: {name}, which is {reason or 'missing'}; "
            "restore it"
        )

    @contextmanager
    def _source_file(self, dataset: h5py.Dataset, name: str, where: str) -> Iterator[h5py.File]:
        if name == ".":
            yield dataset.file
            return
        if "%b" in name.replace("%%", ""):
            raise DataError(
                f"{where} is virtual and names its sources by a pattern, {name}, which is not "
                "read; copy it with h5repack, or name the sources one by one"
            )
        name = name.replace("%%", "%")
        place, reason = named_file(Path(dataset.file.filename), name, "HDF5_VDS_PREFIX")
        if reason:
            raise DataError(f"{where} takes rows from {reason}; restore it")
        with open_hdf5(str(place)) as file:
            yield file


def source_rows(
    dataset: h5py.Dataset,
) -> Iterator[tuple[str, str, tuple[int, int] | None, int | None]]:
    """Yield the sources of a virtual dataset, which StoredRows has checked.

    For each: name of file and dataset, the range of rows that it fills, and the first row of it
    there, -1 if it is taken as a whole; None for what is no range of whole rows.
    """
    h5s = import_h5py().h5s

    create = dataset.id.get_create_plist()
    for number in range(create.get_virtual_count()):
        spaces = create.get_virtual_vspace(number), create.get_virtual_srcspace(number)
        target, source = (_range_of(space, dataset.shape) for space in spaces)
        if spaces[1].get_select_type() == h5s.SEL_ALL:
            source = (-1, 0)
        name, stored = create.get_virtual_filename(number), create.get_virtual_dsetname(number)
        first = None if source is None or "%b" in name.replace("%%", "") else source[0]
        yield name.replace("%%", "%"), stored.replace("%%", "%"), target, first


def _range_of(space: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the range of whole rows of `shape[1:]` that is selected; None for other selections."""
    h5s = import_h5py().h5s

    if space.get_select_type() == h5s.SEL_ALL:
        return 0, shape[0]
    if space.get_select_type() != h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return None
    if _is_endless(space) or space.get_simple_extent_ndims() != len(shape):
        return None
    own = space.get_simple_extent_dims()
    return _rows_only(_cut(space, own), own) if own[1:] == shape[1:] else None


def _file_of(item: Any) -> tuple[int, int]:
    """Return device and inode of an object's file, whatever its path."""
    if item.file.driver == "fileobj":
        return -1, 0
    status = os.stat(item.file.filename)
    return status.st_dev, status.st_ino


def _holds(wanted: Any, virtual: Any, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether a source of shape `shape` has all that is selected of it.

    `whole` is the shape of the virtual dataset. An unlimited selection must have as much as the
    virtual dataset has room for.
    """
    h5s = import_h5py().h5s

    if wanted.get_select_type() == h5s.SEL_ALL:  # the file does not store its extent
        return math.prod(shape) >= int(virtual.get_select_npoints())
    if wanted.get_simple_extent_ndims() != len(shape):
        return False
    if _is_endless(wanted):
        return _points(_cut(wanted, shape), shape) >= _points(_cut(virtual, whole), whole)
    if not wanted.get_select_npoints():
        return True
    _, last = wanted.get_select_bounds()
    return all(n < have for n, have in zip(last, shape, strict=True))


_Slab = tuple[tuple[int, int, int, int], ...]  # by axis: start, stride, count, block


def _is_endless(space: Any) -> bool:
    h5s = import_h5py().h5s

    if space.get_select_type() != h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return False
    _, _, count, block = space.get_regular_hyperslab()
    return h5s.UNLIMITED in (*count, *block)


def _cut(space: Any, shape: tuple[int, ...]) -> _Slab:
    """Return a regular selection, limited to a dataset of this shape."""
    found = []
    for size, start, stride, count, block in zip(
        shape, *space.get_regular_hyperslab(), strict=True
    ):
        left = max(0, size - start)
        count = min(count, -(-left // stride))
        found.append((start, stride, count, min(block, left)))
    return tuple(found)


def _points(slab: _Slab, shape: tuple[int, ...]) -> int:
    total = 1
    for size, (start, stride, count, block) in zip(shape, slab, strict=True):
        last = min(block, size - start - (count - 1) * stride)
        total *= (count - 1) * block + last if count else 0
    return total


def _rows_only(slab: _Slab, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the rows of a selection that is a range of whole rows; None for others."""
    for size, (start, stride, count, block) in zip(shape[1:], slab[1:], strict=True):
        if start or size != (block if count == 1 else count * block if stride == block else -1):
            return None
    start, stride, count, block = slab[0]
    if count > 1 and stride != block:
        return None
    return start, min(shape[0], start + count * block)


def _unmapped(dataset: h5py.Dataset, create: Any) -> int:
    """Return how many values of a virtual dataset have no source; its sources were checked."""
    h5s = import_h5py().h5s

    shape = tuple(dataset.shape)
    total: int = math.prod(shape)
    ranges: list[tuple[int, int]] = []
    tiles: list[Any] = []
    for number in range(create.get_virtual_count()):
        space = create.get_virtual_vspace(number)
        if space.get_select_type() == h5s.SEL_ALL:
            return 0
        if space.get_select_type() != h5s.SEL_HYPERSLABS:
            return total - int(space.get_select_npoints()) if create.get_virtual_count() == 1 else 0
        if not space.is_regular_hyperslab():
            tiles.append(space)
            continue
        slab = _cut(space, shape)
        rows = _rows_only(slab, shape) if shape else None
        if rows is None:
            part = h5s.create_simple(shape)
            start, stride, count, block = zip(*slab, strict=True)
            part.select_hyperslab(start, count, stride, block)
            tiles.append(part)
        else:
            ranges.append(rows)
    if not tiles:
        return int((shape[0] - _covered(ranges)) * math.prod(shape[1:]))
    for first, stop in ranges:
        part = h5s.create_simple(shape)
        part.select_hyperslab((first, *(0 for _ in shape[1:])), (stop - first, *shape[1:]))
        tiles.append(part)
    if len(tiles) > _MOST_TILES:  # assume that they do not overlap
        return max(0, total - sum(int(tile.get_select_npoints()) for tile in tiles))
    union = tiles[0]
    for tile in tiles[1:]:
        union = union.combine_select(tile, h5s.SELECT_OR)
    return total - int(union.get_select_npoints())


def _covered(ranges: list[tuple[int, int]]) -> int:
    covered = reached = 0
    for start, stop in sorted(ranges):
        covered += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


def _check_external(dataset: h5py.Dataset, create: Any) -> None:
    """Raise DataError unless the files of external storage have all bytes of a dataset.

    Such files have no form of their own, so a hostile one could name any file of the user: they lie
    in the folder of the HDF5 file, in the current one, or in that of HDF5_EXTFILE_PREFIX.
    """
    left = math.prod(dataset.shape or (0,)) * dataset.id.get_type().get_size()
    where = f"{dataset.file.filename}: {dataset.name}"
    folder = str(Path(dataset.file.filename).absolute().parent)
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", folder)
    for number in range(create.get_external_count()):
        if left <= 0:
            return
        name, offset, size = create.get_external(number)
        path = Path(prefix) / os.fsdecode(name)
        wanted = min(left, size)
        if not path.exists():
            raise DataError(f"{where} has its rows in {path}, which is missing; restore it")
        if reason := no_file(path):
            raise DataError(f"{where} has its rows in {path}, {reason}")
        is_here = not path.is_absolute() and ".." not in path.parts
        real = str(Path(dataset.file.filename).resolve().parent)  # behind a symlink
        homes = [folder, real, *filter(None, [prefix]), *([""] if is_here else [])]
        if not any(path.resolve().is_relative_to(Path(home).resolve()) for home in homes):
            raise DataError(
                f"{where} has its rows in {path}, outside of the folders of its file and of this "
                f"program; to read it, export HDF5_EXTFILE_PREFIX={path.resolve().parent}"
            )
        if path.stat().st_size < offset + wanted:
            raise DataError(
                f"{where} has its rows in {path}, of which bytes [{offset}, {offset + wanted}) are "
                f"needed and which ends at {path.stat().st_size}; restore it"
            )
        left -= wanted


def _plain_gaps(dataset: h5py.Dataset, create: Any) -> str:
    """Return which rows were never allocated, of a dataset neither virtual nor external."""
    h5d = import_h5py().h5d

    if not dataset.shape or not math.prod(dataset.shape):
        return ""
    if dataset.chunks is None:
        # Its offset is a number in files with a user block, also if nothing was allocated.
        stored = dataset.id.get_storage_size()
        if create.get_layout() != h5d.CONTIGUOUS:
            return ""
        nbytes = math.prod(dataset.shape) * dataset.id.get_type().get_size()
        if 0 < stored < nbytes:  # HDF5 gives what lies in its memory for the others
            raise DataError(
                f"{dataset.file.filename}: damaged, {dataset.name} has {stored} bytes and its "
                f"shape {dataset.shape} needs {nbytes}; copy or convert it again"
            )
        if stored:
            return ""
        return f"none of {dataset.shape[0]} rows was ever written"
    chunks = dataset.chunks
    total = math.prod(-(-n // step) for n, step in zip(dataset.shape, chunks, strict=True))
    there = int(dataset.id.get_num_chunks())
    return "" if there >= total else f"{total - there} of {total} chunks were never written"
