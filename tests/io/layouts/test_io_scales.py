"""Dimension scales, as netCDF-4 has them: coordinates of axes, not samples."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map

from hdf5_samples import collect
from loaders import loader_of

__all__: list[str] = []


@pytest.fixture
def path(tmp_path):
    """As netCDF-4 writes it: temp(time, lat, lon), and a scale for each dimension."""
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["temp"] = np.arange(5 * 3 * 4, dtype=np.float32).reshape(5, 3, 4)
        for axis, (name, size) in enumerate({"time": 5, "lat": 3, "lon": 4}.items()):
            file[f"axes/{name}"] = np.arange(size, dtype=np.float64)
            file[f"axes/{name}"].make_scale(name)
            file["temp"].dims[axis].attach_scale(file[f"axes/{name}"])
    return tmp_path / "a.nc"


def test_scales_are_no_fields_and_are_named(path, tmp_path):
    assert [spec.name for spec in open_map(path).fields] == ["temp"]
    names = ("axes/lat", "axes/lon", "axes/time")
    assert dict(open_map(path).left_out) == dict.fromkeys(names, "a dimension scale")
    with pytest.warns(UserWarning, match="'axes/time' .a dimension scale."):
        found = collect(loader_of(path, 2, shuffle="none", as_numpy=True))
    assert found["temp"].shape == (5, 3, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_to_slabs(path, tmp_path / "out")
    assert any("'axes/lat' (a dimension scale)" in str(warning.message) for warning in caught)


def test_scales_that_are_named_or_alone_are_read(path):
    found = collect(loader_of(path, 2, shuffle="none", as_numpy=True, fields=["temp", "axes/time"]))
    assert found["axes/time"].tolist() == [0, 1, 2, 3, 4]
    with h5py.File(path, "r+") as file:
        for name in ("temp", "axes/lat", "axes/lon"):
            del file[name]
    assert [spec.name for spec in open_map(path).fields] == ["axes/time"]
    assert open_map(path).left_out == {}


def test_a_table_that_is_a_scale_is_left_out_by_its_columns(path):
    with h5py.File(path, "r+") as file:
        file["t"] = np.zeros(5, [("a", "i4"), ("b", "i4")])
        file["t"].make_scale("t")
    assert [spec.name for spec in open_map(path).fields] == ["temp"]
    assert {"t/a", "t/b"} < {*open_map(path).left_out}
