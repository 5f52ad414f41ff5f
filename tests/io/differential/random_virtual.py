"""Random virtual datasets, over sources of which some are missing, too short or never written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from random_datasets import Draw, Field, create_by_type, values_of

__all__ = ["LIBVERS", "add_virtual"]

LIBVERS = ["earliest", "latest", "v108", "v110", "v112", "v114", ("earliest", "v110")]


def _source(draw: Draw, folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Write the source of a virtual dataset; return its path."""
    path = folder / f"{name}.h5"
    with h5py.File(path, "a", libver=draw.choice(LIBVERS[:5])) as file:
        options = {}
        if draw.chance(0.4) and all(shape):
            options = {"chunks": tuple(draw.randint(1, n) for n in shape)}
            options |= {"compression": draw.choice([None, "gzip", "lzf"])}
            options["maxshape"] = draw.choice([None, (None, *shape[1:])])
        file.create_dataset("s", data=values_of(draw, np.dtype(dtype), shape), **options)
    return path


def add_virtual(draw: Draw, file: Any, name: str, rows: int) -> Field:
    """Write a virtual dataset of two columns at least, over files beside it or this file."""
    width, dtype = draw.randint(2, 4), draw.choice(["<i4", "<f8", ">i2", "u1"])
    way = draw.choice(
        ["rows", "rows", "stride", "columns", "nested", "picked", "printf", "endless", "own"]
    )
    made = Field(name, [f"virtual {way}", f"{dtype}", f"{(rows, width)}"])
    folder = Path(file.filename).parent
    stem = f"{Path(file.filename).stem}-{len(name)}-{name.encode().hex()[:40]}"
    layout = h5py.VirtualLayout((rows, width), dtype)
    of = draw.choice([dtype, dtype, "<i8", "<f4"])
    if way == "own":
        own = file.create_dataset(stem, data=values_of(draw, np.dtype(of), (rows, width)))
        layout[...] = h5py.VirtualSource(own)
    elif way == "printf":
        for number in range(2):
            _source(draw, folder, f"{stem}{number}", (max(1, rows // 2), width), of)
        _add_printf(file, name, f"{stem}%b.h5", max(1, rows // 2), width, dtype)
        made.reasons.append("names its sources by a pattern")
        return made
    elif way == "endless" and rows:
        _add_endless(draw, file, folder, made, stem, (rows, width), dtype, of)
        return made
    else:
        _map_sources(draw, layout, folder, made, stem, way, (rows, width), of)
    file.create_virtual_dataset(name, layout, fillvalue=draw.choice([None, 3]))
    made.reasons.append("have no source|takes rows from|never written|was ever written")
    return made


def _map_sources(
    draw: Draw, layout: Any, folder: Path, made: Field, stem: str, way: str, shape: Any, of: Any
) -> None:
    rows, width = shape
    count = draw.randint(1, min(3, max(1, rows)))
    for number in range(count):
        low, high = number * rows // count, (number + 1) * rows // count
        part: Any = np.s_[low:high]
        size = (high - low, width)
        if way == "stride":
            part, size = np.s_[number::count], (len(range(number, rows, count)), width)
        elif way == "picked":
            kept = [at for at in range(rows) if at * 7 % 5 % count == number]
            part, size = np.s_[kept], (len(kept), width)
        elif way == "columns":
            left, right = number * width // count, (number + 1) * width // count
            part, size = np.s_[:, left:right], (rows, right - left)
        fate = draw.choice(
            ["whole"] * 14 + ["unmapped", "missing", "short", "no dataset", "unwritten"]
        )
        if fate != "whole":
            made.features.append(f"source {number} {fate}")
            made.has_gaps |= all(size)
            made.ends_hdf5 |= fate == "short" and all(size)
        if fate == "unmapped" or not all(size):
            continue
        path, more = folder / f"{stem}-{number}.h5", 0
        if fate == "short":
            _source(draw, folder, path.stem, (size[0] - 1, size[1]), of)
        elif way == "nested":
            inner = folder / f"{path.stem}-inner.h5"
            if fate == "unwritten":
                with h5py.File(inner, "w") as file:
                    file.create_dataset("s", size, of)
            elif fate != "missing":
                _source(draw, folder, inner.stem, size, of)
            between = h5py.VirtualLayout(size, of)
            between[...] = h5py.VirtualSource(inner, "s", size)
            with h5py.File(path, "w") as file:
                file.create_virtual_dataset("s", between)
        elif fate == "unwritten":
            with h5py.File(path, "w") as file:
                file.create_dataset("s", size, of)
        elif fate != "missing":
            more = draw.choice([0, 0, 1])  # rows before and after those that are used
            _source(draw, folder, path.stem, (size[0] + 2 * more, size[1]), of)
        inside = draw.choice(["s", "/s", "soft"]) if fate != "no dataset" else "t"
        if inside == "soft" and path.exists():
            with h5py.File(path, "r+") as file:
                file["soft"] = h5py.SoftLink("/s")
        shown = draw.choice([str(path), path.name])
        whole = h5py.VirtualSource(shown, inside, (size[0] + 2 * more, size[1]), of)
        layout[part] = whole[more : more + size[0]]


def _add_printf(file: Any, name: str, pattern: str, step: int, width: int, dtype: Any) -> None:
    endless = h5py.h5s.UNLIMITED
    space = h5py.h5s.create_simple((0, width), (endless, width))
    space.select_hyperslab((0, 0), (endless, 1), (step, width), (step, width))
    source = h5py.h5s.create_simple((step, width))
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_virtual(space, pattern.encode(), b"s", source)
    create_by_type(file, name, h5py.h5t.py_create(np.dtype(dtype)), space, create)


def _add_endless(
    draw: Draw, file: Any, folder: Path, made: Field, stem: str, shape: Any, dtype: Any, of: Any
) -> None:
    """Map an unlimited source to an unlimited virtual dataset."""
    rows, width = shape
    path = folder / f"{stem}.h5"
    with h5py.File(path, "w") as other:
        chunks = (draw.randint(1, rows), width)
        values = values_of(draw, np.dtype(of), shape)
        other.create_dataset("s", data=values, maxshape=(None, width), chunks=chunks)
    endless = h5py.h5s.UNLIMITED
    spaces = []
    for _ in range(2):
        space = h5py.h5s.create_simple(shape, (endless, width))
        space.select_hyperslab((0, 0), (1, 1), None, (endless, width))
        spaces.append(space)
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_virtual(spaces[0], str(path).encode(), b"s", spaces[1])
    create_by_type(file, made.name, h5py.h5t.py_create(np.dtype(dtype)), spaces[0], create)
