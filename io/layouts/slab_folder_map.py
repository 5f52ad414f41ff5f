"""map_folder: makes a DataMap of a slab folder from its index and its slabs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hsgd.errors import DataError

from ..format.data_map import DataMap, SlabMap
from ..format.fields import choose_fields
from ..format.index_checksum import check_index
from ..format.opening import Folder, UnknownFields
from ..format.packing_of import packing_of
from ..format.slab_folder import INDEX_NAME, FieldSpec, SlabHeader, read_header, slab_name
from .file_map import map_file

if TYPE_CHECKING:
    import h5py

__all__ = ["map_folder", "map_undamaged"]

_MOST_MISSING = 1024  # and as many slabs as exist: more missing ones are refused at once


def map_folder(folder: Folder, names: Sequence[str] | None, group: str) -> DataMap:
    """Examine the index and every slab, and check that they belong together."""
    # Virtual datasets are for other programs: their maps have no checksum and load slowly.
    with _open_index(folder) as (file, index):
        specs, slabs = _map_slabs(folder, index, names, group)
        packing = packing_of(file, [spec.name for spec in specs], group)
    samples = sum(slab.count for slab in slabs)
    return DataMap(folder.path, specs, slabs, samples, index, group=group, packing=packing)


def map_undamaged(folder: Folder) -> tuple[DataMap, list[str]]:
    """Do map_folder(), but leave out damaged slabs; also return a line for each of these.

    Raises DataError if the index is damaged.
    """
    with _open_index(folder) as (_, index):
        pass
    specs, slabs, damage = _usable_slabs(folder, index)
    samples = sum(slab.count for slab in slabs)
    return DataMap(folder.path, specs, tuple(slabs), samples, index), damage


@contextmanager
def _open_index(folder: Folder) -> Iterator[tuple[h5py.File, SlabHeader]]:
    index_path = folder.place(INDEX_NAME)
    if isinstance(index_path, Path):
        check_index(index_path)
    with folder.examined(INDEX_NAME) as file:
        index = read_header(file)
        if index is None:
            raise DataError(f"{index_path}: not written by hsgd; convert the data again")
        if not index.sealed:
            raise DataError(f"{index_path}: not sealed (writing was cut off); convert again")
        present = folder.expect(index.num_slabs)
        if present is not None and index.num_slabs > 2 * present + _MOST_MISSING:
            raise DataError(
                f"{index_path}: attribute num_slabs is {index.num_slabs}, and {present} slabs are "
                "there; restore the slabs or this file, or convert again"
            )
        yield file, index


def _map_slabs(
    folder: Folder, index: SlabHeader, names: Sequence[str] | None, group: str
) -> tuple[tuple[FieldSpec, ...], tuple[SlabMap, ...]]:
    slabs: list[SlabMap] = []
    specs: tuple[FieldSpec, ...] = ()
    start = 0
    for number in range(index.num_slabs):
        chosen = [spec.name for spec in specs] if slabs else None
        slab_specs, slab = _map_slab(folder, index, number, start, names, group, chosen)
        if slabs and slab_specs != specs:
            raise DataError(
                f"{slab.path}: fields differ from those of slab 0; restore slab {number}"
            )
        specs = slab_specs
        slabs.append(slab)
        start += slab.count
    if start != index.num_samples:
        raise DataError(
            f"{folder.path}: {start} samples in the slabs, {index.num_samples} in the index; "
            "convert again"
        )
    return specs, tuple(slabs)


def _map_slab(
    folder: Folder,
    index: SlabHeader,
    number: int,
    start: int | None,
    names: Sequence[str] | None = None,
    group: str = "",
    chosen: Sequence[str] | None = None,
) -> tuple[tuple[FieldSpec, ...], SlabMap]:
    """Examine one slab.

    `start` is its first sample, None if only its header says so. `chosen` are the fields if they
    were already chosen from `names`.
    """
    name = slab_name(number)
    path = folder.place(name)
    if not folder.has(name):
        raise DataError(
            f"{path}: slab {number} of {index.num_slabs} is missing; restore it or convert again"
        )
    with folder.examined(name) as file:
        header = read_header(file)
        if start is None:
            start = 0 if header is None else header.global_start
        _check_slab(path, header, index, number, start)
        if chosen is None:
            chosen = choose_fields(file, path, names, group)[0]
        specs, slab = map_file(
            file, path, folder.identity(name), start, chosen, index.checksum_rows, group
        )
        if header is not None and header.num_samples != slab.count:
            raise DataError(
                f"{path}: {slab.count} samples, its header says {header.num_samples}; "
                f"restore slab {number}"
            )
    return specs, slab


def _usable_slabs(
    folder: Folder, index: SlabHeader
) -> tuple[tuple[FieldSpec, ...], list[SlabMap], list[str]]:
    """Return the fields of most slabs, the usable slabs, and why the others cannot be used.

    The usable slabs are numbered as if there were no others.
    """
    opened: list[tuple[tuple[FieldSpec, ...], SlabMap] | str] = []
    start: int | None = 0
    for number in range(index.num_slabs):
        try:
            specs, slab = _map_slab(folder, index, number, start)
        except (DataError, UnknownFields) as error:
            opened.append(str(error))
            start = None
            continue
        opened.append((specs, slab))
        start = slab.start + slab.count
    usual = Counter(one[0] for one in opened if not isinstance(one, str)).most_common(1)
    fields = usual[0][0] if usual else ()
    slabs, damage, start = [], [], 0
    for number, one in enumerate(opened):
        if isinstance(one, str):
            damage.append(one)
        elif one[0] == fields:
            slabs.append(replace(one[1], start=start))
            start += one[1].count
        else:
            damage.append(
                f"{one[1].path}: fields differ from those of most slabs; restore slab {number}"
            )
    return fields, slabs, damage


def _check_slab(
    path: Path | str, header: SlabHeader | None, index: SlabHeader, number: int, start: int
) -> None:
    """Raise DataError for a slab that is unsealed, or not slab `number` of this dataset."""
    if header is None:
        raise DataError(f"{path}: foreign file, not a slab of hsgd; restore slab {number}")
    if not header.sealed:
        raise DataError(f"{path}: not sealed (writing was cut off); convert again")
    if header.dataset_uuid != index.dataset_uuid:
        raise DataError(
            f"{path}: slab of another dataset ({header.dataset_uuid}, the index has "
            f"{index.dataset_uuid}); restore slab {number}"
        )
    if header.checksum_rows != index.checksum_rows:
        raise DataError(
            f"{path}: a checksum for {header.checksum_rows} rows, the index says "
            f"{index.checksum_rows}; restore slab {number}"
        )
    found = (header.slab_index, header.num_slabs, header.global_start)
    wanted = (number, index.num_slabs, start)
    if found != wanted:
        raise DataError(
            f"{path}: says (slab, slabs, first sample) = {found}, expected {wanted}; "
            "restore the original file names"
        )
