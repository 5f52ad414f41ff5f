"""Files with a group for each sample: 000000/image, 000000/label, 000001/image, and so on.

They are recognised by the names in some of their groups. Read as fields, each dataset would be a
field, and its first axis that of samples. Only hard links count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..format.fields import names_in, stored_name
from ..format.link_guard import hard_linked
from ..format.slab_folder import LONGEST, import_h5py
from .natural_order import natural_order

if TYPE_CHECKING:
    import h5py

__all__ = ["LEAST_GROUPS", "SampleGroups", "find_sample_groups", "one_sample"]

LEAST_GROUPS = 16  # fewer groups are parts of one table, such as train and test, or cameras
_LOOKED_AT = 16  # groups that are examined
_ALIKE = 0.75  # part of these that must have equal fields
_DEEPEST = 3  # groups above the samples
_MOST_STEPS = 1_000  # names in one sample


@dataclass(frozen=True)
class SampleGroups:
    """Groups of a file that are samples."""

    home: str  # the group that holds the samples; "" is the file
    names: tuple[str, ...]  # of the items in it, in the order of their numbers
    fields: tuple[str, ...]  # of most samples
    others: tuple[str, ...] = ()  # fields of some samples

    def are_meant(self, wanted: Sequence[str] | None) -> bool:
        """Return whether the wanted fields (None for all) are fields of samples."""
        if wanted is None:
            return True
        return len(wanted) > 0 and all(name.strip("/") in self.fields for name in wanted)


def find_sample_groups(file: h5py.File, group: str = "") -> SampleGroups | None:
    """Find groups of samples in a file, or in one of its groups; None if there are none."""
    home = hard_linked(file["/"], group) if group else file["/"]
    return _search(home, group, 0) if isinstance(home, import_h5py().Group) else None


def one_sample(file: h5py.File, group: str = "") -> SampleGroups:
    """Return a file, or one of its groups, as a single sample: its arrays are fields."""
    home = hard_linked(file["/"], group) if group else file["/"]
    return SampleGroups(group, ("",), _arrays_in(home))


def _search(home: Any, place: str, depth: int) -> SampleGroups | None:
    names = sorted(names_in(home)[0], key=natural_order)
    if len(names) >= LEAST_GROUPS:
        step = len(names) / _LOOKED_AT
        some = [names[int(step * number)] for number in range(_LOOKED_AT)]
        found = Counter(_arrays_in(hard_linked(home, name)) for name in some)
        fields, count = found.most_common(1)[0]
        if fields and count >= _ALIKE * len(some):
            others = {field for each in found for field in each} - {*fields}
            return SampleGroups(place, tuple(names), fields, tuple(sorted(others)))
        return None
    for name in names if depth < _DEEPEST else ():
        inner = hard_linked(home, name)
        if isinstance(inner, import_h5py().Group):
            below = _search(inner, stored_name(place, name), depth + 1)
            if below is not None:
                return below
    return None


def _arrays_in(item: Any) -> tuple[str, ...]:
    """Return the datasets in one sample, sorted; empty if it is no group, or a ragged field."""
    h5py = import_h5py()
    if not isinstance(item, h5py.Group) or LONGEST in item.attrs:
        return ()
    found, steps = [], 0
    waiting = [("", item)]
    while waiting:
        prefix, group = waiting.pop()
        for step in group:
            steps += 1
            if steps > _MOST_STEPS or not isinstance(step, str):
                return ()
            inner = hard_linked(group, step)
            if isinstance(inner, h5py.Dataset):
                found.append(f"{prefix}{step}")
            elif isinstance(inner, h5py.Group):
                waiting.append((f"{prefix}{step}/", inner))
    return tuple(sorted(found))
