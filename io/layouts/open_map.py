"""open_map: makes a DataMap of files or URLs, without reading samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hsgd.errors import DataError

from ..format.data_map import DataMap
from ..format.fields import inner_name
from ..format.opening import LocalFolder
from ..format.slab_folder import INDEX_NAME, is_slab_folder
from ..remote.object_reader import RemoteAccess
from ..remote.urls import is_url
from .files_of import Place, files_of
from .joined_map import joined_map
from .single_map import Layout, SingleMap
from .slab_folder_map import map_undamaged

__all__ = ["check_unique", "open_map", "open_undamaged"]


def open_map(
    path: Place | Sequence[Place],
    fields: Sequence[str] | None = None,
    group: str | None = None,
    access: RemoteAccess | None = None,
    layout: Layout = "auto",
) -> DataMap:
    """Examine a slab folder, its index file, ordinary HDF5 files, or the URLs of these.

    Soft and external links are followed. Single values and links that lead nowhere are named in
    left_out.

    Args:
        path: a path or URL (https, http or s3); or several files as a list, a pattern such as
            "parts/*.h5", or a folder.
        fields: names of the datasets to use; by default all, which must have the same first
            dimension.
        group: of the files: it replaces the whole file, and names are those inside it.
        access: how long requests to a server are repeated.
        layout: what a sample is: "rows" of the datasets, "groups" of one file, or "files". "auto"
            takes groups if many have equal names in them, and files if there are several, whose
            datasets have different first dimensions.

    Raises:
        DataError: something is missing, truncated, foreign, unsealed, or of a type that cannot
            become a tensor; names the file.
        ValueError: unknown names of fields or of the group, or an unknown layout.
    """
    if isinstance(fields, str):
        raise TypeError(f"fields={fields!r} is one string; use a list of names")
    if not all(isinstance(name, str) for name in fields or ()):
        raise TypeError(f"fields={fields!r}; use a list of names")
    check_unique(fields or ())
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r}; use {', '.join(map(repr, get_args(Layout)))}")
    single = SingleMap(fields, inner_name(group), access or RemoteAccess(), layout)
    files = files_of(path)
    if isinstance(path, str | os.PathLike):
        return single.open(path) if files is None else joined_map(single, files, os.fspath(path))
    assert files is not None
    return joined_map(single, files, f"{os.fspath(files[0])} and {len(files) - 1} more")


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
