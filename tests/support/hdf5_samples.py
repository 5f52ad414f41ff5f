"""Data sets for the tests of hsgd.io: arrays that tell samples apart, as files of all kinds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hsgd.io import convert_to_slabs

__all__ = [
    "OTHER_FORMS",
    "arrays_of",
    "collect",
    "make_photo_slabs",
    "make_ragged_slabs",
    "make_slabs",
    "rewrite_attribute",
    "tokens_of",
    "write_hdf5",
]


def arrays_of(count: int) -> dict[str, np.ndarray]:
    """`count` samples: `number` is the index of the sample, the others follow from it."""
    number = np.arange(count, dtype=np.int64)
    return {
        "number": number,
        "image": (number[:, None, None] * 10 + np.arange(6).reshape(2, 3)).astype(np.float32),
        "pixels": ((number[:, None] + np.arange(5)) % 251).astype(np.uint8),
        "even": number % 2 == 0,
    }


def write_hdf5(path: Path, arrays: dict[str, np.ndarray], **options: Any) -> Path:
    """An ordinary HDF5 file; options go to create_dataset."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)
    return path


def make_slabs(folder: Path, count: int, num_slabs: int, **options: Any) -> Path:
    """A slab folder with the samples of arrays_of(count)."""
    source = folder.parent / f"{folder.name}-source.npz"
    np.savez(source, **arrays_of(count))
    convert_to_slabs(source, folder, num_slabs=num_slabs, **options)
    return folder


def tokens_of(number: int) -> np.ndarray:
    """The field `tokens` of a sample: of 0 to 22 elements."""
    return (np.arange(number * 7919 % 23) + number).astype(np.int32)


def make_ragged_slabs(folder: Path, count: int, num_slabs: int, **options: Any) -> Path:
    """A slab folder with the fields `number` and `tokens`."""
    source = folder.parent / f"{folder.name}-source.h5"
    with h5py.File(source, "w") as file:
        file["number"] = np.arange(count)
        tokens = file.create_dataset("tokens", (count,), h5py.vlen_dtype(np.int32))
        for number in range(count):
            tokens[number] = tokens_of(number)
    convert_to_slabs(source, folder, num_slabs=num_slabs, **options)
    return folder


def make_photo_slabs(folder: Path, count: int, num_slabs: int) -> Path:
    """A slab folder of encoded images, of two classes and different sizes."""
    from PIL import Image

    source = folder.parent / f"{folder.name}-source"
    for number in range(count):
        home = source / f"class{number % 2}"
        home.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 30), (number, 9, 9)).save(home / f"{number:03d}.jpg")
    convert_to_slabs(source, folder, num_slabs=num_slabs, encoded=True)
    return folder


def rewrite_attribute(path: Path, name: str, value: Any) -> None:
    """Change one root attribute of an HDF5 file in place."""
    with h5py.File(path, "r+") as file:
        file.attrs[name] = value


# Arrays that do not fit (4, 6) uint8, and their form in messages.
OTHER_FORMS = [
    (np.zeros((4, 7), np.uint8), "(4, 7) uint8"),
    (np.zeros((4, 6), np.int16), "(4, 6) int16"),
    (np.uint8(3), "() uint8"),
    (h5py.Empty("u1"), "None uint8"),
]


def collect(batches: Iterable[dict[str, Any]]) -> dict[str, np.ndarray]:
    """All batches of a loader as one array per field."""
    parts = [{name: np.asarray(values) for name, values in batch.items()} for batch in batches]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
