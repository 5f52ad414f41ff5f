"""Random files with a group for each sample, and what open_map() says of a file in two ways."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
from hsgd.io import open_map
from hsgd.io.layouts import sample_group_map

from hsgd.errors import DataError

__all__ = ["both_outcomes", "outcome", "random_group_file"]

VERSIONS = ("earliest", "latest", "v110", "v108", ("earliest", "v110"))
NAMES = ("{}", "{:06d}", "demo_{}", "é{}", "x" * 40 + "{}")
FIELDS = ("image", "label", "obs/state", "obs/deep/image", "obs/deep/mask", "ü", "length")
STORED: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"chunks": True},
    {"chunks": True, "compression": "gzip"},
    {"chunks": True, "compression": "lzf", "shuffle": True, "fletcher32": True},
    {"chunks": (1, 2)},
    {"dtype": ">i2"},
)
ODD = ("missing", "soft", "external", "unwritten", "longer", "other", "type", "attribute")
ODD += ("packed", "twice", "filters", "empty", "group")


def random_group_file(path: Path, seed: int, most: int = 55) -> Path:
    """Write a file, most of whose samples are alike, with few fields, or up to `most` more."""
    draw = random.Random(seed)
    version = draw.choice(VERSIONS)
    home = draw.choice(("", "", "data/", "a/b/"))
    name = draw.choice(NAMES)
    fields = draw.sample(FIELDS, draw.choice((1, 2, 2, 3, 5)))
    fields += [
        f"field{number:02d}" for number in range(min(most, draw.choice((0, 0, 0, 0, 5, 12, 55))))
    ]
    options = [draw.choice(STORED) for _ in fields]
    order, attributes = draw.random() < 0.2, draw.choice((0, 0, 0, 1, 3, 12))
    packed, odd = draw.random() < 0.1, draw.choice((0.0, 0.0, 0.03, 0.1))
    with h5py.File(path, "w", libver=version, track_order=order) as file:
        for number in range(draw.randrange(16, 40)):
            if draw.random() < 0.1:
                continue
            group = file.create_group(home + name.format(number), track_order=order)
            if draw.random() < 0.1:
                group.attrs["note"] = "seen"
            for field, stored in zip(fields, options, strict=True):
                what = draw.choice(ODD) if draw.random() < odd / len(fields) else ""
                item = _write(group, field, number, stored, what)
                for attribute in range(attributes if item is not None else 0):
                    item.attrs[f"attribute{attribute}"] = "m/s"
                if packed and item is not None:
                    item.attrs["scale_factor"] = 0.5
    return path


def _write(group: h5py.Group, field: str, number: int, stored: dict[str, Any], odd: str) -> Any:
    """Write one array, and return it; `odd` says in what it differs from others."""
    stored = dict(stored)
    data = np.full((4, 6), number, stored.pop("dtype", "u1"))
    if stored.get("chunks") is True:
        stored["chunks"] = data.shape
    stored["track_times"] = number % 2 == 0
    if odd == "missing":
        return None
    if odd in ("soft", "external"):
        link = h5py.SoftLink("/") if odd == "soft" else h5py.ExternalLink("other.h5", "/")
        group[field] = link
        return None
    if odd == "group":
        return group.create_group(field)
    if odd == "unwritten":
        return group.create_dataset(field, data.shape, data.dtype, **stored)
    if odd == "empty":
        return group.create_dataset(field, data=h5py.Empty("u1"))
    data = {"longer": np.zeros((5, 6), data.dtype), "other": data[0], "type": data * 0.5}.get(
        odd, data
    )
    if "chunks" in stored and odd in ("longer", "other"):
        stored = {}
    if odd == "filters":
        stored |= {"chunks": data.shape, "compression": "gzip", "compression_opts": 9}
    item = group.create_dataset(field, data=data, **stored)
    if odd == "twice":
        group["again"] = item
    if odd in ("attribute", "packed"):
        item.attrs["units" if odd == "attribute" else "add_offset"] = 7.0
    return item


def outcome(path: Path, *, by_headers: bool) -> str:
    """Return all of the map of a file, or its error; with h5py alone, or by headers too."""
    arrays = sample_group_map._arrays if by_headers else lambda *_: None
    with warnings.catch_warnings(), mock.patch.object(sample_group_map, "_arrays", arrays):
        warnings.simplefilter("ignore")
        try:
            return repr(open_map(path, layout="groups"))
        except (DataError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


def both_outcomes(path: Path) -> tuple[str, str]:
    """Return what h5py says of a file, and what the headers say."""
    return outcome(path, by_headers=False), outcome(path, by_headers=True)
