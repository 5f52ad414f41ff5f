"""open_map: makes a DataMap of files or URLs, without reading samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hsgd.errors import DataError

from ..format.data_map import DataMap
from ..format.fields import choose_fields, inner_name
from ..format.opening import (
    Identity,
    LocalFolder,
    RemoteFolder,
    examined,
    examined_object,
    identity_of,
)
from ..format.packing_of import packing_of
from ..format.slab_folder import INDEX_NAME, is_slab_folder, read_header
from ..remote.metadata_file import MetadataFile
from ..remote.object_reader import ObjectMissing, ObjectReader, RemoteAccess
from ..remote.urls import is_url, names_a_file, parent_url, url_of
from .file_map import map_file
from .sample_group_map import map_sample_groups
from .sample_groups import find_sample_groups
from .slab_folder_map import map_folder, map_undamaged

if TYPE_CHECKING:
    import h5py

__all__ = [
    "check_unique",
    "open_map",
    "open_undamaged",
]


def open_map(
    path: str | os.PathLike[str],
    fields: Sequence[str] | None = None,
    group: str | None = None,
    access: RemoteAccess | None = None,
) -> DataMap:
    """Examine a slab folder, its index file, an ordinary HDF5 file, or the URL of one.

    Soft and external links are followed. Single values and links that lead nowhere are named in
    left_out.

    Args:
        path: a path or URL (https, http or s3).
        fields: names of the datasets to use; by default all, which must have the same first
            dimension.
        group: of the files: it replaces the whole file, and names are those inside it.
        access: how long requests to a server are repeated.

    Raises:
        DataError: something is missing, truncated, foreign, unsealed, or of a type that cannot
            become a tensor; names the file.
        ValueError: unknown names of fields or of the group.
    """
    if isinstance(fields, str):
        raise TypeError(f"fields={fields!r} is one string; use a list of names")
    if not all(isinstance(name, str) for name in fields or ()):
        raise TypeError(f"fields={fields!r}; use a list of names")
    check_unique(fields or ())
    inside_of = inner_name(group)
    if is_url(path):
        return _map_url(url_of(path), fields, inside_of, access or RemoteAccess())
    location = Path(path).absolute()
    if location.is_dir():
        if not is_slab_folder(location):
            inside = ", ".join(sorted(p.name for p in location.iterdir() if is_slab_folder(p)))
            remedy = f"it holds {inside}" if inside else "make one: hsgd data convert SRC DST"
            raise DataError(f"{location}: no slab folder, {INDEX_NAME} is missing; {remedy}")
        return map_folder(LocalFolder(location), fields, inside_of)
    with examined(location) as file:
        data = _map_single(file, location, identity_of(location.stat()), fields, inside_of)
    return data or map_folder(LocalFolder(location.parent), fields, inside_of)


def _map_url(url: str, names: Sequence[str] | None, group: str, access: RemoteAccess) -> DataMap:
    """Do open_map() for a file or a folder behind a URL."""
    reader = ObjectReader(replace(access, disk=None))  # metadata is small, and not cached
    data, folder = None, url
    if names_a_file(url):
        content, folder = MetadataFile(url, reader), parent_url(url)
        with examined_object(content) as file:
            data = _map_single(file, url, content.identity, names, group)
    if data is None:
        home = RemoteFolder(folder, reader)
        if not home.has(INDEX_NAME):
            raise ObjectMissing(
                f"{url}: no slab folder, {INDEX_NAME} is missing; check the URL, which of one file "
                "ends in .h5"
            )
        data = map_folder(home, names, group)
    return replace(data, access=access)


def _map_single(
    file: h5py.File,
    path: Path | str,
    identity: Identity,
    names: Sequence[str] | None,
    group: str,
) -> DataMap | None:
    """Examine one open file as a dataset; return None for the index of a slab folder."""
    header = read_header(file)
    if header is not None and header.slab_index < 0:
        return None
    if header is not None and not header.sealed:
        raise DataError(f"{path}: not sealed (writing was cut off); convert again")
    if header is None:
        groups = find_sample_groups(file, group)
        if groups is not None and groups.are_meant(names):
            return map_sample_groups(file, path, identity, groups, names, group)
    chosen, left_out = choose_fields(file, path, names, group)
    specs, slab = map_file(file, path, identity, 0, chosen, group=group)
    return DataMap(
        str(path),
        specs,
        (slab,),
        slab.count,
        None,
        left_out,
        group=group,
        packing=packing_of(file, chosen, group),
    )


def check_unique(names: Sequence[str]) -> None:
    """Raise ValueError if a field is named twice."""
    plain = [name.strip("/") for name in names]
    twice = [name for place, name in enumerate(plain) if name in plain[:place]]
    if twice:
        raise ValueError(f"field {twice[0]!r} is named twice; name each field once")


def open_undamaged(path: str | os.PathLike[str]) -> tuple[DataMap, list[str]]:
    """Call open_map(), but leave out damaged slabs; also return a line for each of these.

    Raises as open_map() for other damage, such as that of the index, and for all errors of URLs,
    whose servers may fail without damage.
    """
    try:
        return open_map(path), []
    except DataError:
        location = Path(path).absolute()
        home = location.parent if location.name == INDEX_NAME else location
        if is_url(path) or not is_slab_folder(home):
            raise
        found, damage = map_undamaged(LocalFolder(home))
        if not damage:
            raise
    return found, damage
