"""Rows that lie in several files: masters of Eiger detectors, virtual datasets of whole rows."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hsgd.io import open_map

from hdf5_samples import collect
from hsgd.errors import DataError
from hsgd.tools.cli import main
from loaders import loader_of

__all__: list[str] = []

pytestmark = pytest.mark.filterwarnings("ignore:.*beside the images")

ROWS = (5, 5, 5, 3)  # of each file
IMAGES = np.arange(sum(ROWS) * 12, dtype=np.uint16).reshape(-1, 3, 4)
STORED = {
    "contiguous": ({}, "preadv"),
    "gzip": ({"chunks": (1, 3, 4), "compression": "gzip"}, "preadv + gzip"),
    "scale-offset": ({"chunks": (1, 3, 4), "scaleoffset": 0}, "h5py: filters (6,)"),
}


def save_parts(folder, **stored):
    """Save the images as detector files do, each as /entry/data/data."""
    start, paths = 0, []
    for number, rows in enumerate(ROWS, 1):
        paths.append(folder / f"run_data_{number:06}.h5")
        with h5py.File(paths[-1], "w") as file:
            part = IMAGES[start : start + rows]
            file.create_dataset("entry/data/data", data=part, **stored)
            file["labels"] = np.arange(start, start + rows)
        start += rows
    return paths


def save_master(folder, **stored):
    with h5py.File(folder / "run_master.h5", "w") as file:
        for path in save_parts(folder, **stored):
            name = path.stem.removeprefix("run_")
            file[f"entry/data/{name}"] = h5py.ExternalLink(path.name, "/entry/data/data")
        file["entry/instrument/mask"] = np.zeros((3, 4))
    return folder / "run_master.h5"


def save_virtual(folder, path, **stored):
    """Save a file whose fields are virtual: images and labels of all parts."""
    layouts = {
        "image": h5py.VirtualLayout(IMAGES.shape, IMAGES.dtype),
        "label": h5py.VirtualLayout((len(IMAGES),), np.int64),
    }
    start = 0
    for part, rows in zip(save_parts(folder, **stored), ROWS, strict=True):
        target = slice(start, start + rows)
        for name, inner in (("image", "entry/data/data"), ("label", "labels")):
            shape = (rows, *layouts[name].shape[1:])
            layouts[name][target] = h5py.VirtualSource(part.name, inner, shape)
        start += rows
    with h5py.File(path, "w", libver="latest") as file:
        for name, layout in layouts.items():
            file.create_virtual_dataset(name, layout)
    return path


def check(path, name, **options):
    found = collect(loader_of(path, 4, shuffle="none", as_numpy=True, **options))
    np.testing.assert_array_equal(found[name], IMAGES)
    parts = [
        collect(loader_of(path, 4, r, 3, pad=False, as_numpy=True, **options))[name]
        for r in range(3)
    ]
    seen = np.concatenate(parts)
    np.testing.assert_array_equal(seen[np.argsort(seen[:, 0, 0])], IMAGES)


@pytest.mark.parametrize("stored", STORED)
def test_the_images_of_a_master_are_one_field(tmp_path, stored, capsys):
    options, read_by = STORED[stored]
    path = save_master(tmp_path, **options)
    field = "entry/data/data"
    assert open_map(path).read_by()[field].startswith(read_by)
    check(path, field, fields=[field])
    check(path, "data", fields=["data"], group="entry/data")
    with pytest.warns(UserWarning, match="4 datasets, .*000001 to .*000004, are read as one"):
        loader_of(path, 4, fields=None)
    assert main(["data", "info", str(path)]) == 0
    assert "no field: entry/instrument/mask (beside the images)" in capsys.readouterr().out
    one = open_map(path, ["entry/data/data_000004"])
    assert one.num_samples == ROWS[-1] and not one.note


def test_what_was_asked_for_comes_before_the_images(tmp_path):
    path = save_master(tmp_path)
    with h5py.File(path, "r+") as file:
        del file["entry/data/data_000004"]  # equal rows
    names = [f"entry/data/data_{number:06}" for number in (1, 2, 3)]
    assert [spec.name for spec in open_map(path, names, layout="rows").fields] == names
    with h5py.File(path, "r+") as file:
        file["entry/data/data"] = np.arange(7)
    assert open_map(path, ["entry/data/data"]).num_samples == 7


def test_masters_of_one_file_and_of_several_are_joined(tmp_path):
    path = save_master(tmp_path)
    with h5py.File(tmp_path / "one_master.h5", "w") as file:
        target = h5py.ExternalLink("run_data_000001.h5", "/entry/data/data")
        file["entry/data/data_000001"] = target
    for order in ([path, tmp_path / "one_master.h5"], [tmp_path / "one_master.h5", path]):
        assert open_map(order).num_samples == sum(ROWS) + ROWS[0]


def test_a_file_that_is_missing_in_a_master_is_named(tmp_path):
    path = save_master(tmp_path)
    (tmp_path / "run_data_000004.h5").unlink()
    with pytest.raises(DataError, match=r"'entry/data/data_000004': .* is missing; restore it"):
        open_map(path)
    with h5py.File(path, "r+") as file:
        del file["entry/data/data_000004"], file["entry/data/data_000002"]
    with pytest.raises(DataError, match="data_000003' comes after 'entry/data/data_000001'"):
        open_map(path)
    assert open_map(path, ["entry/data/data_000001"]).num_samples == ROWS[0]


def test_images_of_another_form_are_named(tmp_path):
    path = save_master(tmp_path)
    with h5py.File(tmp_path / "run_data_000003.h5", "r+") as file:
        file["entry/data/data"].attrs["scale_factor"] = 0.5
    with pytest.raises(DataError, match=r"data_000003' is packed by other attributes than"):
        open_map(path)
    with h5py.File(tmp_path / "run_data_000003.h5", "r+") as file:
        del file["entry/data/data"]
        file["entry/data/data"] = np.zeros((5, 3, 5), np.uint16)
    with pytest.raises(DataError, match=r"data_000003\.h5 is \(3, 5\) uint16, the first part"):
        open_map(path)


@pytest.mark.parametrize("stored", ["contiguous", "gzip"])
def test_virtual_datasets_are_read_from_their_sources(tmp_path, stored):
    options, read_by = STORED[stored]
    path = save_virtual(tmp_path, tmp_path / "all.h5", **options)
    assert open_map(path).read_by() == {"image": read_by, "label": "preadv"}
    check(path, "image")
    found = collect(loader_of(path, 4, shuffle="full", as_numpy=True))
    np.testing.assert_array_equal(found["image"], IMAGES[found["label"]])


def test_a_range_inside_a_source_is_read_alone(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = IMAGES
        layout = h5py.VirtualLayout((6, 3, 4), IMAGES.dtype)
        source = h5py.VirtualSource(".", "x", IMAGES.shape)
        layout[:2], layout[2:] = source[7:9], source[1:5]
        file.create_virtual_dataset("y", layout)
    assert open_map(tmp_path / "a.h5", ["y"]).read_by() == {"y": "preadv"}
    found = collect(loader_of(tmp_path / "a.h5", 4, fields=["y"], shuffle="none", as_numpy=True))
    np.testing.assert_array_equal(found["y"], IMAGES[[7, 8, 1, 2, 3, 4]])


def test_sources_of_other_types_are_left_to_hdf5(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout((6, 3, 4), np.float64)
        for number, dtype in enumerate((np.float64, np.float32)):
            file[f"x{number}"] = IMAGES[3 * number : 3 * number + 3].astype(dtype)
            layout[3 * number : 3 * number + 3] = h5py.VirtualSource(file[f"x{number}"])
        file.create_virtual_dataset("y", layout)
    found = collect(loader_of(tmp_path / "a.h5", 4, fields=["y"], shuffle="none", as_numpy=True))
    np.testing.assert_array_equal(found["y"], IMAGES[:6])


@pytest.mark.parametrize("how", ["columns", "strides", "types", "apart"])
def test_other_mappings_are_left_to_hdf5(tmp_path, how):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = IMAGES
        layout = h5py.VirtualLayout(IMAGES.shape, np.int64 if how == "types" else IMAGES.dtype)
        source = h5py.VirtualSource(".", "x", IMAGES.shape)
        if how == "columns":
            layout[:, :, :2], layout[:, :, 2:] = source[:, :, :2], source[:, :, 2:]
        elif how == "strides":
            layout[::2], layout[1::2] = source[::2], source[1::2]
        else:
            layout[:] = source
        file.create_virtual_dataset("y", layout)
        if how == "apart":
            file["z"] = np.arange(len(IMAGES))
    names = ["y", "z"] if how == "apart" else ["y"]
    assert open_map(path, names).read_by()["y"] == "h5py: virtual dataset"
    found = collect(loader_of(path, 4, fields=names, shuffle="none", as_numpy=True))
    np.testing.assert_array_equal(found["y"], IMAGES)
