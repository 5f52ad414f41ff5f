"""What conversion carries besides samples, folders of HDF5 files, and how its progress counts."""

from __future__ import annotations

from typing import ClassVar

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map
from hsgd.io.convert import convert_to_slabs as conversion
from hsgd.io.convert.find_damage import find_damage

from hdf5_samples import arrays_of, collect, tokens_of, write_hdf5
from hsgd.errors import DataError
from loaders import loader_of


def read_all(folder, **options):
    return collect(loader_of(folder, 7, shuffle="none", as_numpy=True, **options))


ATTRIBUTES = {
    "units": "kelvin",
    "title": np.bytes_("fixed"),
    "scale": np.float32(0.5),
    "big": np.array([1, 2], ">i4"),
    "names": np.array(["a", "bc"], object),
    "flag": True,
    "pair": np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
    "many": np.arange(20_000),
    "empty": h5py.Empty("f4"),
}


def set_attributes(item):
    for name, value in ATTRIBUTES.items():
        if name == "names":
            item.attrs.create(name, value, dtype=h5py.string_dtype())
        else:
            item.attrs[name] = value


def assert_attributes(item):
    assert set(item.attrs) >= set(ATTRIBUTES)
    for name, value in ATTRIBUTES.items():
        found = item.attrs[name]
        if isinstance(value, h5py.Empty):
            assert isinstance(found, h5py.Empty)
        else:
            np.testing.assert_array_equal(found, value)
    assert item.attrs.get_id("big").dtype == ">i4"


def save_attributed(path, count=30):
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        file["x"] = np.arange(count)
        file["group/y"] = np.arange(count) * 0.5
        tokens = file.create_dataset("tokens", (count,), h5py.vlen_dtype(np.int32))
        for number in range(count):
            tokens[number] = tokens_of(number)
        for name in ("/", "x", "group", "group/y", "tokens"):
            set_attributes(file[name])
    return path


def test_attributes_of_file_groups_and_fields_are_carried_and_carried_again(tmp_path):
    source = save_attributed(tmp_path / "a.h5")
    for target in ("once", "twice"):
        convert_to_slabs(source, tmp_path / target, num_slabs=3)
        with h5py.File(tmp_path / target / "index.h5") as file:
            for name in ("/", "x", "group", "group/y", "tokens"):
                assert_attributes(file[name])
        source = tmp_path / target
    assert not list(find_damage(open_map(source)))


def test_attributes_that_cannot_be_carried_are_named(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.arange(9)})
    with h5py.File(path, "r+") as file:
        file.attrs["sealed"] = "a word of hsgd's own"
        file["x"].attrs["units"] = "m"
        file["x"].attrs["see"] = file["x"].ref
        file["x"].attrs.create("several", [file["x"].ref], dtype=h5py.ref_dtype)
    with pytest.warns(UserWarning, match=r"a\.h5: attributes left out: ") as caught:
        convert_to_slabs(path, tmp_path / "out", num_slabs=2)
    (line,) = [str(warning.message) for warning in caught]
    assert "'@sealed' (hsgd has an attribute of this name itself)" in line
    assert "'x@see' (a reference, which leads nowhere in another file), 'x@several' (a ref" in line
    with h5py.File(tmp_path / "out" / "index.h5") as file:
        assert dict(file["x"].attrs) == {"units": "m"}
    open_map(tmp_path / "out")


def save_parts(folder, parts=3, **options):
    folder.mkdir()
    whole = arrays_of(31)
    cuts = np.linspace(0, 31, parts + 1).astype(int)
    for number in range(parts):
        rows = slice(cuts[number], cuts[number + 1])
        part = {name: array[rows] for name, array in whole.items()}
        path = write_hdf5(folder / f"part-{number}.{'hdf5' if number else 'h5'}", part, **options)
        with h5py.File(path, "r+") as file:
            file.attrs["made"] = "alike"
            file.attrs["number"] = number
    return folder


@pytest.mark.parametrize("options", [{}, {"chunks": True, "compression": "gzip"}])
def test_a_folder_of_hdf5_files_is_one_source_in_the_order_of_names(tmp_path, options):
    folder = save_parts(tmp_path / "parts", **options)
    with pytest.warns(UserWarning, match="'@number' .it differs between the files"):
        convert_to_slabs(folder, tmp_path / "out", num_slabs=4, permute=False)
    found = read_all(tmp_path / "out")
    for name, array in arrays_of(31).items():
        np.testing.assert_array_equal(found[name], array)
    with h5py.File(tmp_path / "out" / "index.h5") as file:
        assert file.attrs["made"] == "alike"
        assert "number" not in file.attrs


def test_files_of_a_folder_with_other_fields_are_refused_by_name(tmp_path):
    folder = save_parts(tmp_path / "parts")
    write_hdf5(folder / "part-9.h5", {"number": np.arange(3)})
    with pytest.raises(DataError, match=r"part-9\.h5: its fields are number int64 \(\), those of"):
        convert_to_slabs(folder, tmp_path / "out")
    with pytest.warns(UserWarning, match="@number"):
        convert_to_slabs(folder, tmp_path / "out", fields=["number"], permute=False)
    assert read_all(tmp_path / "out")["number"].tolist() == [*range(31), 0, 1, 2]


def test_ragged_fields_of_several_files_are_joined(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(2):
        save_attributed(folder / f"{number}.h5", 30)
    convert_to_slabs(folder, tmp_path / "out", num_slabs=3, permute=False)
    found = [
        s.tolist()
        for b in loader_of(tmp_path / "out", 7, shuffle="none", as_numpy=True)
        for s in b["tokens"]
    ]
    assert found == [tokens_of(number % 30).tolist() for number in range(60)]


@pytest.mark.parametrize("compress", [None, "gzip"])
@pytest.mark.parametrize("kind", ["h5", "npz"])
def test_a_field_without_bytes_is_converted_like_others(tmp_path, kind, compress):
    arrays = {"number": np.arange(41), "none": np.zeros((41, 37, 0), np.float32)}
    source = tmp_path / f"a.{kind}"
    write_hdf5(source, arrays) if kind == "h5" else np.savez(source, **arrays)
    convert_to_slabs(source, tmp_path / "out", num_slabs=3, compress=compress)
    assert not list(find_damage(open_map(tmp_path / "out")))
    for options in ({}, {"verify": True}):
        found = read_all(tmp_path / "out", **options)
        assert sorted(found["number"]) == list(range(41))
        assert found["none"].shape == (41, 37, 0)
        assert found["none"].dtype == np.float32
    with h5py.File(tmp_path / "out" / "index.h5") as file:
        assert file["none"].shape == (41, 37, 0)


class Bar:
    """Stands in for the progress bar."""

    made: ClassVar[list] = []

    def __init__(self, total, title, *, show):
        self.total, self.done = total, 0
        self.made.append(self)

    def __enter__(self):
        return self.advance

    def __exit__(self, *_):
        pass

    def advance(self, count):
        assert count >= 0
        self.done += count


@pytest.mark.parametrize("permute", [True, False])
def test_the_bar_of_a_conversion_counts_the_bytes_of_the_data_once(tmp_path, monkeypatch, permute):
    monkeypatch.setattr(conversion, "Progress", Bar)
    monkeypatch.setattr(Bar, "made", [])
    folder = save_parts(tmp_path / "parts")
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for name, array in arrays_of(31).items():
            layout = h5py.VirtualLayout(array.shape, array.dtype)
            row = 0
            for part in sorted(folder.iterdir()):
                with h5py.File(part) as inner:
                    rows = len(inner[name])
                    layout[row : row + rows] = h5py.VirtualSource(inner[name])
                    row += rows
            file.create_virtual_dataset(name, layout)
    convert_to_slabs(tmp_path / "all.h5", tmp_path / "out", permute=permute, progress=True)
    (bar,) = Bar.made
    assert bar.total == bar.done == sum(array.nbytes for array in arrays_of(31).values())
