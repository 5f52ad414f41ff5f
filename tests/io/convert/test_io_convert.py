"""Conversion: every kind of source becomes a slab folder, whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map
from hsgd.io.convert import convert_to_slabs as conversion
from hsgd.io.convert import shuffle_passes
from hsgd.io.convert.slab_folder_writer import ALIGNMENT_BYTES, SlabFolderWriter, _writing
from hsgd.io.format.ragged import ragged_of

from hdf5_samples import arrays_of, collect, make_slabs, write_hdf5
from hsgd.errors import DataError
from loaders import loader_of


def read_all(folder, **options):
    return collect(loader_of(folder, 7, shuffle="none", as_numpy=True, **options))


def assert_same_samples(found, wanted):
    """The same samples in any order; `number` says which is which."""
    assert sorted(found) == sorted(wanted)
    order = np.argsort(found["number"])
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name][order], array)


def save_npz(folder, arrays):
    np.savez(folder / "source.npz", **arrays)
    return folder / "source.npz"


def save_compressed_npz(folder, arrays):
    np.savez_compressed(folder / "source.npz", **arrays)
    return folder / "source.npz"


def save_npy_folder(folder, arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def save_npy_list(folder, arrays):
    save_npy_folder(folder, arrays)
    return ",".join(str(folder / f"{name}.npy") for name in arrays)


def save_hdf5(folder, arrays):
    return write_hdf5(folder / "source.h5", arrays)


def save_chunked_hdf5(folder, arrays):
    return write_hdf5(folder / "source.h5", arrays, chunks=True, compression="gzip")


def save_big_endian(folder, arrays):
    swapped = {name: a.astype(a.dtype.newbyteorder(">")) for name, a in arrays.items()}
    return write_hdf5(folder / "source.h5", swapped)


def save_big_endian_npz(folder, arrays):
    swapped = {name: a.astype(a.dtype.newbyteorder(">")) for name, a in arrays.items()}
    return save_npz(folder, swapped)


@pytest.mark.parametrize(
    "save",
    [
        save_npz,
        save_compressed_npz,
        save_npy_folder,
        save_npy_list,
        save_hdf5,
        save_chunked_hdf5,
        save_big_endian,
        save_big_endian_npz,
    ],
)
@pytest.mark.parametrize("permute", [True, False])
def test_every_source_comes_out_with_every_sample_once(tmp_path, save, permute):
    arrays = arrays_of(101)
    (tmp_path / "in").mkdir()
    source = save(tmp_path / "in", arrays)
    folders = convert_to_slabs(source, tmp_path / "out", num_slabs=7, permute=permute)
    assert folders == [tmp_path / "out"]
    found = read_all(tmp_path / "out")
    assert_same_samples(found, arrays)
    assert (found["number"].tolist() == list(range(101))) is not permute


def test_rows_larger_than_a_block_and_blocks_across_slabs_survive(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle_passes, "BLOCK_BYTES", 100)
    make_slabs(tmp_path / "out", 53, 11)
    assert_same_samples(read_all(tmp_path / "out"), arrays_of(53))


def test_a_slab_folder_can_be_converted_anew(tmp_path):
    make_slabs(tmp_path / "a", 30, 4, seed=1)
    convert_to_slabs(tmp_path / "a", tmp_path / "b", num_slabs=3, seed=2)
    assert_same_samples(read_all(tmp_path / "b"), arrays_of(30))


def test_one_array_becomes_the_field_data(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(20.0))
    convert_to_slabs(tmp_path / "x.npy", tmp_path / "out", permute=False)
    assert read_all(tmp_path / "out")["data"].tolist() == list(range(20))


def test_fields_can_be_chosen(tmp_path):
    source = write_hdf5(tmp_path / "a.h5", {**arrays_of(9), "other": np.zeros(4)})
    with pytest.raises(
        DataError, match=r"first dimensions differ: .*other \(4,\).*name the fields"
    ):
        convert_to_slabs(source, tmp_path / "out")
    convert_to_slabs(source, tmp_path / "out", fields=["number", "even"])
    assert sorted(read_all(tmp_path / "out")) == ["even", "number"]


def test_the_order_and_the_digest_depend_on_seed_and_content_alone(tmp_path):
    make_slabs(tmp_path / "a", 60, 3, seed=5)
    make_slabs(tmp_path / "b", 60, 8, seed=5)
    make_slabs(tmp_path / "c", 60, 3, seed=6)
    orders = [read_all(tmp_path / name)["number"].tolist() for name in "abc"]
    assert orders[0] == orders[1] != orders[2]
    headers = [open_map(tmp_path / name).header for name in "abc"]
    assert len({header.source_digest for header in headers}) == 1
    assert len({header.dataset_uuid for header in headers}) == 3
    assert [header.permutation_seed for header in headers] == [5, 5, 6]


def test_stock_h5py_reads_the_index_and_the_slabs_from_anywhere(tmp_path, monkeypatch):
    make_slabs(tmp_path / "out", 101, 7)
    found = read_all(tmp_path / "out")
    monkeypatch.chdir("/")
    with h5py.File(tmp_path / "out" / "index.h5") as index:
        for name in arrays_of(1):
            np.testing.assert_array_equal(index[name][()], found[name])
    with h5py.File(tmp_path / "out" / "slab-00003.h5") as slab:
        start = int(slab.attrs["global_start"])
        np.testing.assert_array_equal(
            slab["image"][()], found["image"][start:][: len(slab["image"])]
        )
        assert slab.attrs["sealed"] == 1
        assert slab.attrs["num_slabs"] == 7


def test_h5dump_reads_the_slabs_and_the_index(tmp_path):
    if shutil.which("h5dump") is None:
        pytest.skip("h5dump is not installed")
    make_slabs(tmp_path / "out", 23, 3)
    found = read_all(tmp_path / "out")
    for name, wanted in (("index.h5", found["number"]), ("slab-00001.h5", found["number"][7:15])):
        words = ["h5dump", "-y", "-w", "0", "-d", "/number", str(tmp_path / "out" / name)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        line, *_ = re.findall(r"DATA \{\s*([^}]*?)\s*\}", done.stdout)  # attributes follow
        assert [int(word) for word in line.split(",")] == wanted.tolist()
        assert (
            "sealed"
            in subprocess.run(
                ["h5dump", "-A", words[-1]], capture_output=True, text=True, timeout=60, check=True
            ).stdout
        )


def test_every_dataset_is_contiguous_and_aligned_without_user_block(tmp_path):
    make_slabs(tmp_path / "out", 101, 7)
    for path in (tmp_path / "out").glob("slab-*.h5"):
        with h5py.File(path) as file:
            assert file.userblock_size == 0
            for dataset in file.values():
                assert dataset.chunks is None
                assert dataset.id.get_offset() % ALIGNMENT_BYTES == 0
    assert set(open_map(tmp_path / "out").refusals().values()) == {""}


def test_nested_names_survive(tmp_path):
    write_hdf5(tmp_path / "a.h5", {"in/deep": np.arange(12), "top": np.arange(12)})
    convert_to_slabs(tmp_path / "a.h5", tmp_path / "out", permute=False)
    assert read_all(tmp_path / "out")["in/deep"].tolist() == list(range(12))


@pytest.mark.long
def test_digits_become_a_stratified_train_and_test_set(tmp_path):
    pytest.importorskip("sklearn")
    folders = convert_to_slabs("digits", tmp_path / "digits")
    assert folders == [tmp_path / "digits" / "train", tmp_path / "digits" / "test"]
    train, test = (read_all(folder) for folder in folders)
    assert len(train["label"]) + len(test["label"]) == 1797
    assert train["image"].shape[1:] == (64,)
    assert train["image"].dtype == np.float32
    assert train["label"].dtype == np.int64
    assert (train["image"].min(), train["image"].max()) == (0, 1)
    share = np.bincount(test["label"]) / np.bincount(np.r_[train["label"], test["label"]])
    assert np.all(abs(share - 0.2) < 0.01)
    again = convert_to_slabs("digits", tmp_path / "again")
    for folder, other in zip(folders, again, strict=True):
        np.testing.assert_array_equal(read_all(folder)["image"], read_all(other)["image"])


def test_an_existing_target_is_kept_unless_overwrite_is_asked_for(tmp_path):
    make_slabs(tmp_path / "out", 10, 2)
    uuid = open_map(tmp_path / "out").header.dataset_uuid
    with pytest.raises(DataError, match=r"exists.*--overwrite"):
        make_slabs(tmp_path / "out", 20, 2)
    assert open_map(tmp_path / "out").header.dataset_uuid == uuid
    make_slabs(tmp_path / "out", 20, 3, overwrite=True)
    assert open_map(tmp_path / "out").num_samples == 20


def test_overwrite_never_removes_what_is_not_a_slab(tmp_path):
    make_slabs(tmp_path / "out", 10, 2)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt, which is no slab"):
        make_slabs(tmp_path / "out", 20, 2, overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "slab-00001.h5")

    make_slabs(tmp_path / "good", 10, 2)
    before = sorted(p.name for p in tmp_path.iterdir())
    monkeypatch.setattr(SlabFolderWriter, "write", fail)
    with pytest.raises(DataError, match="No space left on device; free space"):
        convert_to_slabs(tmp_path / "good-source.npz", tmp_path / "good", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert open_map(tmp_path / "good").num_samples == 10


@pytest.mark.parametrize(
    ("raised", "number", "told"),
    [
        (RuntimeError("Unable to close\n (errno = 28, error message = 'No')"), 28, "No space left"),
        (OSError("Can't write data (errno = 5, error message = 'Bad')"), 5, "Input/output error"),
        (OSError("Can't write data (file write failed)\nmore"), 5, "Can't write data (file write"),
    ],
)
def test_what_hdf5_could_not_write_has_the_number_and_the_cause(tmp_path, raised, number, told):
    with pytest.raises(OSError, match=re.escape(told)) as caught, _writing(tmp_path / "a"):
        raise raised
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "a"))
    assert caught.value.__cause__ is raised and "more" not in str(caught.value)


@pytest.mark.parametrize(
    "raised",
    [
        RuntimeError("cannot schedule new futures after shutdown"),
        PermissionError(13, "Permission denied", "b"),
        DataError("b: damaged"),
    ],
)
def test_what_is_not_of_the_disk_is_not_taken_for_it(tmp_path, raised):
    with pytest.raises(type(raised)) as caught, _writing(tmp_path / "a"):
        raise raised
    assert caught.value is raised


def test_a_killed_conversion_leaves_no_target(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(50))
    script = (
        "import os, signal, sys\n"
        "from hsgd.io import convert_to_slabs\n"
        "from hsgd.io.convert.slab_folder_writer import SlabFolderWriter\n"
        "SlabFolderWriter.seal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert_to_slabs(sys.argv[1], sys.argv[2])\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "x.npy"), str(tmp_path / "out")]
    killed = subprocess.run(arguments, cwd=tmp_path, timeout=60, check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "out").exists()


def truncated_npz(folder):
    path = save_npz(folder, {"x": np.arange(9000)})
    os.truncate(path, 5000)
    return path


def truncated_npy(folder):
    np.save(folder / "x.npy", np.arange(9000))
    os.truncate(folder / "x.npy", 5000)
    return folder / "x.npy"


def corrupt_npz(folder):
    path = save_npz(folder, {"x": np.arange(9000)})
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    return path


def corrupt_compressed_npz(folder):
    path = folder / "x.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).integers(0, 9, 90000))
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    return path


def changed_npz(local, central, value):
    """Make an archive with another byte at these places of its member's two headers."""

    def write(folder):
        path = save_npz(folder, {"x": np.arange(9)})
        data = bytearray(path.read_bytes())
        data[data.index(b"PK\x03\x04") + local] = data[data.index(b"PK\x01\x02") + central] = value
        path.write_bytes(data)
        return path

    return write


def text_as(name):
    def write(folder):
        (folder / name).write_text("this is not an array\n" * 100)
        return folder / name

    return write


def npy(array):
    def write(folder):
        np.save(folder / "x.npy", array)
        return folder / "x.npy"

    return write


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (truncated_npz, "not a readable .npz"),
        (truncated_npy, "bytes are missing; copy the file again"),
        (corrupt_npz, "Bad CRC-32"),
        (corrupt_compressed_npz, "cannot read"),
        (changed_npz(6, 8, 1), "encrypted"),
        (changed_npz(8, 10, 97), "compression method is not supported"),
        (text_as("x.npz"), "not a readable .npz"),
        (text_as("x.npy"), "not a readable .npy"),
        (text_as("x.h5"), "not an HDF5 file"),
        (text_as("x.jpg"), "not an HDF5 file"),
        (npy(np.array(["a", "b"])), "only numbers and bool"),
        (npy(np.array([{}, {}])), "only numbers and bool"),
        (npy(np.float32(1)), "single number"),
        (npy(np.asfortranarray(np.ones((3, 4)))), "ascontiguousarray"),
        (npy(np.zeros((0, 4))), "no samples to convert"),
        (npy(np.zeros((4, 0))), "axis of length 0"),
        (lambda folder: folder / "absent.npz", "no such file"),
        (lambda folder: folder, "no .npy, .tar, .parquet, .txt, .jsonl or HDF5 files"),
        (lambda folder: f"{folder}/a.npy,{folder}/b.txt", "only .npy files can be joined"),
    ],
)
def test_bad_sources_get_one_line_and_leave_nothing(tmp_path, make, message):
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    with pytest.raises(DataError, match=message) as caught:
        convert_to_slabs(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "options",
    [{"num_slabs": 0}, {"num_slabs": 11}, {"seed": -1}, {"fields": ["absent"]}, {"fields": []}],
)
def test_bad_options_are_value_errors(tmp_path, options):
    with pytest.raises((ValueError, DataError), match=r"use|there are|no arrays"):
        make_slabs(tmp_path / "out", 10, **{"num_slabs": 2, **options})
    assert not Path(tmp_path / "out").exists()


def test_slabs_too_large_for_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "_MAX_SLAB_BYTES", 100)
    with pytest.raises(ValueError, match="2 slabs would be too large to shuffle; use 24 at least"):
        make_slabs(tmp_path / "out", 100, 2)


def test_the_number_of_slabs_follows_the_size(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.arange(1000))
    convert_to_slabs(tmp_path / "x.npy", tmp_path / "small")
    assert len(open_map(tmp_path / "small").slabs) == 16
    monkeypatch.setattr(conversion, "_SLAB_BYTES", 100)
    convert_to_slabs(tmp_path / "x.npy", tmp_path / "large")
    assert len(open_map(tmp_path / "large").slabs) == 80


CONVERT_TOGETHER = """\
import sys
from mpi4py import MPI
from hsgd.errors import DataError
from hsgd.io import convert_to_slabs
source, target = sys.argv[1:]
try:
    convert_to_slabs(source, target, num_slabs=7, seed=3, comm=MPI.COMM_WORLD)
except DataError as error:
    sys.stdout.write(f"{MPI.COMM_WORLD.rank} {error}\\n")
"""


@pytest.mark.long
def test_ranks_convert_together_to_the_same_samples_as_one(tmp_path, mpirun):
    pytest.importorskip("mpi4py")
    np.savez(tmp_path / "a.npz", **arrays_of(101))
    script = tmp_path / "together.py"
    script.write_text(CONVERT_TOGETHER)
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "one", num_slabs=7, seed=3)
    done = mpirun(3, script, str(tmp_path / "a.npz"), str(tmp_path / "three"))
    assert (done.returncode, done.stdout) == (0, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "one", "three", "together.py"]
    one, three = open_map(tmp_path / "one"), open_map(tmp_path / "three")
    assert one.header.source_digest == three.header.source_digest
    for name in arrays_of(1):
        with h5py.File(tmp_path / "one/index.h5") as a, h5py.File(tmp_path / "three/index.h5") as b:
            np.testing.assert_array_equal(a[name][:], b[name][:])
    done = mpirun(3, script, str(tmp_path / "a.npz"), str(tmp_path / "three"))
    lines = sorted(done.stdout.splitlines())
    assert [line[0] for line in lines] == ["0", "1", "2"]
    assert all("three exists; choose another name" in line for line in lines)


def test_arrays_in_memory_are_a_source(tmp_path):
    texts = [np.arange(number % 5, dtype=np.int32) + number for number in range(40)]
    arrays = {
        "x": np.arange(80, dtype=">f4").reshape(40, 2),
        "number": np.arange(40),
        "text": texts,
        "again": ragged_of(texts, (), np.dtype(np.int32)),
    }
    convert_to_slabs(arrays, tmp_path / "out", num_slabs=3)
    loader = loader_of(tmp_path / "out", 7, as_numpy=True, verify=True)
    seen = []
    for batch in loader:
        for place, number in enumerate(batch["number"].tolist()):
            assert batch["x"][place].tolist() == [2 * number, 2 * number + 1]
            assert batch["text"][place].tolist() == texts[number].tolist()
            assert batch["again"][place].tolist() == texts[number].tolist()
            seen.append(number)
    assert sorted(seen) == list(range(40))
    convert_to_slabs(arrays, tmp_path / "few", fields=["number"])
    assert [spec.name for spec in open_map(tmp_path / "few").fields] == ["number"]


@pytest.mark.parametrize(
    ("arrays", "error", "text"),
    [
        ({}, ValueError, "no arrays to convert"),
        ({"x": np.arange(3), "y": np.arange(4)}, ValueError, "differ: x 3, y 4"),
        ({"x": np.array(["a"])}, TypeError, "only arrays of numbers"),
        ({"x": 5}, TypeError, r"shape \(\)"),
        ({"x": [np.zeros((1, 2)), np.zeros((1, 3))]}, ValueError, "only the first axis"),
    ],
)
def test_arrays_that_are_no_fields_are_refused(tmp_path, arrays, error, text):
    with pytest.raises(error, match=text):
        convert_to_slabs(arrays, tmp_path / "out")
