"""Files of MATLAB v7.3: HDF5 behind a user block, with MATLAB's dimensions in reverse."""

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


def save(path, **arrays):
    """Save arrays as MATLAB does: in its order of dimensions, compressed."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, values in arrays.items():
            stored = {"compression": "gzip", "chunks": (3, *values.T.shape[1:])}
            file.create_dataset(name, data=values.T, **stored)
            file[name].attrs["MATLAB_class"] = np.bytes_(b"double")
    return path


def test_the_last_dimension_of_matlab_is_that_of_samples(tmp_path, capsys):
    images = np.arange(4.0 * 5 * 12).reshape(4, 5, 12)
    path = save(tmp_path / "a.mat", images=images, labels=np.arange(12.0)[None])
    assert open_map(path).read_by() == dict.fromkeys(["images", "labels"], "preadv + gzip")
    with pytest.warns(UserWarning, match="MATLAB's dimensions come in reverse"):
        loader = loader_of(path, 5, shuffle="none", as_numpy=True)
    np.testing.assert_array_equal(collect(loader)["images"], images.T)
    assert main(["data", "info", str(path)]) == 0
    assert "layout: MATLAB's dimensions come in reverse" in capsys.readouterr().out


def test_a_matrix_with_samples_in_rows_is_refused_with_the_reason(tmp_path):
    path = save(tmp_path / "a.mat", x=np.zeros((12, 5)), y=np.zeros((12, 3)))
    with pytest.raises(DataError, match=r"first dimensions differ: .*MATLAB's dimensions"):
        open_map(path)
