"""Names inside a file that a terminal would obey, or that make lines, are shown with escapes."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hsgd.io import open_map
from hsgd.io.reading.row_reader import RowReader

from hsgd.errors import DataError
from loaders import loader_of

__all__: list[str] = []

NAME = "a\x1b[2J\nb\r\u202e"
SHOWN = r"a\x1b[2J\nb\r\u202e"


@pytest.fixture
def path(tmp_path):
    """A file with such a name for each thing that has one."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file[NAME] = np.arange(8)
        file[NAME].attrs["class_names"] = np.array([f"class {NAME}"] * 8, h5py.string_dtype())
        file["table"] = np.zeros(8, [(f"column {NAME}", "i4"), (f"text {NAME}", "S3")])
        file[f"single {NAME}"] = 5
        file[f"link {NAME}"] = h5py.SoftLink(f"/nowhere {NAME}")
    return tmp_path / "a.h5"


def test_info_shows_escapes(path, hsgd_data):
    code, out, err = hsgd_data("info", path)
    assert code == 0 and not err
    assert all(line.isprintable() for line in out.split("\n"))
    for what in ("class", "column", "text", "single", "link", "nowhere"):
        assert f"{what} {SHOWN}" in out


def test_convert_shows_escapes(path, tmp_path, hsgd_data):
    code, out, err = hsgd_data("convert", path, tmp_path / "copy")
    assert code == 0 and f"nowhere {SHOWN}" in err
    assert all(line.isprintable() for line in (out + err).split("\n"))


def test_warnings_and_errors_have_one_line(path):
    with pytest.warns(UserWarning, match="left out") as seen:
        loader_of(path, 4, 0, 1, as_numpy=True)
    assert all(str(each.message).isprintable() for each in seen)
    with pytest.raises(ValueError, match=r"a\.h5: no field x; there are: a\\x1b") as told:
        open_map(path, ["x"])
    assert str(told.value).isprintable()


def test_a_file_that_hdf5_cannot_close_is_an_error_of_one_line(
    path, tmp_path, monkeypatch, hsgd_data
):
    """HDF5 counts what is open, and raises when damage makes the counts wrong."""

    def close(file):
        raise RuntimeError("Can't decrement id ref count\n(more)")

    with monkeypatch.context() as patch:
        patch.setattr(h5py.File, "close", close)
        with pytest.raises(DataError, match=r"a\.h5: damaged: Can't decrement id ref count;"):
            open_map(path)
        code, _, err = hsgd_data("convert", path, tmp_path / "copy")
        assert code == 1 and len(err.splitlines()) == 1


def test_rows_are_read_though_their_file_cannot_be_closed(path, monkeypatch):
    name, close = f"table/column {NAME}", h5py.File.close

    def fail(file):
        close(file)
        raise RuntimeError("Can't decrement id ref count")

    data, rows = open_map(path, [name]), np.ones(8, "i4")
    monkeypatch.setattr(h5py.File, "close", fail)
    with RowReader(data) as reader:
        reader.read(name, 0, rows)
    assert not rows.any()
