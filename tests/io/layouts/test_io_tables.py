"""Tables of HDF5 files, as PyTables and pandas write them: each column of numbers is a field."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map

from hdf5_samples import collect
from hsgd.errors import DataError
from loaders import loader_of

__all__: list[str] = []

ROWS = 50
TYPE = np.dtype(
    [
        ("id", "<i8"),
        ("name", "S5"),
        ("pos", ">f4", (3,)),
        ("flag", "?"),
        ("wave", "c8"),
        ("inner", [("a", "i4")]),
        ("a/b", "i4"),
    ]
)
COLUMNS = ["id", "pos", "flag", "wave"]
LEFT_OUT = "a column of another type than numbers"


def table(shape=(ROWS,)):
    rows = np.zeros(shape, TYPE)
    numbers = np.arange(rows.size).reshape(shape)
    rows["id"], rows["flag"], rows["wave"] = numbers, numbers % 3 == 0, numbers * 1j
    rows["pos"] = numbers[..., None] + np.arange(3)
    return rows


def save(path, **stored):
    with h5py.File(path, "w") as file:
        file.create_dataset("data/table", data=table(), **stored)
    return path


def check_rows(found, prefix="data/table/", wanted=None):
    order = np.argsort(found[f"{prefix}id"], axis=0)
    wanted = table() if wanted is None else wanted
    for name in COLUMNS:
        np.testing.assert_array_equal(found[f"{prefix}{name}"][order], wanted[name])


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("shuffle", ["none", "block", "full"])
@pytest.mark.parametrize("stored", [{}, {"chunks": (7,)}, {"chunks": (7,), "compression": "gzip"}])
def test_columns_are_fields(tmp_path, stored, shuffle):
    path = save(tmp_path / "a.h5", **stored)
    for ranks in (1, 3):
        batches = []
        for rank in range(ranks):
            options = {"shuffle": shuffle, "pad": False, "as_numpy": True}
            batches += loader_of(path, 7, rank, ranks, fields=None, **options)
        check_rows(collect(batches))


def test_info_names_columns_and_what_is_left_out(tmp_path, hsgd_data):
    path = save(tmp_path / "a.h5")
    found = open_map(path)
    assert [(spec.name, spec.shape, spec.dtype.str) for spec in found.fields] == [
        ("data/table/id", (), "<i8"),
        ("data/table/pos", (3,), "<f4"),
        ("data/table/flag", (), "|b1"),
        ("data/table/wave", (), "<c8"),
    ]
    assert set(found.read_by().values()) == {"h5py: a column of a table"}
    names = ("name", "inner", "a/b")
    assert dict(found.left_out) == {f"data/table/{name}": LEFT_OUT for name in names}
    code, shown, _ = hsgd_data("info", path)
    assert code == 0 and f"no field: data/table/name ({LEFT_OUT})" in shown
    assert open_map(path, group="data").fields[0].name == "table/id"
    assert [spec.name for spec in open_map(path, ["data/table/pos"]).fields] == ["data/table/pos"]


def test_tables_are_converted(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["data/table"].attrs["TITLE"] = "events"
        file["data/table"].attrs["class_names"] = ["no", "label"]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        convert_to_slabs(path, tmp_path / "out")
    check_rows(collect(loader_of(tmp_path / "out", 7, as_numpy=True, verify=True)))
    with h5py.File(tmp_path / "out/index.h5") as file:
        assert file["data/table"].attrs["TITLE"] == "events"


def test_a_table_beside_fields_of_variable_length_is_converted(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        tokens = file.create_dataset("tokens", (ROWS,), h5py.vlen_dtype(np.int32))
        for row in range(ROWS):
            tokens[row] = np.full(row % 4, row)
    names = ["tokens", "data/table/id", "data/table/pos"]
    convert_to_slabs(path, tmp_path / "out", fields=names)
    for batch in loader_of(tmp_path / "out", 7, as_numpy=True):
        for row, number in enumerate(batch["data/table/id"].tolist()):
            assert batch["tokens"][row].tolist() == [number] * (number % 4)
            assert batch["data/table/pos"][row].tolist() == [number, number + 1, number + 2]


@pytest.mark.filterwarnings("ignore:.*left out")
def test_tables_of_several_axes_and_columns_through_links(tmp_path):
    rows = table((10, 4))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["t"] = rows
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["soft"], file["here"] = h5py.SoftLink("/here"), rows
        file["there"] = h5py.ExternalLink("other.h5", "t")
    found = collect(loader_of(tmp_path / "a.h5", 3, shuffle="none", as_numpy=True))
    assert found["here/pos"].shape == (10, 4, 3)
    for home in ("soft", "here", "there"):
        for name in COLUMNS:
            np.testing.assert_array_equal(found[f"{home}/{name}"], rows[name])


def test_a_table_without_numbers_and_a_field_that_is_none_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["words"] = np.zeros(3, [("a", "S4"), ("b", "S4")])
    with pytest.raises(DataError, match="field 'words' has type"):
        open_map(tmp_path / "a.h5")
    path = save(tmp_path / "b.h5")
    for name in ("data/table/name", "data/table/nothing", "data/table"):
        with pytest.raises(ValueError, match=rf"no field {name}.*data/table/id \(50,\)"):
            open_map(path, [name])


def test_rows_that_nobody_wrote_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("t", (20,), TYPE, chunks=(5,))[:5] = table()[:5]
    with pytest.raises(DataError, match="'t/id': 3 of 4 chunks were never written"):
        loader_of(tmp_path / "a.h5", 5)
