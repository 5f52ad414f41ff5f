"""Examining files, and reading rows: around HDF5 where that is safe, refusing what is broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hsgd.io import RowReader, open_map
from hsgd.io.reading import row_reader as reading
from hsgd.io.reading import slab_files as filing

from hdf5_samples import arrays_of, make_slabs, rewrite_attribute, write_hdf5
from hsgd.errors import DataError


def read_rows(data, name, start, count):
    (spec,) = [spec for spec in data.fields if spec.name == name]
    out = np.empty((count, *spec.shape), spec.dtype)
    with RowReader(data) as reader:
        reader.read(name, start, out)
    return out


def save(path, dtype):
    return write_hdf5(path, {"x": (np.arange(60) % 100).reshape(20, 3).astype(dtype)})


@pytest.mark.parametrize(
    "dtype",
    [
        "u1",
        "i1",
        "<i2",
        ">i2",
        "<u4",
        ">u4",
        "<i8",
        ">i8",
        "<f2",
        ">f2",
        "<f4",
        ">f4",
        "<f8",
        ">f8",
        "?",
    ],
)
def test_plain_types_are_read_around_hdf5_and_come_in_native_order(tmp_path, dtype):
    data = open_map(save(tmp_path / "a.h5", dtype))
    assert data.refusals() == {"x": ""}
    found = read_rows(data, "x", 3, 11)
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, (np.arange(60) % 100).reshape(20, 3)[3:14].astype(dtype))


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_are_read_by_h5py(tmp_path, dtype):
    data = open_map(save(tmp_path / "a.h5", dtype))
    assert "form of its own" in data.refusals()["x"]
    assert read_rows(data, "x", 19, 1).tolist() == [[57, 58, 59]]


def unallocated(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (20,), "i4", fillvalue=7)
    return np.full(20, 7)


def chunked(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(20), chunks=(3,), scaleoffset=0)
    return np.arange(20)


def compact(path):
    with h5py.File(path, "w") as file:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((20,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT64, space, create)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(20))
    return np.arange(20)


def external(path):
    np.arange(20).tofile(path.with_suffix(".raw"))
    with h5py.File(path, "w") as file:
        storage = [(str(path.with_suffix(".raw")), 0, 160)]
        file.create_dataset("x", (20,), "i8", external=storage)
    return np.arange(20)


def enumeration(path):
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "x", data=np.arange(20) % 2, dtype=h5py.enum_dtype({"A": 0, "B": 1}, "i4")
        )
    return np.arange(20) % 2


def virtual(path):
    write_hdf5(path.with_suffix(".part.h5"), {"y": np.arange(20, dtype="i4")})
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((20,), "i8")
        layout[:] = h5py.VirtualSource(path.with_suffix(".part.h5").name, "y", (20,), "i4")
        file.create_virtual_dataset("x", layout)
    return np.arange(20)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (unallocated, "no space allocated"),
        (chunked, r"filters (6,), only these are known: gzip, shuffle"),
        (compact, "compact layout"),
        (external, "external files"),
        (enumeration, "form of its own"),
        (virtual, "virtual dataset"),
    ],
)
def test_what_the_checklist_excludes_is_read_by_h5py_with_the_reason(tmp_path, make, reason):
    expected = make(tmp_path / "a.h5")
    data = open_map(tmp_path / "a.h5")
    assert reason in data.refusals()["x"]
    np.testing.assert_array_equal(read_rows(data, "x", 0, 20), expected)
    np.testing.assert_array_equal(read_rows(data, "x", 7, 6), expected[7:13])


@pytest.mark.parametrize("stored", [{}, {"chunks": (7,)}, {"chunks": (7,), "compression": "gzip"}])
def test_a_user_block_before_the_file_is_skipped(tmp_path, stored):
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        file.create_dataset("x", data=np.arange(20), **stored)
    data = open_map(tmp_path / "a.h5")
    assert data.read_by()["x"].startswith("preadv")
    np.testing.assert_array_equal(read_rows(data, "x", 7, 6), np.arange(7, 13))


def test_a_virtual_dataset_with_a_missing_part_is_refused(tmp_path):
    virtual(tmp_path / "a.h5")
    (tmp_path / "a.part.h5").unlink()
    with pytest.raises(DataError, match=r"a\.part\.h5, which is missing"):
        open_map(tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["one", "two"], "variable-length or text"),
        (np.array([b"ab", b"cd"]), "variable-length or text"),
        (np.zeros(2, [("a", "S4"), ("b", "S2")]), "only numbers and bool"),
    ],
)
def test_fields_that_cannot_become_tensors_are_refused_by_name(tmp_path, values, kind):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["odd"] = values
        file["x"] = np.arange(2)
    with pytest.raises(DataError, match=f"'odd' has .*{kind}|'odd'.*{kind}"):
        open_map(tmp_path / "a.h5", ["odd", "x"])
    assert read_rows(open_map(tmp_path / "a.h5", ["x"]), "x", 0, 2).tolist() == [0, 1]


def test_text_beside_numbers_is_left_out_by_name(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["odd"] = ["one", "two"]
        file["x"] = np.arange(2)
    assert open_map(tmp_path / "a.h5").left_out == {"odd": "it holds text"}


def test_ragged_fields_are_refused_by_name(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        ragged = file.create_dataset("ragged", (2,), h5py.vlen_dtype(np.int32))
        ragged[0], ragged[1] = [1], [2, 3]
    with pytest.raises(DataError, match="'ragged' has a variable-length"):
        open_map(tmp_path / "a.h5")


def test_reads_cross_slabs_and_open_files_stay_few(tmp_path, monkeypatch):
    monkeypatch.setattr(filing, "_OPEN_FILES", 2)
    data = open_map(make_slabs(tmp_path / "out", 101, 11, permute=False))
    expected = arrays_of(101)
    with RowReader(data) as reader:
        for start, count in ((0, 101), (9, 1), (95, 6), (8, 3), (50, 0)):
            out = np.empty((count, 2, 3), np.float32)
            reader.read("image", start, out)
            np.testing.assert_array_equal(out, expected["image"][start : start + count])
            assert len(reader._files._files) <= 2


def test_reads_are_cut_into_calls_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_READ_BYTES", 64)
    data = open_map(save(tmp_path / "a.h5", "f8"))
    assert read_rows(data, "x", 0, 20).ravel().tolist() == list(range(60))


def test_descriptors_are_closed_on_exec_and_by_close(tmp_path):
    chunked(tmp_path / "a.h5")
    write_hdf5(tmp_path / "b.h5", {"x": np.arange(20)})
    for name in ("a.h5", "b.h5"):
        data = open_map(tmp_path / name)
        reader = RowReader(data)
        reader.read("x", 0, np.empty(20, np.int64))
        (path,) = [slab.path for slab in data.slabs]
        links = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        mine = [int(fd) for fd, target in links.items() if target == path]
        assert mine
        assert not any(os.get_inheritable(fd) for fd in mine)
        reader.close()
        assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in mine)


def remove_slab(folder):
    (folder / "slab-00002.h5").unlink()


def truncate_slab(folder):
    path = folder / "slab-00002.h5"
    os.truncate(path, path.stat().st_size - 100)


def cut_to_nothing(folder):
    os.truncate(folder / "slab-00002.h5", 0)


def foreign_slab(folder):
    (folder / "slab-00002.h5").unlink()
    write_hdf5(folder / "slab-00002.h5", arrays_of(14))


def text_slab(folder):
    (folder / "slab-00002.h5").write_text("hello\n" * 1000)


def unsealed_slab(folder):
    rewrite_attribute(folder / "slab-00002.h5", "sealed", np.uint8(0))


def unsealed_index(folder):
    rewrite_attribute(folder / "index.h5", "sealed", np.uint8(0))


def slab_of_another_dataset(folder):
    other = make_slabs(folder.parent / "other", 101, 7)
    shutil.copy(other / "slab-00002.h5", folder)


def swapped_slabs(folder):
    shutil.copy(folder / "slab-00001.h5", folder / "slab-00002.h5")


def other_count(folder):
    rewrite_attribute(folder / "slab-00002.h5", "num_samples", np.int64(13))


def future_version(folder):
    rewrite_attribute(folder / "index.h5", "format_version", np.int64(99))


def missing_attribute(folder):
    with h5py.File(folder / "slab-00002.h5", "r+") as file:
        del file.attrs["global_start"]


def missing_field(folder):
    with h5py.File(folder / "slab-00002.h5", "r+") as file:
        del file["image"]


def other_shape(folder):
    with h5py.File(folder / "slab-00002.h5", "r+") as file:
        rows = len(file["image"])
        del file["image"]
        file["image"] = np.zeros((rows, 5), np.float32)
        file["image"].attrs["crc32c"] = np.zeros(1, np.uint32)


def foreign_index(folder):
    (folder / "index.h5").unlink()
    write_hdf5(folder / "index.h5", arrays_of(101))


def no_index(folder):
    (folder / "index.h5").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_slab, r"slab-00002\.h5: slab 2 of 7 is missing"),
        (truncate_slab, r"slab-00002\.h5: truncated, bytes \[\d+, \d+\) are missing"),
        (cut_to_nothing, r"slab-00002\.h5: not an HDF5 file"),
        (foreign_slab, r"slab-00002\.h5: foreign file"),
        (text_slab, r"slab-00002\.h5: not an HDF5 file"),
        (unsealed_slab, r"slab-00002\.h5: not sealed"),
        (unsealed_index, r"index\.h5: not sealed"),
        (slab_of_another_dataset, r"slab-00002\.h5: slab of another dataset"),
        (swapped_slabs, r"slab-00002\.h5: says .*\(1, 7, 14\), expected \(2, 7, 28\)"),
        (other_count, r"slab-00002\.h5: 15 samples, its header says 13; restore slab 2"),
        (future_version, r"index\.h5: format_version 99, this hsgd reads 2"),
        (missing_attribute, r"slab-00002\.h5: attribute global_start is missing"),
        (missing_field, r"slab-00002\.h5: damaged"),
        (other_shape, r"slab-00002\.h5: fields differ"),
        (foreign_index, r"index\.h5: not written by hsgd"),
        (no_index, r"no slab folder, index\.h5 is missing"),
    ],
)
def test_a_spoiled_folder_is_refused_in_one_line_naming_the_file(tmp_path, spoil, message):
    folder = make_slabs(tmp_path / "out", 101, 7)
    spoil(folder)
    with pytest.raises(DataError, match=message) as caught:
        open_map(folder)
    assert "\n" not in str(caught.value)


def test_a_single_unsealed_slab_is_refused_and_a_sealed_one_is_an_hdf5_file(tmp_path):
    folder = make_slabs(tmp_path / "out", 101, 7)
    assert open_map(folder / "slab-00002.h5").num_samples == 15
    unsealed_slab(folder)
    with pytest.raises(DataError, match="not sealed"):
        open_map(folder / "slab-00002.h5")


def test_the_index_file_stands_for_its_folder(tmp_path):
    folder = make_slabs(tmp_path / "out", 101, 7)
    assert open_map(folder / "index.h5") == open_map(folder)


def test_a_folder_of_slab_folders_says_what_it_holds(tmp_path):
    (tmp_path / "a").mkdir()
    make_slabs(tmp_path / "a" / "train", 9, 2)
    with pytest.raises(DataError, match="it holds train"):
        open_map(tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"just text\n", b"\x89HDF\r\n\x1a\n" + bytes(100)])
def test_a_file_that_is_no_hdf5_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.h5: (not an HDF5 file|cannot be opened)") as caught:
        open_map(tmp_path / "a.h5")
    assert "\n" not in str(caught.value)


def test_a_truncated_plain_file_names_the_bytes(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.arange(10_000)})
    size = path.stat().st_size
    os.truncate(path, size - 8000)
    with pytest.raises(DataError, match=rf"truncated, bytes \[{size - 8000}, {size}\) are missing"):
        open_map(path)


@pytest.mark.parametrize("make", [compact, lambda path: save(path, "i8")])
def test_a_file_that_changes_after_it_was_examined_is_refused(tmp_path, make):
    make(tmp_path / "a.h5")
    data = open_map(tmp_path / "a.h5")
    with RowReader(data) as reader:
        out = np.empty((2, *data.fields[0].shape), np.int64)
        reader.read("x", 0, out)
        status = (tmp_path / "a.h5").stat()
        os.utime(tmp_path / "a.h5", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        with pytest.raises(DataError, match=r"a\.h5: changed since it was opened"):
            reader.read("x", 0, out)


def test_a_file_that_shrinks_after_it_was_examined_names_the_bytes(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.arange(10_000)})
    data, size = open_map(path), path.stat().st_size
    os.truncate(path, 4096)
    with pytest.raises(DataError, match=rf"truncated since it was opened, bytes \[4096, {size}\)"):
        read_rows(data, "x", 0, 10_000)


def test_a_replaced_file_is_refused(tmp_path):
    save(tmp_path / "a.h5", "i8")
    data = open_map(tmp_path / "a.h5")
    save(tmp_path / "b.h5", "i8")
    os.replace(tmp_path / "b.h5", tmp_path / "a.h5")
    with pytest.raises(DataError, match="changed since it was opened"):
        read_rows(data, "x", 0, 20)


def test_a_removed_file_is_refused(tmp_path):
    save(tmp_path / "a.h5", "i8")
    data = open_map(tmp_path / "a.h5")
    (tmp_path / "a.h5").unlink()
    with pytest.raises(DataError, match="cannot be opened: No such file"):
        read_rows(data, "x", 0, 20)


def test_unknown_fields_are_listed(tmp_path):
    with pytest.raises(ValueError, match=r"no field y; there are: x \(20, 3\)"):
        open_map(save(tmp_path / "a.h5", "i8"), ["y"])


def test_fields_given_as_one_string_are_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="list of names"):
        open_map(save(tmp_path / "a.h5", "i8"), "x")


FLIP_BITS = """\
import random, sys
from hsgd.errors import DataError
from hsgd.io import open_map

folder = sys.argv[1]
good = open_map(folder)
starts = [extent.offset for extent in good.slabs[2].extents.values()]
draw = random.Random(0)
for name, end in (("slab-00002.h5", min(starts)), ("index.h5", None)):
    path = f"{folder}/{name}"
    with open(path, "rb") as file:
        original = file.read()
    places = [place for place, byte in enumerate(original[:end]) if byte]
    for place in draw.sample(places, 40):
        damaged = bytearray(original)
        damaged[place] ^= 1 << draw.randrange(8)
        with open(path, "wb") as file:
            file.write(damaged)
        try:
            found = open_map(folder)
        except (DataError, ValueError) as error:
            assert len(str(error).splitlines()) == 1, error
        else:
            assert (found.fields, found.slab_counts) == (good.fields, good.slab_counts), place
    with open(path, "wb") as file:
        file.write(original)
print("done")
"""


def test_flipped_bits_in_metadata_are_refused_or_harmless_and_never_crash(tmp_path):
    folder = make_slabs(tmp_path / "out", 101, 7)
    command = [sys.executable, "-c", FLIP_BITS, str(folder)]
    done = subprocess.run(
        command, cwd=tmp_path, timeout=120, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
