"""Folders of images as classes: names and counts are shown, splits are no classes."""

from __future__ import annotations

import json

import h5py
import numpy as np
import PIL.Image
import pytest
from hsgd.io import convert_to_slabs

from hdf5_samples import collect, write_hdf5
from hsgd.errors import DataError
from loaders import loader_of


def put_images(root, counts):
    """Images by folder, such as {"cat": 3}."""
    for name, count in counts.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture = np.full((4, 5, 3), number, np.uint8)
            PIL.Image.fromarray(picture).save(folder / f"{number:03d}.png")
    return root


@pytest.mark.parametrize(
    ("splits", "named"),
    [
        (("train", "val"), "train"),
        (("test", "Train", "valid"), "Train"),
        (("training", "validation"), "training"),
        (("train",), "train"),
        (("dev", "eval"), "dev"),
    ],
)
def test_folders_that_are_splits_are_refused(tmp_path, hsgd_data, splits, named):
    counts = {f"{split}/{animal}": 2 for split in splits for animal in ("cat", "dog")}
    photos = put_images(tmp_path / "jpg", counts)
    code, _, err = hsgd_data("convert", photos, tmp_path / "out", "--quiet")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "with class folders inside, not classes" in err
    assert f"such as {photos / named}" in err
    assert not (tmp_path / "out").exists()
    convert_to_slabs(photos / named, tmp_path / "out")
    assert collect(loader_of(tmp_path / "out", 2, as_numpy=True))["label"].tolist().count(1) == 2


def test_a_split_whose_images_lie_in_no_class_is_refused_with_the_others(tmp_path):
    photos = put_images(tmp_path / "jpg", {"train/cat": 2, "train/dog": 2, "test": 3})
    with pytest.raises(DataError, match=r"splits .*: test, train; .*jpg/train$"):
        convert_to_slabs(photos, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".h5", ".tar", ".parquet", ".txt", ".jsonl"])
@pytest.mark.parametrize("names", [("train", "test"), ("Train-000", "train-001", "val_000")])
def test_files_that_are_splits_are_not_joined(tmp_path, suffix, names):
    for name in names:
        (tmp_path / f"{name}{suffix}").touch()
    with pytest.raises(DataError, match="its files are splits, which would become one data set"):
        convert_to_slabs(tmp_path, tmp_path / "out")


def test_files_of_one_split_and_other_names_are_joined(tmp_path):
    for folder, names in (("a", ("train-0", "train-1")), ("b", ("test", "tests"))):
        (tmp_path / folder).mkdir()
        for name in names:
            write_hdf5(tmp_path / folder / f"{name}.h5", {"x": np.arange(5)})
        convert_to_slabs(tmp_path / folder, tmp_path / "out", overwrite=True)
        assert len(collect(loader_of(tmp_path / "out", 5, as_numpy=True))["x"]) == 10


@pytest.mark.parametrize(
    "counts",
    [
        {"test": 2, "train": 3},  # of railways
        {"train/red": 2, "tram/blue": 3},
        {"cat/small": 2, "dog": 3},
    ],
)
def test_other_folders_are_classes(tmp_path, counts):
    convert_to_slabs(put_images(tmp_path / "jpg", counts), tmp_path / "out")
    labels = collect(loader_of(tmp_path / "out", 2, as_numpy=True))["label"].tolist()
    assert sorted(set(labels)) == [0, 1]


def rows_of(shown):
    return [line.split() for line in shown.splitlines()]


def test_convert_and_info_show_names_and_counts_of_classes(tmp_path, hsgd_data):
    photos = put_images(tmp_path / "jpg", {"cat": 3, "dog": 5, "wild boar": 1})
    code, made, _ = hsgd_data("convert", photos, tmp_path / "out")
    assert code == 0
    _, shown, _ = hsgd_data("info", tmp_path / "out")
    for rows in (rows_of(made), rows_of(shown)):
        assert ["label", "class", "samples"] in rows
        assert ["0", "cat", "3"] in rows
        assert ["1", "dog", "5"] in rows
        assert ["2", "wild", "boar", "1"] in rows
    found = json.loads(hsgd_data("info", tmp_path / "out", "--json")[1])
    names, samples = ["cat", "dog", "wild boar"], [3, 5, 1]
    assert found["classes"] == {"label": {"names": names, "samples": samples, "nameless": 0}}


def test_many_classes_are_cut_to_a_page_and_are_whole_in_json(tmp_path, hsgd_data):
    path = write_hdf5(tmp_path / "a.h5", {"label": np.arange(3000) % 1000})
    with h5py.File(path, "r+") as file:
        file["label"].attrs["class_names"] = [f"class{n}" for n in range(990)]
    _, shown, _ = hsgd_data("info", path)
    assert len(shown.splitlines()) < 40
    assert ["...", "989", "971", "more,", "see", "--json", "2,913"] in rows_of(shown)
    assert ["others", "without", "a", "name", "30"] in rows_of(shown)
    found = json.loads(hsgd_data("info", path, "--json")[1])["classes"]["label"]
    assert len(found["names"]) == 990
    assert found["samples"] == [3] * 990


@pytest.mark.parametrize("value", ["cat,dog", 3, np.zeros((2, 2)), h5py.Empty("f4")])
def test_an_attribute_that_holds_no_names_is_no_table(tmp_path, hsgd_data, value):
    path = write_hdf5(tmp_path / "a.h5", {"label": np.arange(3), "x": np.arange(3.0)})
    with h5py.File(path, "r+") as file:
        file["label"].attrs["class_names"] = value
    code, shown, _ = hsgd_data("info", path)
    assert code == 0
    assert "class" not in shown


def test_convert_says_what_it_left_out_and_why(tmp_path, hsgd_data):
    photos = put_images(tmp_path / "jpg", {"cat": 3, "dog": 2, "empty": 0})
    (photos / "cat/notes.txt").write_text("hello")
    (photos / "readme.rst").write_text("hello")
    (photos / "dog/lost.png").symlink_to(tmp_path / "nowhere.png")
    (photos / "dog/more").symlink_to(photos / "cat")
    code, _, err = hsgd_data("convert", photos, tmp_path / "out", "--quiet")
    assert code == 0
    assert len(err.splitlines()) == 1
    for part in (
        "'cat/notes.txt' (no image by its name)",
        "'readme.rst' (not in a class folder)",
        "'dog/lost.png' (no file, or a link that leads nowhere)",
        "'dog/more' (a link to a folder inside a class)",
        "'empty' (a class without images, which keeps the label 2)",
    ):
        assert part in err
    assert ["2", "empty", "0"] in rows_of(hsgd_data("info", tmp_path / "out")[1])
