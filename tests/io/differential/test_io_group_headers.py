"""Arrays of samples in groups: their headers say what h5py says."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import warnings
from unittest import mock

import h5py
import numpy as np
import pytest
from hsgd.io import open_map
from hsgd.io.layouts import sample_group_map

import group_header_campaign
from group_files import FIELDS, both_outcomes, random_group_file

__all__: list[str] = []

STORED = {
    "contiguous": {},
    "one chunk": {"chunks": (4, 6)},
    "gzip": {"chunks": (4, 6), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"chunks": (4, 6), "compression": "lzf"},
    "times": {"track_times": True},
    "big-endian": {"dtype": ">i2"},
    "limited": {"maxshape": (9, 6), "chunks": (4, 6)},
}
VERSIONS = ["earliest", "latest", "v110", ("earliest", "v110")]

pytestmark = pytest.mark.filterwarnings("ignore:.*is read as one sample")


def save(path, version, fields=("image", "obs/label"), lengths=(4,), attributes=(), **stored):
    with h5py.File(path, "w", libver=version) as file:
        for number in range(40):
            group = file.create_group(f"é/{number}")
            for field in fields:
                data = np.full((lengths[number % len(lengths)], 6), number, "u1")
                options = {"dtype": "u1"} | stored
                item = group.create_dataset(field, data=data, **options)
                for name in attributes:
                    item.attrs[name] = "m" if name == "units" else 0.5
            group.attrs["caption"] = f"number {number}"
    return path


def known(path):
    """Return how many samples h5py did not examine; its map must be that of h5py alone."""
    with (
        mock.patch.object(sample_group_map, "_add", wraps=sample_group_map._add) as add,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        count = open_map(path).num_samples
    plain, found = both_outcomes(path)
    assert plain == found
    return count - add.call_count


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("stored", STORED)
def test_arrays_that_are_alike_are_found_without_h5py(tmp_path, version, stored):
    has_index = stored == "limited" and version in ("latest", "v110")  # of another kind
    assert known(save(tmp_path / "a.h5", version, **STORED[stored])) == (0 if has_index else 40)


@pytest.mark.parametrize("version", VERSIONS)
def test_arrays_that_differ_in_length_are_found_too(tmp_path, version):
    assert known(save(tmp_path / "a.h5", version, lengths=(4, 5, 1))) == 40
    assert known(save(tmp_path / "b.h5", version, lengths=(4, 0))) == 20  # nobody wrote them


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("attributes", [("units",), ("units", "scale_factor"), "abcdefghij"])
def test_attributes_are_no_obstacle(tmp_path, version, attributes):
    path = save(tmp_path / "a.h5", version, attributes=attributes)
    is_dense = len(attributes) > 8 and version in ("latest", "v110")
    assert known(path) == (0 if is_dense else 40)


@pytest.mark.parametrize("fields", [FIELDS, [f"field{n}" for n in range(60)]])
def test_groups_hold_many_arrays(tmp_path, fields):
    assert known(save(tmp_path / "a.h5", "earliest", fields)) == 40


def test_arrays_that_are_not_alike_are_left_to_h5py(tmp_path):
    path = save(tmp_path / "a.h5", "earliest")
    with h5py.File(path, "r+") as file:
        file["é/3/image"].attrs["units"] = "m"
        file["é/5/again"] = file["é/5/image"]
        file["é/7/soft"] = h5py.SoftLink("image")
    assert known(path) == 37


def test_a_file_with_a_user_block_is_left_to_h5py(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        for number in range(20):
            file[f"{number}/image"] = np.full((4, 6), number)
    assert known(tmp_path / "a.h5") == 0


@pytest.mark.parametrize("seed", range(12))
def test_headers_of_random_files_say_what_h5py_says(tmp_path, seed):
    plain, found = both_outcomes(random_group_file(tmp_path / "a.h5", seed))
    assert plain == found


def test_files_that_were_cut_off_say_what_h5py_says(tmp_path):
    path = save(tmp_path / "a.h5", "earliest")
    content = path.read_bytes()
    for size in range(1, len(content), len(content) // 50):
        path.write_bytes(content[:size])
        plain, found = both_outcomes(path)
        assert plain == found and found.startswith("DataError")


def test_a_second_shape_does_not_count(tmp_path):
    """HDF5 takes the first of two messages of one type."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        for number in range(20):
            data = np.full((4, 6), number, "u1")
            item = file.create_dataset(f"{number:02d}/image", data=data, track_times=False)
            item.attrs["zzzz"] = np.arange(6)
    content = bytearray(path.read_bytes())
    shape = struct.pack("<BBB5xQQQQ", 1, 2, 1, 4, 6, 4, 6)
    at, changed = 0, 0
    while (at := content.find(b"zzzz\0", at)) >= 0:
        message = at - 16  # of the attribute, which becomes a second shape
        kind, size = struct.unpack_from("<HH", content, message)
        if kind == 0x0C:
            first = content.rfind(shape, 0, message)
            if changed:  # the first sample keeps its 4 rows
                struct.pack_into("<Q", content, first + 8, 3)
            struct.pack_into("<H", content, message, 1)
            content[message + 8 : message + 8 + size] = shape.ljust(size, b"\0")
            changed += 1
        at += 1
    path.write_bytes(content)
    assert changed == 20
    plain, found = both_outcomes(path)
    assert plain == found and "ragged=True" in found


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 150), pytest.param(1, 1000, marks=pytest.mark.long)]
)
@pytest.mark.timeout(1200)
def test_headers_of_changed_files_say_what_h5py_says(seed, count):
    words = [sys.executable, group_header_campaign.__file__, str(seed), str(count)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert sum(figures.values()) == count
    assert min(figures["map"], figures["error"]) >= count // 10
    assert figures["crash of h5py"] <= count // 100
