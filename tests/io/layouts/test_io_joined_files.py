"""Several HDF5 files as one dataset: their rows, or each file a sample."""

from __future__ import annotations

import os
import resource

import h5py
import numpy as np
import pytest
from hsgd.io import open_map

from hdf5_samples import collect, make_slabs
from hsgd.errors import DataError
from hsgd.tools.cli import main
from loaders import loader_of
from toolkit.range_server import RangeServer

__all__: list[str] = []

pytestmark = pytest.mark.filterwarnings("ignore:.*left out. 'version'")

FILES = 12
NAMES = ("a0.h5", "a1.h5")
COUNTS = range(3, 3 + FILES)  # rows of each file


def save_parts(folder, **stored):
    start = 0
    for number, count in enumerate(COUNTS):
        with h5py.File(folder / f"part{number}.h5", "w") as file:
            values = np.arange(start, start + count)
            file["x"] = values
            file.create_dataset("y", data=values[:, None] * np.ones((1, 3)), **stored)
            file["version"] = 3
        start += count
    return folder


def save_samples(folder, count=20):
    for number in range(count):
        with h5py.File(folder / f"s{number}.h5", "w") as file:
            stored = {"compression": "gzip"} if number % 2 else {}
            file.create_dataset("image", data=np.full((6, 4), number % 256, np.uint8), **stored)
            file["boxes"] = np.full((number % 3, 2), number)
            file["meta/label"] = number
    return folder


def named(folder, how):
    """Return the files of a folder as `how` says."""
    if how == "list":
        return sorted(folder.iterdir(), key=lambda path: int(path.stem.strip("pasrt")))
    return folder if how == "folder" else f"{folder}/*.h5"


@pytest.mark.parametrize("how", ["list", "folder", "pattern"])
@pytest.mark.parametrize("stored", [{}, {"compression": "gzip", "chunks": (2, 3)}])
def test_rows_of_all_files_come_once_in_the_order_of_their_numbers(tmp_path, how, stored):
    path = named(save_parts(tmp_path, **stored), how)
    found = collect(loader_of(path, 5, shuffle="none", as_numpy=True))
    np.testing.assert_array_equal(found["x"], np.arange(sum(COUNTS)))
    parts = [collect(loader_of(path, 5, rank, 3, pad=False, as_numpy=True)) for rank in range(3)]
    seen = np.concatenate([part["x"] for part in parts])
    np.testing.assert_array_equal(np.sort(seen), np.arange(sum(COUNTS)))
    rows = np.concatenate([part["y"] for part in parts])
    np.testing.assert_array_equal(rows, np.repeat(seen[:, None], 3, axis=1))


@pytest.mark.filterwarnings("ignore:.*is read as one sample")
def test_files_with_arrays_of_unequal_lengths_are_samples(tmp_path):
    found = open_map(save_samples(tmp_path))
    assert found.note == (
        "each of 20 files, s0.h5 to s19.h5, is read as one sample, of any length in boxes"
    )
    seen = []
    for batch in loader_of(tmp_path, 7, as_numpy=True):
        rows = zip(batch["image"], batch["boxes"], batch["meta/label"], strict=True)
        for image, boxes, label in rows:
            np.testing.assert_array_equal(image, np.full((6, 4), label))
            np.testing.assert_array_equal(boxes, np.full((label % 3, 2), label))
            seen.append(int(label))
    assert sorted(seen) == list(range(20))


def test_the_layout_can_be_said(tmp_path):
    save_samples(tmp_path)
    rows = open_map(tmp_path, ["image"])  # equal first dimensions
    assert (rows.num_samples, rows.note) == (6 * 20, "")
    for layout, samples in (("files", 20), ("rows", 6 * 20)):
        assert open_map(tmp_path, ["image"], layout=layout).num_samples == samples
    assert open_map(tmp_path, ["image", "meta/label"]).num_samples == 20
    assert open_map(tmp_path / "s4.h5", layout="files").num_samples == 1
    with pytest.raises(ValueError, match="no groups with equal fields"):
        open_map(tmp_path, layout="groups")
    with pytest.raises(ValueError, match="layout='columns'; use 'auto', 'rows'"):
        open_map(tmp_path, layout="columns")
    with pytest.raises(DataError, match="first dimensions differ"):
        open_map(tmp_path, layout="rows")


def test_files_behind_urls_and_from_convert(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    save_parts(data)
    with RangeServer(data) as server:
        urls = [f"{server.url}/part{number}.h5" for number in range(FILES)]
        found = collect(loader_of(urls, 5, shuffle="none", as_numpy=True))
        with pytest.raises(ValueError, match="files and URLs; use one kind"):
            open_map([*urls, data / "part0.h5"])
    np.testing.assert_array_equal(found["x"], np.arange(sum(COUNTS)))
    assert main(["data", "convert", str(data), str(tmp_path / "out"), "--keep-order"]) == 0
    found = collect(loader_of(tmp_path / "out", 5, shuffle="none", as_numpy=True))
    np.testing.assert_array_equal(found["x"], np.arange(sum(COUNTS)))


@pytest.mark.filterwarnings("ignore:.*is read as one sample")
def test_files_that_are_samples_are_converted_and_described(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    save_samples(data)
    assert main(["data", "info", f"{data}/*.h5"]) == 0
    said = capsys.readouterr().out
    assert "20 HDF5 files, 20 samples" in said and "layout: each of 20 files" in said
    assert main(["data", "convert", str(data), str(tmp_path / "out"), "--keep-order"]) == 0
    assert "is read as one sample" in capsys.readouterr().err
    found = collect(loader_of(tmp_path / "out", 7, fields=["image", "meta/label"], as_numpy=True))
    assert sorted(found["meta/label"]) == list(range(20))


def test_files_that_mean_other_things_are_refused(tmp_path, capsys):
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        with h5py.File(tmp_path / f"a{number}.h5", "w") as file:
            file["label"] = np.arange(4) % 2
            file["label"].attrs["class_names"] = names
    with pytest.raises(DataError, match=r"a1\.h5: its class_names are others"):
        open_map(tmp_path)
    assert main(["data", "convert", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "its files have other class_names of 'label'" in capsys.readouterr().err
    with h5py.File(tmp_path / "a1.h5", "r+") as file:
        file["label"].attrs["class_names"] = ["cat", "dog"]
    one, other = (open_map([tmp_path / a, tmp_path / b]) for a, b in (NAMES, NAMES[::-1]))
    assert one.num_samples == other.num_samples and one.fingerprint() != other.fingerprint()


@pytest.mark.filterwarnings("ignore:.*is read as one sample")
def test_groups_that_are_left_out_of_later_files_are_named(tmp_path):
    for name, lacking in zip(NAMES, ((), (7,)), strict=True):
        with h5py.File(tmp_path / name, "w") as file:
            for number in range(20):
                file[f"{number}/x"] = number
                if number not in lacking:
                    file[f"{number}/y"] = number
    found = open_map(tmp_path)
    assert found.num_samples == 39 and found.left_out == {"a1.h5: 7": "no y"}


@pytest.mark.filterwarnings("ignore:.*is read as one sample")
def test_many_files_need_few_descriptors(tmp_path):
    save_samples(tmp_path, 300)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 120, limits[1]))
    try:
        found = collect(loader_of(tmp_path, 7, fields=["image", "meta/label"], as_numpy=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_array_equal(found["image"][:, 0, 0], found["meta/label"] % 256)
    assert sorted(found["meta/label"]) == list(range(300))


def test_slabs_without_their_index_are_no_joined_files(tmp_path):
    make_slabs(tmp_path / "out", 101, 7)
    (tmp_path / "out" / "index.h5").unlink()
    with pytest.raises(DataError, match=r"no slab folder, index\.h5 is missing"):
        open_map(tmp_path / "out")


def test_files_that_do_not_fit_are_named(tmp_path):
    save_parts(tmp_path)
    other = tmp_path / "part7.h5"
    with h5py.File(other, "r+") as file:
        file["x"].attrs["scale_factor"] = 0.5
    with pytest.raises(DataError, match=r"part7.h5: field 'x' is packed with .* that of part0.h5"):
        open_map(tmp_path)
    with h5py.File(other, "r+") as file:
        del file["x"]
        file["x"] = np.zeros(COUNTS[7])
    with pytest.raises(DataError, match=r"part7.h5: its fields are x float64 .* of part0.h5 x int"):
        open_map(tmp_path)
    with h5py.File(other, "r+") as file:
        del file["x"]
    with pytest.raises(ValueError, match=r"part7.h5: no field x; there are: y"):
        open_map(tmp_path)
    other.write_bytes(b"no HDF5")
    with pytest.raises(DataError, match=r"part7\.h5: not an HDF5 file"):
        open_map(tmp_path)
    with pytest.raises(DataError, match="no file matches; check the path"):
        open_map(tmp_path / "*.hdf5")
    with pytest.raises(TypeError, match=r"path=\[\]; use a path"):
        open_map([])
    os.rename(tmp_path / "part0.h5", tmp_path / "train.h5")
    for path in tmp_path.glob("part*"):
        os.rename(path, tmp_path / path.name.replace("part", "test"))
    with pytest.raises(DataError, match="its files are splits"):
        open_map(tmp_path)
