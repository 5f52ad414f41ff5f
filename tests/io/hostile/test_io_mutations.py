"""Damaged files of all kinds never crash, hang, or deliver wrong data in silence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from hsgd.io.convert import slab_folder_writer as writing

import mutated_files
from hdf5_samples import arrays_of, make_ragged_slabs, make_slabs
from tiers import short_form

hdf5plugin = pytest.importorskip("hdf5plugin")


def plain(folder: Path) -> None:
    make_slabs(folder, 101, 7)


def gzip(folder: Path) -> None:
    make_slabs(folder, 101, 4, compress="gzip")


def blosc(folder: Path) -> None:
    make_slabs(folder, 101, 4, compress="zstd")


def ragged(folder: Path) -> None:
    make_ragged_slabs(folder, 101, 5)


def ragged_gzip(folder: Path) -> None:
    make_ragged_slabs(folder, 101, 4, compress="gzip")


FILTERS = {
    "contiguous": None,
    "chunks": {},
    "gzip": {"compression": "gzip"},
    "shuffle": {"compression": "gzip", "shuffle": True},
    "blosc": hdf5plugin.Blosc("lz4", 5, hdf5plugin.Blosc.SHUFFLE),
    "zstd": hdf5plugin.Zstd(),
    "fletcher32": {"compression": "gzip", "fletcher32": True},
}


def foreign(folder: Path) -> None:
    """A file for each filter, in the old format, and some in the new one."""
    folder.mkdir()
    for name, options in FILTERS.items():
        for version in ("earliest", "latest"):
            with h5py.File(folder / f"{name}-{version}.h5", "w", libver=version) as file:
                for field, array in arrays_of(101).items():
                    chunks = {} if options is None else {"chunks": (16, *array.shape[1:])}
                    file.create_dataset(field, data=array, **chunks, **(options or {}))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "make", "count", "seed"),
    short_form(
        "chaos",
        [
            ("slabs", ragged_gzip, 30, 0),
            ("foreign", foreign, 30, 0),
            ("slabs", gzip, 200, 1),
            ("slabs", blosc, 200, 1),
            *(
                (kind, make, 200, seed)
                for kind, make in (
                    ("slabs", plain),
                    ("slabs", ragged),
                    ("slabs", ragged_gzip),
                    ("foreign", foreign),
                )
                for seed in (1, 2)
            ),
        ],
        keep=[0, 1],
    ),
)
def test_damage_is_an_error_or_does_no_harm(
    kind: str,
    make: Callable[[Path], None],
    count: int,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "CHECKSUM_BYTES", 4 * (8 + 24 + 5 + 1))
    make(tmp_path / "data")
    words = [mutated_files.__file__, kind, str(tmp_path / "data"), str(count), str(seed)]
    words.insert(0, sys.executable)
    done = subprocess.run(words, timeout=280, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused, harmless = map(int, done.stdout.split())
    assert refused + harmless == count
    assert min(refused, harmless) >= count // 20
