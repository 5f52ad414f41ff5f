"""SingleMap: makes a DataMap of one place: a file, a slab folder, or the URL of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hsgd.errors import DataError

from ..format.data_map import DataMap
from ..format.fields import MATLAB_ORDER, choose_fields, find_fields, is_matlab, stored_name
from ..format.opening import (
    Identity,
    LocalFolder,
    RemoteFolder,
    UnknownFields,
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
from .files_of import Place
from .row_parts import map_numbered, map_sources
from .sample_group_map import map_sample_groups
from .sample_groups import find_sample_groups, one_sample
from .slab_folder_map import map_folder

if TYPE_CHECKING:
    import h5py

__all__ = ["Layout", "SingleMap"]

Layout = Literal["auto", "rows", "groups", "files"]


@dataclass(frozen=True)
class SingleMap:
    """What is wanted of a place; see open_map()."""

    names: Sequence[str] | None
    group: str
    access: RemoteAccess
    layout: Layout
    ragged: frozenset[str] = frozenset()  # fields, if a file is a sample

    def open(self, place: Place) -> DataMap:
        """Examine a place. Raises DataError and ValueError, as open_map() does."""
        if is_url(place):
            return self._url(url_of(place))
        location = Path(place).absolute()
        if location.is_dir():
            if not is_slab_folder(location):
                inside = ", ".join(sorted(p.name for p in location.iterdir() if is_slab_folder(p)))
                remedy = f"it holds {inside}" if inside else "make one: hsgd data convert SRC DST"
                raise DataError(f"{location}: no slab folder, {INDEX_NAME} is missing; {remedy}")
            return map_folder(LocalFolder(location), self.names, self.group)
        with examined(location) as file:
            data = self._file(file, location, identity_of(location.stat()))
        return data or map_folder(LocalFolder(location.parent), self.names, self.group)

    def _url(self, url: str) -> DataMap:
        reader = ObjectReader(replace(self.access, disk=None))  # metadata is small, and not cached
        data, folder = None, url
        if names_a_file(url):
            content, folder = MetadataFile(url, reader), parent_url(url)
            with examined_object(content) as file:
                data = self._file(file, url, content.identity)
        if data is None:
            home = RemoteFolder(folder, reader)
            if not home.has(INDEX_NAME):
                raise ObjectMissing(
                    f"{url}: no slab folder, {INDEX_NAME} is missing; check the URL, which of one "
                    "file ends in .h5"
                )
            data = map_folder(home, self.names, self.group)
        return replace(data, access=self.access)

    def _file(self, file: h5py.File, path: Path | str, identity: Identity) -> DataMap | None:
        """Examine an open file as a dataset; return None for the index of a slab folder."""
        header = read_header(file)
        if header is not None and header.slab_index < 0:
            return None
        if header is not None and not header.sealed:
            raise DataError(f"{path}: not sealed (writing was cut off); convert again")
        names, group = self.names, self.group
        if header is None and self.layout != "rows":
            is_sample = self.layout == "files"
            groups = one_sample(file, group) if is_sample else find_sample_groups(file, group)
            if groups is not None and groups.are_meant(names):
                return map_sample_groups(file, path, identity, groups, names, group, self.ragged)
            if is_sample:
                raise UnknownFields(f"{path}: no arrays, or not {', '.join(names or ())}")
            if self.layout == "groups":
                raise UnknownFields(f"{path}: no groups with equal fields that are samples")
        found = find_fields(file)
        if header is None and self.layout == "auto":
            numbered = map_numbered(file, path, names, group, found)
            if numbered is not None:
                return numbered
        chosen, left_out = choose_fields(file, path, names, group, found)
        specs, slab = map_file(file, path, identity, 0, chosen, group=group)
        packing = packing_of(file, chosen, group)
        slabs = (slab,)
        note = MATLAB_ORDER if is_matlab(file, stored_name(group, chosen[0])) else ""
        data = DataMap(
            *(str(path), specs, slabs, slab.count, None, left_out),
            group=group,
            packing=packing,
            note=note,
        )
        return map_sources(file, data)
