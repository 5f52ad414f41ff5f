"""Odd but sound HDF5 files, each a kind of file that was once read wrong or refused wrongly."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs

from hdf5_samples import collect, write_hdf5
from hsgd.errors import DataError
from loaders import loader_of

__all__: list[str] = []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.h5"


def read(path: Path, name: str = "x", **options: object) -> list[object]:
    loader = loader_of(path, 3, shuffle="none", as_numpy=True, **options)
    return collect(loader)[name].tolist()


def test_slabs_of_big_endian_numbers_beside_ragged_rows_pass_their_checksums(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4, dtype=">f8")
        ragged = file.create_dataset("ragged", (4,), h5py.vlen_dtype(np.int32))
        ragged[0] = [7]
    convert_to_slabs(path, path.parent / "slabs", permute=False)
    assert read(path.parent / "slabs", fields=["x"], verify=True) == [0, 1, 2, 3]


def test_a_name_that_is_not_utf8_is_left_out(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4)
        file.create_dataset(b"gr\xf6\xdfe", data=np.arange(3))
    with pytest.warns(UserWarning, match=r"left out: .*gr\\.*xf6.*its name is not UTF-8"):
        assert read(path) == [0, 1, 2, 3]


def test_a_name_with_a_line_break_stays_in_one_line(path: Path) -> None:
    write_hdf5(path, {"a\nb\x1b[1m": np.zeros(3), "x": np.zeros(2)})
    with pytest.raises(DataError) as caught:
        read(path)
    assert r"a\nb\x1b[1m (3,), x (2,)" in str(caught.value)


def test_bit_fields_in_another_byte_order_are_read(path: Path) -> None:
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (3,), h5py.Datatype(h5py.h5t.STD_B16BE))
        made[...] = np.array([1, 2, 770], ">u2")
    assert read(path) == [1, 2, 770]


def test_chunks_that_two_filters_compressed_are_read(path: Path) -> None:
    zstd = pytest.importorskip("hdf5plugin").Zstd()
    with h5py.File(path, "w") as file:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_deflate(1)
        create.set_filter(zstd.filter_id, h5py.h5z.FLAG_OPTIONAL, tuple(zstd.filter_options))
        file.create_dataset("x", data=np.arange(99), chunks=(50,), dcpl=create)
    assert read(path) == list(range(99))


def test_rows_that_were_never_written_behind_a_user_block_are_refused(path: Path) -> None:
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("x", (3,), "i4")
    with pytest.raises(DataError, match="none of 3 rows was ever written"):
        read(path)


def test_a_group_whose_only_field_is_refused_says_why(path: Path) -> None:
    layout = h5py.VirtualLayout((3,), "i4", maxshape=(None,))
    endless = h5py.VirtualSource("absent.h5", "x", (3,), maxshape=(None,))
    layout[: h5py.h5s.UNLIMITED] = endless[: h5py.h5s.UNLIMITED]
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("train/x", layout)
    with pytest.raises(DataError, match=r"/train/x takes rows from .*absent\.h5.*missing"):
        read(path, group="train")


def test_references_are_called_so(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (3,), h5py.ref_dtype)
    with pytest.raises(DataError, match="field 'x' has references"):
        read(path, fill_unwritten=True)


@pytest.mark.parametrize("kind", [h5py.h5t.UNIX_D32LE, h5py.h5t.IEEE_F128LE])
def test_types_that_numpy_lacks_are_refused_by_field(path: Path, kind: h5py.h5t.TypeID) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4)
        h5py.h5d.create(file.id, b"odd", kind, h5py.h5s.create_simple((4,)))
    with pytest.raises(DataError, match=r"field 'odd': .*; name other fields"):
        read(path)
    with pytest.raises(DataError, match=r"field 'odd': .*; name other fields"):
        convert_to_slabs(path, path.parent / "slabs")


def test_an_attribute_of_a_type_that_numpy_lacks_does_no_harm(path: Path) -> None:
    write_hdf5(path, {"x": np.arange(4)})
    with h5py.File(path, "r+") as file:
        scalar = h5py.h5s.create(h5py.h5s.SCALAR)
        h5py.h5a.create(file["x"].id, b"missing_value", h5py.h5t.UNIX_D32LE, scalar)
    with pytest.warns(UserWarning, match="'x' is packed"):
        assert read(path) == [0, 1, 2, 3]


def test_a_source_without_its_own_source_is_named_with_the_file_that_is_read(path: Path) -> None:
    inner, absent = path.parent / "inner.h5", path.parent / "absent.h5"
    for place, source in ((inner, absent), (path, inner)):
        layout = h5py.VirtualLayout((4,), "i4")
        layout[:] = h5py.VirtualSource(source, "x", (4,))
        with h5py.File(place, "w") as file:
            file.create_virtual_dataset("x", layout)
    with pytest.raises(DataError, match=rf"{path}: /x: {inner}: /x takes .* {absent}, .*missing"):
        read(path)
