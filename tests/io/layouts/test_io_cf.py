"""decode="cf": the values that netCDF's packed ones stand for."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest
from hsgd.io import Ragged, convert_to_slabs

from hdf5_samples import collect
from loaders import loader_of

__all__: list[str] = []

STORED = np.array([[0, 1], [-32768, 7], [100, -1]], np.int16)


def save(path, attributes, values=STORED):
    with h5py.File(path, "w") as file:
        file["t2m"], file["number"] = values, np.arange(len(values))
        for key, value in attributes.items():
            file["t2m"].attrs[key] = value
    return path


def read(path, **options):
    """Read in order; nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"shuffle": "none", "as_numpy": True, "decode": "cf", **options}
        return collect(loader_of(path, 2, **options))


@pytest.mark.parametrize(
    ("attributes", "stored", "wanted"),
    [
        ({"scale_factor": 0.5}, STORED, np.float32(STORED * 0.5)),
        ({"scale_factor": np.float32(2), "add_offset": 3.0}, STORED, STORED * 2.0 + 3),
        ({"_FillValue": np.int16(-32768)}, STORED, np.where(STORED == -32768, np.nan, STORED)),
        (
            {"_FillValue": np.int16(7), "missing_value": np.array([0, 100], np.int16)},
            STORED,
            np.float32([[np.nan, 1], [-32768, np.nan], [np.nan, -1]]),
        ),
        ({"_Unsigned": "true"}, np.int8([[1], [-1]]), np.float32([[1], [255]])),
        (
            {"_Unsigned": np.bytes_("true"), "_FillValue": np.int8(-1)},
            np.int8([[1], [-1]]),
            np.float32([[1], [np.nan]]),
        ),
        (
            {"_Unsigned": "true", "_FillValue": np.int16(255)},
            np.int8([[1], [-1]]),
            np.float32([[1], [np.nan]]),
        ),
        ({"missing_value": -1e30}, np.float32([[1], [-1e30]]), np.float32([[1], [np.nan]])),
        ({"scale_factor": 0.1}, np.int32([[3], [4]]), np.array([[3], [4]]) * 0.1),
        ({"missing_value": 9999.0, "scale_factor": 2.0}, np.int8([[1]]), np.float32([[2]])),
        ({"missing_value": np.inf}, np.int16([[1]]), np.float32([[1]])),
        ({"missing_value": [np.nan, 5.0]}, np.int16([[1], [5]]), np.float32([[1], [np.nan]])),
        ({"missing_value": 1e30}, np.float16([[1], [np.inf]]), np.float32([[1], [np.inf]])),
        ({"scale_factor": np.nan}, np.int16([[1]]), np.float32([[np.nan]])),
    ],
)
def test_values_are_those_that_are_meant(tmp_path, attributes, stored, wanted):
    found = read(save(tmp_path / "a.h5", attributes, stored))
    if "_FillValue" in attributes and stored.itemsize <= 2:
        wanted = wanted.astype(np.float32)
    assert found["t2m"].dtype == wanted.dtype
    np.testing.assert_array_equal(found["t2m"], wanted)
    assert found["number"].dtype == np.int64


def test_tensors_and_a_transform_after_it(tmp_path):
    torch = pytest.importorskip("torch")
    path = save(tmp_path / "a.h5", {"scale_factor": 0.5, "_FillValue": np.int16(100)})
    options = {"shuffle": "none", "decode": "cf", "transform_threads": 2}
    batches = list(loader_of(path, 2, transform=lambda batch: batch["t2m"] + 1, **options))
    assert batches[0].dtype == torch.float32
    assert torch.cat(batches)[:2].tolist() == [[1, 1.5], [-16383, 4.5]]
    assert torch.cat(batches)[2].isnan().tolist() == [True, False]


def test_fields_are_as_they_are_delivered(tmp_path):
    path = save(tmp_path / "a.h5", {"scale_factor": 0.5})
    found = {spec.name: spec.dtype for spec in loader_of(path, 2, decode="cf").fields}
    assert found == {"t2m": np.float32, "number": np.int64}


def test_attributes_of_a_table_hold_for_its_columns(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = np.array([(1, 2.0), (3, 4.0)], [("a", "i2"), ("b", "f4")])
        file["t"].attrs["scale_factor"] = 0.5
    found = read(tmp_path / "a.h5")
    assert (found["t/a"].tolist(), found["t/b"].tolist()) == ([0.5, 1.5], [1.0, 2.0])


def test_slabs_and_ragged_fields_keep_it(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset("x", (3,), h5py.vlen_dtype(np.int16))
        for row in range(3):
            rows[row] = np.arange(row)
        rows.attrs["scale_factor"] = 0.5
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        convert_to_slabs(tmp_path / "a.h5", tmp_path / "out", permute=False)
    options = {"shuffle": "none", "as_numpy": True, "decode": "cf"}
    found = [batch["x"] for batch in loader_of(tmp_path / "out", 2, **options)]
    assert all(isinstance(each, Ragged) for each in found)
    assert [row.tolist() for each in found for row in each] == [[], [0.0], [0.0, 0.5]]


@pytest.mark.parametrize(
    "attributes", [{"ScaleFactor": 0.5}, {"scale_factor": [0.5, 2.0]}, {"_FillValue": "none"}]
)
def test_attributes_that_cf_does_not_define_are_refused(tmp_path, attributes):
    path = save(tmp_path / "a.h5", attributes)
    name = next(iter(attributes))
    with pytest.raises(ValueError, match=rf"field 't2m' \(int16\) has {name}.*leave out decode="):
        loader_of(path, 2, decode="cf")
    assert len(read(path, fields=["number"])["number"]) == 3


def test_another_word_is_refused(tmp_path):
    with pytest.raises(ValueError, match="decode='netcdf'; use \"cf\""):
        loader_of(save(tmp_path / "a.h5", {}), 2, decode="netcdf")
