"""Packed values, as netCDF has them: delivered as stored, and never without a word."""

from __future__ import annotations

import json
import warnings

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs

from hdf5_samples import collect
from hsgd.errors import DataError
from loaders import loader_of

PACKED = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-32768)}
TEXT = "scale_factor 0.01, add_offset 273.15, _FillValue -32768"


def save(path, attributes, name="t2m", **options):
    values = np.arange(40, dtype=np.int16).reshape(20, 2)
    with h5py.File(path, "w", **options) as file:
        file["number"] = np.arange(20)
        file[name] = values
        for key, value in attributes.items():
            file[name].attrs[key] = value
    return path


def warned(path, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = collect(loader_of(path, 7, shuffle="none", as_numpy=True, **options))
    return found, [str(warning.message) for warning in caught]


def test_the_loader_names_a_packed_field_once_and_gives_what_is_stored(tmp_path):
    path = save(tmp_path / "a.h5", PACKED)
    found, lines = warned(path)
    assert found["t2m"].dtype == np.int16
    assert found["t2m"].ravel().tolist() == list(range(40))
    assert len(lines) == 1
    assert f"{path}: field 't2m' is packed ({TEXT})" in lines[0]
    assert "as they are stored" in lines[0]
    assert warned(path, fields=["number"])[1] == []


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"add_offset": np.float32(2)}, "add_offset 2.0"),
        ({"scale_factor": np.array([0.5])}, "scale_factor 0.5"),
        ({"scale_factor": np.array([2], ">f8")}, "scale_factor 2.0"),
        ({"_FillValue": np.int16(-1)}, "_FillValue -1"),
        ({"missing_value": np.array([-1, -2], np.int16)}, "missing_value [-1, -2]"),
        ({"_Unsigned": np.bytes_("true")}, "_Unsigned true"),
        ({"_Unsigned": "true"}, "_Unsigned true"),
        ({"ScaleFactor": 0.1, "Offset": 0.0}, "ScaleFactor 0.1"),
        ({"MissingValue": np.float32(-2.0) ** 100}, "MissingValue 1.2676506002282294e+30"),
    ],
)
def test_each_attribute_that_changes_values_is_named(tmp_path, attributes, text):
    assert f"is packed ({text})" in warned(save(tmp_path / "a.h5", attributes))[1][0]


@pytest.mark.parametrize(
    "attributes",
    [
        {"units": "K", "valid_min": 3},
        {"scale_factor": 1.0, "add_offset": 0.0, "_FillValue": np.float32(np.nan)},
        {"_Unsigned": np.bytes_("false")},
    ],
)
def test_attributes_that_change_nothing_are_not(tmp_path, attributes):
    assert warned(save(tmp_path / "a.h5", attributes))[1] == []


def test_packing_of_a_group_and_of_dense_attributes_is_found(tmp_path):
    many = {f"note{n}": n for n in range(30)} | PACKED
    path = save(tmp_path / "a.h5", many, name="in/t2m", libver="latest")
    assert len(warned(path, fields=["number", "in/t2m"])[1]) == 1
    (line,) = warned(path, group="in")[1]
    assert f"field 't2m' is packed ({TEXT})" in line


def test_convert_says_that_it_applies_nothing_and_its_folder_is_packed_too(tmp_path, hsgd_data):
    path = save(tmp_path / "a.h5", PACKED)
    code, shown, err = hsgd_data("convert", path, tmp_path / "out")
    assert code == 0
    (line,) = [line for line in err.splitlines() if "warning" in line]
    assert f"field 't2m' is packed ({TEXT}): these are not applied" in line
    for text in (shown, hsgd_data("info", tmp_path / "out")[1], hsgd_data("info", path)[1]):
        assert f"packed: t2m ({TEXT})" in text
    found = json.loads(hsgd_data("info", tmp_path / "out", "--json")[1])
    assert found["packing"] == {
        "t2m": {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -32768}
    }
    assert f"({TEXT})" in warned(tmp_path / "out")[1][0]


def test_files_that_are_packed_differently_are_not_joined(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    save(parts / "a.h5", PACKED)
    save(parts / "b.h5", PACKED | {"scale_factor": 0.02})
    with pytest.raises(
        DataError, match=r"b\.h5: field 't2m' is packed with scale_factor 0\.02.*apart"
    ):
        convert_to_slabs(parts, tmp_path / "out")
    save(parts / "b.h5", {})
    with pytest.raises(DataError, match=r"'t2m' is packed with nothing, that of a\.h5 with scale"):
        convert_to_slabs(parts, tmp_path / "out")
    save(parts / "b.h5", PACKED)
    with pytest.warns(UserWarning, match="not applied"):
        convert_to_slabs(parts, tmp_path / "out")
