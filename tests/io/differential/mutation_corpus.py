"""The files that the mutation campaign changes: random ones, samples in groups, slab folders, and
those that others publish.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hsgd.io.convert import slab_folder_writer

from hdf5_samples import arrays_of, make_ragged_slabs, make_slabs
from mutations import Layout, layout_of
from random_files import random_file

__all__ = ["Subject", "subjects", "values_in"]

_MOST_BYTES = 256 << 10  # of a file that is changed
_PUBLISHED = 25  # files of others in one corpus


@dataclass
class Subject:
    """A file or folder that is read, and the files of which one is changed."""

    path: Path
    files: dict[Path, tuple[bytes, Layout]]
    good: dict[str, list[bytes]] = field(default_factory=dict)  # samples before any change

    @property
    def is_slabs(self) -> bool:
        return self.path.is_dir()


def subjects(
    folder: Path, seed: int, count: int, wheels: Path | None
) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """Yield names and makers, which HDF5 may not survive; `count` are random files."""
    for number in range(count):
        home = folder / f"random{number}"
        yield home.name, lambda home=home, number=number: _random(home, seed * count + number)
    for make in (_groups, _groups_in_chunks, _tables):
        for version in ("earliest", "latest"):
            home = folder / f"{make.__name__[1:]}-{version}"
            yield (
                home.name,
                lambda home=home, make=make, version=version: _file(home, make, version),
            )
    for name, options in {
        "plain": {},
        "gzip": {"compress": "gzip"},
        "zstd": {"compress": "zstd"},
    }.items():
        for make_folder in (make_slabs, make_ragged_slabs):
            home = folder / f"{make_folder.__name__[5:]}-{name}"
            yield home.name, lambda h=home, m=make_folder, o=options: _slabs(h, m, o)
    names = [] if wheels is None else _published(wheels)
    for number, (wheel, name) in enumerate(
        random.Random(seed).sample(names, min(len(names), _PUBLISHED))
    ):
        home = folder / f"published{number}"
        yield f"{home.name} {name}", lambda h=home, w=wheel, n=name: _unpacked(h, w, n)


def _random(home: Path, seed: int) -> Subject:
    home.mkdir()
    made = random_file(seed, home)
    found = [path for path in home.rglob("*") if path.is_file() and not path.is_symlink()]
    return _subject(made.path, found)


def _file(home: Path, make: Callable[[Any], None], version: str) -> Subject:
    home.mkdir()
    with h5py.File(home / "a.h5", "w", libver=version) as file:
        make(file)
    return _subject(home / "a.h5", [home / "a.h5"])


def _groups(file: h5py.File) -> None:
    for number in range(20):
        file[f"{number}/image"] = np.full((4, 3), number, "u1")
        file[f"{number}/label"] = number


def _groups_in_chunks(file: h5py.File) -> None:
    for number in range(20):
        data = np.full((4, 3), number, "f4")
        file.create_dataset(f"all/{number:05d}/x", data=data, chunks=(4, 3), compression="gzip")


def _tables(file: h5py.File) -> None:
    kinds = [("a", "<i4"), ("b", ">f8", (2,)), ("text", "S3"), ("c", "?")]
    for name, options in {"t": {}, "chunked": {"chunks": (7,), "compression": "gzip"}}.items():
        table = file.create_dataset(f"here/{name}", (30,), kinds, **options)
        table["a"] = np.arange(30)
    for name, array in arrays_of(30).items():
        file.create_dataset(
            name, data=array, chunks=(7, *array.shape[1:]), maxshape=(None, *array.shape[1:])
        )


def _slabs(home: Path, make: Callable[..., Path], options: dict[str, Any]) -> Subject:
    home.mkdir()
    before = slab_folder_writer.CHECKSUM_BYTES
    slab_folder_writer.CHECKSUM_BYTES = 4 * (8 + 24 + 5 + 1)  # several blocks in each slab
    try:
        made = make(home / "data", 30, 2, **options)
    finally:
        slab_folder_writer.CHECKSUM_BYTES = before
    return _subject(made, sorted(made.iterdir()))


def _published(wheels: Path) -> list[tuple[Path, str]]:
    found = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if 0 < info.file_size <= _MOST_BYTES:
                    with archive.open(info) as stream:
                        if stream.read(8) == b"\x89HDF\r\n\x1a\n":
                            found.append((wheel, info.filename))
    return found


def _unpacked(home: Path, wheel: Path, name: str) -> Subject:
    home.mkdir()
    path = home / Path(name).name
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(archive.read(name))
    return _subject(path, [path])


def _subject(path: Path, files: Sequence[Path]) -> Subject:
    contents = {each: each.read_bytes() for each in files}
    return Subject(
        path,
        {
            each: (content, layout_of(content, values_in(each)))
            for each, content in contents.items()
            if len(content) <= _MOST_BYTES
        },
    )


def values_in(path: Path) -> list[tuple[int, int]]:
    """Return the bytes of a file that are samples."""
    found: list[tuple[int, int]] = []

    def visit(_: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset) or item.file.filename != str(path):
            return
        if item.chunks:
            item.id.chunk_iter(lambda at: found.append((at.byte_offset, at.byte_offset + at.size)))
        elif (start := item.id.get_offset()) is not None:
            found.append((start, start + item.id.get_storage_size()))

    if h5py.is_hdf5(path):
        with h5py.File(path, "r") as file:
            file.visititems(visit)
    return found or [(0, 0)]
