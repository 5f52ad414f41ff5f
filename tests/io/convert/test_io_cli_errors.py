"""Wrong input to hsgd data: one line, exit code 1, and nothing half made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile

import h5py
import numpy as np
import pytest
from hsgd.io import open_map

from hdf5_samples import arrays_of, collect, write_hdf5
from loaders import loader_of


def assert_one_line(found, *parts):
    code, out, err = found
    assert (code, out) == (1, ""), found
    assert err.startswith("hsgd: error: ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("command", ["convert", "info", "verify", "bench"])
@pytest.mark.parametrize("name", ["pipe.h5", "pipe.npy", "pipe.csv"])
def test_a_pipe_is_refused_and_nobody_waits_for_it(hsgd_data, tmp_path, command, name):
    os.mkfifo(tmp_path / name)
    words = [tmp_path / name, *([tmp_path / "out"] if command == "convert" else [])]
    assert_one_line(hsgd_data(command, *words), name, "file")


@pytest.mark.parametrize("command", ["info", "verify", "bench"])
@pytest.mark.parametrize("content", [None, b"", b"hello", "folder"])
def test_what_is_no_dataset_is_refused(hsgd_data, tmp_path, command, content):
    path = tmp_path / "a thing.h5"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert_one_line(hsgd_data(command, path), "a thing.h5")


@pytest.mark.parametrize("command", ["convert", "info", "bench"])
def test_a_field_that_is_named_twice_is_refused(hsgd_data, tmp_path, command):
    write_hdf5(tmp_path / "a.h5", arrays_of(9))
    words = [tmp_path / "a.h5", *([tmp_path / "out"] if command == "convert" else [])]
    found = hsgd_data(command, *words, "--fields", "number,even,number")
    assert_one_line(found, "field 'number' is named twice")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a", "a/b"], "field 'a' cannot hold field 'a/b'"),
        (["a//b"], "no dataset of the name 'a//b'"),
        (["x", "."], "no dataset of the name '.'"),
        (["/x"], "no dataset of the name '/x'"),
        (["x/"], "no dataset of the name 'x/'"),
    ],
)
def test_names_that_hdf5_cannot_have_are_refused(hsgd_data, tmp_path, names, text):
    np.savez(tmp_path / "a.npz", **dict.fromkeys(names, np.arange(9)))
    assert_one_line(hsgd_data("convert", tmp_path / "a.npz", tmp_path / "out"), text)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_names_with_spaces_and_of_any_language_survive(hsgd_data, tmp_path):
    folder = tmp_path / "m\u00e9 s\u043b\u043e\u0432\u043e"
    folder.mkdir()
    names = ["a b", "\u4f8b/\u03b1 \U0001f600", "100%", "%b"]
    np.savez(folder / "\u00fc x.npz", **dict.fromkeys(names, np.arange(20)))
    out = folder / "out put"
    assert hsgd_data("convert", folder / "\u00fc x.npz", out, "--slabs", "3")[0] == 0
    code, shown, _ = hsgd_data("info", out, "--fields", f"{names[0]}, {names[1]}")
    assert code == 0 and all(name in shown for name in names[:2])
    assert hsgd_data("verify", out, "--quiet")[0] == 0
    assert hsgd_data("bench", out, "--seconds", "0.01")[0] == 0
    found = collect(loader_of(out, 7, as_numpy=True))
    assert {name: sorted(values.tolist()) for name, values in found.items()} == {
        name: list(range(20)) for name in names
    }
    with h5py.File(out / "index.h5") as file:
        assert all(sorted(file[name][:].tolist()) == list(range(20)) for name in names)


def test_a_kind_that_cannot_be_converted_is_told_which_can(hsgd_data, tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(__file__, "0.txt")
    assert_one_line(
        hsgd_data("convert", tmp_path / "a.tar.gz", tmp_path / "out"),
        "not an HDF5 file, and its name does not end in .npy, .npz, .tar, .csv",
    )


def npy_with_shape(path, shape):
    """A file of 10 numbers whose header says otherwise."""
    with open(path, "wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.arange(10).tobytes())


@pytest.mark.parametrize("shape", [(1 << 60,), (11,), (-5,), (1 << 40, 1 << 40)])
def test_an_array_that_claims_what_it_does_not_have_takes_no_memory(hsgd_data, tmp_path, shape):
    npy_with_shape(tmp_path / "x.npy", shape)
    found = hsgd_data("convert", tmp_path / "x.npy", tmp_path / "out")
    assert_one_line(found, "shape is (-5,)" if shape[0] < 0 else "bytes are missing")


def test_a_damaged_member_of_a_tar_file_is_named(hsgd_data, tmp_path):
    npy_with_shape(tmp_path / "0.x.npy", (1 << 60,))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "0.x.npy", "0.x.npy")
    assert_one_line(hsgd_data("convert", tmp_path / "a.tar", tmp_path / "out"), "0.x.npy")


@pytest.mark.parametrize("what", ["empty.npz", "empty.csv", "header.csv", "empty.tar", "empty.h5"])
def test_a_source_without_samples_is_refused(hsgd_data, tmp_path, what):
    path = tmp_path / what
    if what == "empty.npz":
        np.savez(path)
    elif what == "empty.tar":
        tarfile.open(path, "w").close()
    elif what == "empty.h5":
        h5py.File(path, "w").close()
    else:
        path.write_text("x,y\n" if what == "header.csv" else "")
    assert_one_line(hsgd_data("convert", path, tmp_path / "out"))
    assert [entry.name for entry in tmp_path.iterdir()] == [what]


def test_one_sample_and_a_batch_beyond_the_dataset_work(hsgd_data, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3.0).reshape(1, 3))
    assert hsgd_data("convert", tmp_path / "x.npy", tmp_path / "out", "--quiet") == (0, "", "")
    assert len(open_map(tmp_path / "out").slabs) == 1
    assert hsgd_data("verify", tmp_path / "out", "--quiet")[0] == 0
    assert hsgd_data("bench", tmp_path / "out", "--batch-size", 10**12)[0] == 0
    (batch,) = loader_of(tmp_path / "out", 10**12, as_numpy=True)
    assert batch["data"].tolist() == [[0, 1, 2]]
    for threads in (1, 4):
        found = hsgd_data("bench", tmp_path / "out", "--threads", threads, "--seconds", "0")
        assert found[0] == 0


@pytest.mark.parametrize(
    "words",
    [["--batch-size", "0"], ["--threads", "0"], ["--fields", "absent"], ["--fields", ""]],
)
def test_bad_options_of_bench_are_refused(hsgd_data, tmp_path, words):
    write_hdf5(tmp_path / "a.h5", {"x": np.arange(9)})
    assert_one_line(hsgd_data("bench", tmp_path / "a.h5", *words))


def test_bench_reads_what_torch_has_no_type_for(hsgd_data, tmp_path):
    write_hdf5(tmp_path / "a.h5", {"x": np.arange(9, dtype=np.longdouble)})
    assert hsgd_data("bench", tmp_path / "a.h5")[0] == 0


@pytest.mark.long
def test_a_damaged_hdf5_file_of_any_kind_is_an_error_of_one_line(hsgd_data, tmp_path):
    with h5py.File(tmp_path / "good.h5", "w") as file:
        file["number"] = np.arange(40)
        tokens = file.create_dataset("tokens", (40,), h5py.vlen_dtype(np.int32))
        for number in range(40):
            tokens[number] = np.arange(number)
    good = (tmp_path / "good.h5").read_bytes()
    draw = np.random.default_rng(0)
    codes = []
    for turn in range(30):
        data = bytearray(good)
        if turn % 3:
            data[draw.integers(len(data))] ^= 1 << int(draw.integers(8))
        else:
            del data[draw.integers(1, len(data)) :]
        (tmp_path / "bad.h5").write_bytes(data)
        found = hsgd_data("convert", tmp_path / "bad.h5", tmp_path / "out", "--quiet")
        codes.append(found[0])
        if found[0]:
            assert_one_line(found)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.h5", "good.h5"]
    assert set(codes) == {0, 1}


ASCII = "from hsgd.tools import cli; import sys; sys.exit(cli.main(sys.argv[1:]))"


def test_a_terminal_without_unicode_gets_the_table_all_the_same(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(50))
    words = [sys.executable, "-c", ASCII, "data", "convert", "x.npy", "out"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"50 samples in 16 sealed slabs" in done.stdout


# Converts on a disk of a few sizes, and on one that cannot be written, in a namespace of its own.
FULL = """\
import json, os, shutil, subprocess, sys
disk, source = sys.argv[1:]
def mount(*options):
    subprocess.run(["mount", *options, disk], check=True)
def convert(*options):
    words = [sys.executable, "-m", "hsgd", "data", "convert", source, f"{disk}/out", "--quiet"]
    done = subprocess.run([*words, *options], capture_output=True, text=True)
    print(json.dumps([done.returncode, done.stdout, done.stderr, os.listdir(disk)]))
    shutil.rmtree(f"{disk}/out", ignore_errors=True)
mount("-t", "tmpfs", "-o", "size=9m", "tmpfs")
for size in (60, 340, 400):
    mount("-o", f"remount,size={size}k")
    convert("--slabs", "16")
    convert("--slabs", "40")
mount("-o", "remount,size=420k")
convert("--slabs", "1", "--compress", "gzip")
mount("-o", "remount,size=9m,ro")
convert()
mount("-o", "remount,size=9m,rw")
convert()
"""


@pytest.mark.long
def test_a_full_or_read_only_file_system_is_told_and_nothing_is_left(virtual_nodes, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(40_000.0))
    (tmp_path / "disk").mkdir()
    words = [sys.executable, "-c", FULL, str(tmp_path / "disk"), str(tmp_path / "x.npy")]
    done = subprocess.run(
        ["unshare", "--mount", *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    *full, read_only, enough = map(json.loads, done.stdout.splitlines())
    assert len(full) == 7
    for code, out, err, left in full:
        assert_one_line((code, out, err), "No space left on device; free space or choose another")
        assert left == []
    assert_one_line(read_only[:3], "Read-only file system")
    assert (enough[0], enough[3]) == (0, ["out"])


KILLED = """\
import os, sys, signal, random
from mpi4py import MPI
from hsgd.tools import cli
from hsgd.io.reading import row_copies
from hsgd.io.convert import shuffle_passes, slab_folder_writer as writer

shuffle_passes.BLOCK_BYTES, shuffle_passes._CHECKPOINT_BYTES, writer.CHECKSUM_BYTES = 64, 200, 200
draw = random.Random(f"{sys.argv[1]}-{MPI.COMM_WORLD.rank}")
left = [draw.randint(1, int(sys.argv[2]))]
def dying(call):
    def counted(*words, **options):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*words, **options)
    return counted
for place, name in ((os, "pwrite"), (os, "fsync"), (os, "rename"), (row_copies, "crc32c")):
    setattr(place, name, dying(getattr(place, name)))
sys.exit(cli.main(["data", "convert", *sys.argv[3:], "--quiet"]))
"""


@pytest.mark.long
def test_ranks_that_are_killed_go_on_together(mpirun, tmp_path):
    pytest.importorskip("mpi4py")
    np.savez(tmp_path / "a.npz", **arrays_of(101))
    (tmp_path / "killed.py").write_text(KILLED)
    words = [tmp_path / "a.npz", tmp_path / "out", "--slabs", "7", "--compress", "gzip"]
    for life in range(3):
        most = 40 if life < 2 else 10**9
        done = mpirun(3, tmp_path / "killed.py", str(life), str(most), *map(str, words))
        assert (done.returncode == 0) == (life == 2), done.stderr
        assert (tmp_path / "out").exists() == (life == 2)
    found = collect(loader_of(tmp_path / "out", 7, as_numpy=True, verify=True))
    order = np.argsort(found["number"])
    for name, values in arrays_of(101).items():
        np.testing.assert_array_equal(found[name][order], values)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.npz", "killed.py", "out"]


def test_a_dataset_that_cannot_be_written_is_read_all_the_same(tmp_path, hsgd_data):
    np.savez(tmp_path / "a.npz", **arrays_of(50))
    out = tmp_path / "out"
    assert hsgd_data("convert", tmp_path / "a.npz", out, "--quiet")[0] == 0
    for path in (*out.iterdir(), out):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(path.name for path in out.iterdir())
    assert hsgd_data("verify", out, "--quiet")[0] == 0
    assert len(collect(loader_of(out, 8, as_numpy=True))["number"]) == 50
    assert sorted(path.name for path in out.iterdir()) == before
