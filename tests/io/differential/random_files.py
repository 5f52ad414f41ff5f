"""Random HDF5 files of all kinds, each from a seed: `random_file(seed, folder)`.

    python tests/io/differential/random_files.py SEED FOLDER

makes one and prints what it holds.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from random_datasets import Draw, Field, add_dataset, add_external
from random_virtual import LIBVERS, add_virtual

__all__ = ["RandomFile", "random_file"]

_NAMES = ["image", "label", "x", "data/a", "data/b", "deep/er/y", "gr\xf6\xdfe", "\u540d\u524d"]
_NAMES += [
    "a b",
    "x.y",
    "x%b",
    "it's",
    'say "x"',
    "tab\there",
    "line\nbreak",
    "-v",
    "{0}",
    "x" * 300,
]
_NAMES += ["\U0001f600", "a,b", "e\u0301", "[0]", "..", "\\n", "values", "offsets"]
_STRATEGIES = [None, None, "page", "fsm", "aggregate", "none"]


@dataclass
class RandomFile:
    """A file that was made, and the other files it needs beside it."""

    path: Path
    features: list[str] = field(default_factory=list)
    fields: list[Field] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        return [reason for made in self.fields for reason in made.reasons]

    def __str__(self) -> str:
        return "\n  ".join([", ".join(self.features), *(made.text for made in self.fields)])


def random_file(seed: int, folder: Path) -> RandomFile:
    """Write the file of a seed into an empty folder."""
    draw = Draw(seed)
    made = RandomFile(folder / draw.choice(["a.h5", "a.hdf5", "a", "a b.h5", "gr\xf6\xdfe.nc"]))
    options = _file_options(draw, made)
    rows = draw.choice([0, 1, 2, 3, 5, 8, 13, 21, 40, 70])
    with h5py.File(made.path, "w", **options) as file:
        file["seen"] = np.arange(rows, dtype=np.int64)  # also what references point to
        made.fields.append(Field("seen", ["int64"]))
        if draw.chance(0.1):
            del file["seen"]
            file.create_group("seen").create_dataset("one", data=np.zeros(3))
            made.features.append("seen is a group")
            made.fields.clear()
        for name in draw.sample(_NAMES, draw.randint(1, 4)):
            _add_one(draw, file, made, name, rows)
        _add_links(draw, file, made, rows)
        _add_extras(draw, file, made)
    if draw.chance(0.2):
        with h5py.File(made.path, "r+") as file:
            _add_one(draw, file, made, "later", rows)
        made.features.append("opened again")
    if options.get("userblock_size") and draw.chance(0.7):
        with open(made.path, "r+b") as stream:
            stream.write(draw.numbers.bytes(options["userblock_size"]))
    if draw.chance(0.1):
        shown = folder / "shown" / "b.h5"
        shown.parent.mkdir()
        shown.symlink_to(made.path)
        made.path = shown
        made.features.append("read through a symbolic link")
    return made


def _file_options(draw: Draw, made: RandomFile) -> dict[str, Any]:
    options: dict[str, Any] = {"libver": draw.choice(LIBVERS)}
    if draw.chance(0.15):
        options["userblock_size"] = draw.choice([512, 1024, 4096])
    strategy = draw.choice(_STRATEGIES)
    if strategy and not (strategy == "page" and "userblock_size" in options):
        options["fs_strategy"] = strategy
        if strategy in ("page", "fsm"):
            options |= {"fs_persist": draw.chance(0.5), "fs_threshold": draw.choice([1, 64])}
        if strategy == "page":
            options["fs_page_size"] = draw.choice([512, 4096, 65536])
    if "userblock_size" not in options and draw.chance(0.2):
        options |= {"alignment_threshold": 1, "alignment_interval": draw.choice([8, 512, 4096])}
    if draw.chance(0.2):
        options["meta_block_size"] = draw.choice([1, 512, 1 << 16])
    if draw.chance(0.2):
        options["track_order"] = True
    made.features += [f"{name} {value}" for name, value in options.items()]
    return options


def _add_one(draw: Draw, file: Any, made: RandomFile, name: str, rows: int) -> None:
    """Add one field, of any kind."""
    if draw.chance(0.07):
        rows += draw.randint(1, 3)
    kind = draw.choice(
        ["plain"] * 8 + ["virtual"] * 2 + ["external"] + ["single"] * draw.randint(0, 1)
    )
    if kind == "plain":
        made.fields.append(add_dataset(draw, file, name, rows))
    elif kind == "virtual":
        made.fields.append(add_virtual(draw, file, name, rows))
    elif kind == "external":
        made.fields.append(add_external(draw, file, name, rows))
    else:
        what = draw.choice([5, "text", h5py.Empty("f4"), np.float64(2), np.dtype("<i4")])
        file[name] = what
        made.features.append(f"{name!r}: single {what!r}")
        return
    if draw.chance(0.3):
        _add_attributes(draw, file[name], made)


def _add_attributes(draw: Draw, item: Any, made: RandomFile) -> None:
    texts = h5py.string_dtype()
    known: dict[str, Any] = {
        "units": "m",
        "scale_factor": np.float32(0.5),
        "_FillValue": draw.choice([np.int16(-1), np.nan, np.array([1, 2]), "no"]),
        "missing_value": np.array([1.5], ">f8"),
        "class_names": np.array(["a", "b"], texts),
        "reference": item.ref,
        "pair": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        "nothing": h5py.Empty("f4"),
        "gr\xf6\xdfe": "gr\xf6\xdfe",
        "bytes": np.bytes_(b"\xff\xfe"),
        "valid_range": np.array([[1, 2], [3, 4]], "u1"),
        "description": "x" * 70_000,
        "num_samples": 5,
        "format_version": "1.0",
        "crc32c": np.arange(3, dtype="u4"),
    }
    odd = draw.choice([h5py.h5t.UNIX_D32LE, h5py.h5t.IEEE_F128LE, h5py.h5t.STD_B16BE])
    if draw.chance(0.1):
        name = draw.choice([b"missing_value", b"odd"])
        h5py.h5a.create(item.id, name, odd, h5py.h5s.create(h5py.h5s.SCALAR))
        made.features.append(f"odd attribute {name!r} of {item.name!r}")
        return
    for name in draw.sample(list(known), draw.randint(1, 3)):
        try:
            item.attrs[name] = known[name]
        except (OSError, RuntimeError):  # too large for an old header
            continue
        made.features.append(f"attribute {name} of {item.name!r}")


def _add_links(draw: Draw, file: Any, made: RandomFile, rows: int) -> None:
    for number in range(draw.choice([0, 0, 0, 1, 2, 3])):
        known = {each.name: each for each in made.fields}
        way = draw.choice(["soft", "hard", "external", "dangling", "group", "circle", "absent"])
        name = f"link{number}"
        if way == "hard":
            known = {name: each for name, each in known.items() if not each.lies_in}
        target = draw.choice([*known] or ["seen"])
        same = known.get(target, Field(name))
        if way == "soft":
            file[name] = h5py.SoftLink(draw.choice([f"/{target}", target]))
            made.fields.append(replace(same, name=name))
        elif way == "hard":
            file[name] = file[target]
            made.fields.append(replace(same, name=name))
        elif way == "dangling":
            file[name] = h5py.SoftLink("/nowhere")
        elif way == "absent":
            file[name] = h5py.ExternalLink("absent.h5", "/x")
        elif way == "circle":
            file[name] = h5py.SoftLink(draw.choice(["/", f"/{name}"]))
        elif way == "group":
            group = file.create_group(f"{name}/real")
            group["z"] = np.arange(rows)
            file[f"{name}/soft"] = h5py.SoftLink("real")
        else:
            home = made.path.parent
            other = draw.choice([home, home / "below"]) / f"other{number}.h5"
            other.parent.mkdir(exist_ok=True)
            with h5py.File(other, "w") as elsewhere:
                elsewhere["seen"] = np.arange(3)
                kinds = [add_dataset, add_dataset, add_external, add_virtual]
                inner = draw.choice(kinds)(draw, elsewhere, "x", rows)
                if draw.chance(0.3):
                    elsewhere["y"] = h5py.SoftLink("x")
                    elsewhere["z"] = h5py.ExternalLink(other.name, "y")
            shown = draw.choice([str(other), str(other.relative_to(home))])
            with h5py.File(other, "r") as elsewhere:
                file[name] = h5py.ExternalLink(shown, draw.choice(["/x", "x", *elsewhere]))
            inner = replace(inner, name=name, lies_in=f"{other}: /")
            made.fields.append(inner)
        made.features.append(f"{name}: {way} link to {target!r}")


def _add_extras(draw: Draw, file: Any, made: RandomFile) -> None:
    if draw.chance(0.04):
        name = b"gr\xf6\xdfe"  # Latin-1
        file.create_dataset(name, data=np.arange(3))
        made.features.append("a name that is not UTF-8")
    if draw.chance(0.08):
        scale = file.create_dataset("scale", data=np.arange(5.0))
        scale.make_scale("five")
        made.features.append("dimension scale")
        for each in made.fields:
            if len(file[each.name].shape or ()) > 1 and file[each.name].shape[1] == 5:
                with contextlib.suppress(RuntimeError):  # virtual ones have none
                    file[each.name].dims[1].attach_scale(scale)
    if draw.chance(0.1):
        _add_attributes(draw, file, made)
    if draw.chance(0.1):
        file["a type"] = np.dtype([("a", "i4"), ("b", "f8")])
        made.features.append("named type")


def main(seed: str, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    made = random_file(int(seed), Path(folder))
    print(made.path, made, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
