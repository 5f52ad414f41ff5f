"""files_of: the files that a list, a pattern or a folder of HDF5 files names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import glob, has_magic
from pathlib import Path

from hsgd.errors import DataError

from ..format.slab_folder import is_slab_folder, slab_number
from ..remote.urls import is_url
from .natural_order import natural_order
from .splits import refuse_splits

__all__ = ["HDF5_SUFFIXES", "Place", "files_of"]

HDF5_SUFFIXES = frozenset({".h5", ".hdf5", ".hdf", ".he5"})

Place = str | os.PathLike[str]


def files_of(path: Place | Sequence[Place]) -> list[Place] | None:
    """Return the files that a list, a pattern or a folder of HDF5 files names; None for one place.

    Those of a pattern or folder come in the order of the numbers in their names. Raises DataError
    if there are none, and for a folder whose files are several splits.
    """
    if not isinstance(path, str | os.PathLike):
        if not isinstance(path, Sequence) or not path:
            raise TypeError(f"path={path!r}; use a path, or a list of paths")
        return list(path)
    if is_url(path):
        return None
    name = os.fspath(path)
    if os.path.isdir(name):
        if is_slab_folder(Path(name)):
            return None
        found = [each for each in os.listdir(name) if Path(each).suffix.lower() in HDF5_SUFFIXES]
        if any(slab_number(each) is not None for each in found):
            return None  # a slab folder that lost its index
        files = [Path(name, each) for each in sorted(found, key=natural_order)]
        refuse_splits(Path(name), files)
        return [*files] or None
    if not has_magic(name) or os.path.lexists(name):
        return None
    matched = sorted(glob(name, recursive=True), key=natural_order)
    if not matched:
        raise DataError(f"{name}: no file matches; check the path")
    return [*matched]
