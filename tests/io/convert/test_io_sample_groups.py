"""HDF5 files with a group for each sample, converted."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map

from hdf5_samples import OTHER_FORMS, collect
from hsgd.errors import DataError
from loaders import loader_of

COUNT = 40


def pixels(number):
    return np.full((4, 6), number, np.uint8)


def save(path, count=COUNT, name="{:06d}", home=""):
    with h5py.File(path, "w") as file:
        for number in range(count):
            group = file.create_group(f"{home}{name.format(number)}")
            group["image"], group["label"] = pixels(number), np.int64(number)
    return path


def convert(path, target, **options):
    """Convert in order; what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_to_slabs(path, target, permute=False, **options)
    return [str(warning.message) for warning in caught]


def converted(path, tmp_path, **options):
    lines = convert(path, tmp_path / "out", **options)
    loader = loader_of(tmp_path / "out", 7, shuffle="none", as_numpy=True, verify=True)
    return collect(loader), lines


@pytest.mark.parametrize("home", ["", "data/", "a/b/"])
@pytest.mark.parametrize("name", ["{:06d}", "demo_{}", "{}", "{}th"])
def test_each_group_is_a_sample_in_the_order_of_the_numbers(tmp_path, hsgd_data, home, name):
    path = save(tmp_path / "a.h5", home=home, name=name)
    first, last = home + name.format(0), home + name.format(COUNT - 1)
    code, shown, _ = hsgd_data("info", path)
    assert code == 0
    assert f"layout: each of 40 groups, {first} to {last}, is read as one sample" in shown
    found, lines = converted(path, tmp_path)
    assert found["label"].tolist() == list(range(COUNT))
    np.testing.assert_array_equal(found["image"], [pixels(n) for n in range(COUNT)])
    assert lines == [f"{path}: each of 40 groups, {first} to {last}, is read as one sample"]


def test_trajectories_of_different_lengths_are_ragged(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for number in range(COUNT):
            steps = 1 + number * 7 % 5
            group = file.create_group(f"data/demo_{number}")
            group.create_dataset("obs/pos", data=np.full((steps, 3), number, ">f4"), chunks=(1, 3))
            group["actions"] = np.full(steps, number)
        file["mask/train"] = np.arange(30)
    convert(path, tmp_path / "out")
    found = open_map(tmp_path / "out")
    assert {spec.name: (spec.shape, spec.ragged) for spec in found.fields} == {
        "actions": ((), True),
        "obs/pos": ((3,), True),
    }
    number = 0
    for batch in loader_of(tmp_path / "out", 7, shuffle="none", as_numpy=True, verify=True):
        for row in range(len(batch["actions"])):
            wanted = np.full((1 + number * 7 % 5, 3), number, np.float32)
            np.testing.assert_array_equal(batch["obs/pos"][row], wanted)
            np.testing.assert_array_equal(batch["actions"][row], wanted[:, 0])
            number += 1
    assert number == COUNT


def test_groups_that_lack_a_field_are_left_out_and_named(tmp_path, hsgd_data):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["000007/label"]
        del file["000031"]
        file["000031"] = 5
        file["000009/extra"] = 1
        file["meta"] = np.arange(3)
    code, shown, err = hsgd_data("convert", path, tmp_path / "out", "--keep-order")
    assert code == 0
    assert "38 samples in" in shown
    (line,) = [line for line in err.splitlines() if "left out" in line]
    assert "groups and fields left out: '000007' (no label), '000031' (no image, label)" in line
    assert "'meta' (no image, label)" in line
    labels = collect(loader_of(tmp_path / "out", 7, shuffle="none", as_numpy=True))["label"]
    assert labels.tolist() == [n for n in range(COUNT) if n not in (7, 31)]
    found, lines = converted(path, tmp_path, fields=["image"], overwrite=True)
    assert len(found["image"]) == 39
    assert "left out: '000031' (no image), 'meta' (no image)" in lines[1]


@pytest.mark.parametrize(("value", "form"), OTHER_FORMS)
def test_samples_of_another_form_are_named(tmp_path, value, form):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["000011/image"]
        file["000011/image"] = value
    with pytest.raises(DataError) as raised:
        convert_to_slabs(path, tmp_path / "out")
    assert f"000011/image is {form}, but /000000/image (4, 6) uint8" in str(raised.value)


def test_text_is_no_field_packing_stays_and_other_attributes_are_named(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file.attrs["title"] = "cats"
        for number in range(COUNT):
            file[f"{number:06d}/caption"] = "a cat"
            file[f"{number:06d}/image"].attrs["scale_factor"] = 0.5
            file[f"{number:06d}"].attrs["taken"] = number
    lines = convert(path, tmp_path / "out")
    assert [spec.name for spec in open_map(tmp_path / "out").fields] == ["image", "label"]
    assert "groups and fields left out: 'caption' (it holds neither numbers nor bool)" in lines[1]
    assert "'000000@taken' (an attribute of one sample, or of several)" in lines[2]
    assert "field 'image' is packed (scale_factor 0.5)" in lines[3]
    assert open_map(tmp_path / "out").packing == {"image": {"scale_factor": 0.5}}
    with h5py.File(tmp_path / "out/index.h5") as file:
        assert file.attrs["title"] == "cats"
    with h5py.File(path, "r+") as file:
        file["000020/image"].attrs["scale_factor"] = 0.25
    with pytest.raises(
        DataError, match="000020/image is packed by other attributes than /000000/image"
    ):
        convert_to_slabs(path, tmp_path / "again")


def test_rows_that_nobody_wrote_are_refused(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["000011/image"]
        file["000011"].create_dataset("image", (4, 6), np.uint8)
    with pytest.raises(DataError, match="'image': 000011/image: none of 4 rows was ever written"):
        convert_to_slabs(path, tmp_path / "out")


def test_a_folder_of_such_files_is_joined(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in ("a", "b"):
        save(parts / f"{name}.h5")
    found, lines = converted(parts, tmp_path)
    assert found["label"].tolist() == [*range(COUNT), *range(COUNT)]
    assert len(lines) == 2


def said_of_groups(hsgd_data, path):
    code, shown, _ = hsgd_data("info", path)
    assert code == 0
    return "".join(line.strip() for line in shown.splitlines() if line.startswith("  alike"))


@pytest.mark.parametrize(("count", "home"), [(2, ""), (15, "data/")])
def test_info_says_of_fewer_groups_how_they_are_read(tmp_path, hsgd_data, count, home):
    path = tmp_path / "few.h5"
    with h5py.File(path, "w") as file:
        for number in range(count):
            file[f"{home}demo_{number}/obs/x"], file[f"{home}demo_{number}/y"] = np.ones((2, 5, 3))
    line = said_of_groups(hsgd_data, path)
    assert line.startswith(f"alike: {count} groups have obs/x, y, read as fields")
    assert f'group="{home}demo_0"' in line and "16 groups or more" in line


def test_groups_that_are_no_samples_are_fields_as_before(tmp_path, hsgd_data):
    with h5py.File(tmp_path / "splits.h5", "w") as file:
        for name in ("train", "test", "val"):
            file[f"{name}/x"], file[f"{name}/y"] = np.arange(9), np.arange(9)
    assert len(open_map(tmp_path / "splits.h5").fields) == 6
    line = said_of_groups(hsgd_data, tmp_path / "splits.h5")
    assert line.startswith("alike: 3 groups have x, y, read as fields whose rows are samples;")
    assert 'group="test" reads one group alone' in line
    with h5py.File(tmp_path / "sensors.h5", "w") as file:
        for number in range(30):
            file[f"sensor{number}/value{number}"] = np.arange(9)
    assert len(open_map(tmp_path / "sensors.h5").fields) == 30
    assert said_of_groups(hsgd_data, tmp_path / "sensors.h5") == ""
    sensors = tmp_path / "named.h5"
    with h5py.File(sensors, "w") as file:
        for number in range(30):
            file[f"sensor{number}/value"] = np.arange(9)
    names = [f"sensor{number}/value" for number in range(30)]
    convert_to_slabs(sensors, tmp_path / "out", fields=names)
    assert len(open_map(tmp_path / "out").fields) == 30  # a slab folder is what it is


def test_a_name_that_is_not_utf8_is_left_out(tmp_path, hsgd_data):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file.id.links.create_soft(b"\xff\xfe", b"/000000")
    assert list(open_map(path).left_out) == ["\\xff\\xfe"]
    code, _, err = hsgd_data("convert", path, tmp_path / "out")
    assert code == 0
    assert "groups and fields left out: " in err and "its name is not UTF-8" in err


@pytest.mark.long
def test_groups_in_a_circle_end(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        for number in range(COUNT):
            for other in range(COUNT):
                file[f"{number:06d}/to{other}"] = file[f"{other:06d}"]
    with pytest.raises(DataError, match="its groups are held by several others"):
        open_map(path)
