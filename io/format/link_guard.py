"""LinkGuard: checks soft and external links of HDF5 files before HDF5 follows them.

HDF5 opens whatever a link names, and would wait for a pipe forever.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .opening import open_hdf5
from .slab_folder import import_h5py

__all__ = ["LinkGuard", "hard_linked", "named_file", "no_file"]

_SYSTEM = re.compile("/+(proc|sys|dev(?!/shm/))/")
_DEEPEST = 16  # links to links, HDF5's own limit


def hard_linked(group: Any, path: str) -> Any:
    """Return the item at `path` if hard links alone lead to it, else None."""
    h5py = import_h5py()

    for step in path.split("/"):
        if not isinstance(group, h5py.Group):
            return None
        try:
            link = group.get(step, getlink=True)
        except TypeError:  # a user-defined link
            return None
        if not isinstance(link, h5py.HardLink):
            return None
        group = group[step]
    return group


class LinkGuard:
    """Checker of links; a path may have `most_steps` steps, those inside links included."""

    def __init__(self, most_steps: int = 1_000) -> None:
        self._most_steps, self._steps = most_steps, 0
        self._h5py = import_h5py()

    def obstacle(self, group: Any, path: str) -> str:
        """Return why HDF5 must not follow `path` from a group; "" if it may.

        Raises KeyError if nothing is there, DataError if a file on the way cannot be used.
        """
        self._steps = 0
        return self._obstacle(group, path, 0)

    def _obstacle(self, group: Any, path: str, depth: int) -> str:
        if depth > _DEEPEST:
            return "links to links without end"
        if path.startswith("/"):
            group = group.file["/"]
        for step in path.split("/"):
            if step in ("", "."):
                continue
            self._steps += 1
            if self._steps > self._most_steps:
                return f"a link whose way has more than {self._most_steps} steps"
            if not isinstance(group, self._h5py.Group):
                raise KeyError(step)  # a dataset holds nothing
            link = group.get(step, getlink=True)
            if isinstance(link, self._h5py.SoftLink):
                reason = self._obstacle(group, link.path, depth + 1)
            elif isinstance(link, self._h5py.ExternalLink) and group.file.driver == "fileobj":
                reason = f"a link to the file {link.filename}, which is not followed from a URL"
            elif isinstance(link, self._h5py.ExternalLink):
                reason = self._external_obstacle(group, link, depth)
            else:
                reason = ""
            if reason:
                return reason
            group = group[step]
        return ""

    def _external_obstacle(self, group: Any, link: Any, depth: int) -> str:
        home = Path(group.file.filename)
        place, reason = named_file(home, link.filename, "HDF5_EXT_PREFIX")
        if reason:
            return f"a link to {reason}"
        with open_hdf5(str(place)) as other:
            return self._obstacle(other, link.path, depth + 1)


def named_file(home: Path, name: str, variable: str) -> tuple[Path, str]:
    """Return the file that HDF5 opens for a name in the file `home`, and what is wrong with it.

    The text is "" for a regular file outside of /dev, /proc and /sys. `variable` is an
    environment variable with more folders to search.
    """
    found = [place for place in _places(home, name, variable) if os.path.exists(place)]
    if not found:
        return Path(name), f"the file {name}, which is missing"
    for place in found:
        if reason := no_file(place):
            return place, f"{place}, {reason}"
    return found[0], ""


def no_file(place: Path) -> str:
    """Return why something that exists cannot be part of a dataset; "" for a regular file.

    Regular files below /dev, /proc and /sys are views of this machine and its processes, and may
    block; /dev/shm is memory with files of anybody.
    """
    if not os.path.isfile(place):
        return "which is no file"
    for each in {os.path.abspath(place), os.path.realpath(place)}:
        if _SYSTEM.match(each):
            return "which is part of the system and no data"
    return ""


def _places(home: Path, name: str, variable: str) -> Iterator[Path]:
    """Yield where HDF5 looks for the file of a link or of a virtual dataset, in its order."""
    folder, bare = home.absolute().parent, name
    if os.path.isabs(name):
        yield Path(name)
        bare = os.path.basename(name)
    for prefix in os.environ.get(variable, "").split(":"):
        if prefix:
            yield Path(prefix.replace("${ORIGIN}", str(folder))) / bare
    yield folder / bare
    yield Path(bare)
    yield home.resolve().parent / bare
