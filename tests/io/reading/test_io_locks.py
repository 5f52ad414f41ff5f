"""Files that somebody writes are not read, and a file that is read is locked as HDF5 locks it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import contextmanager

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map
from hsgd.io.format import file_lock

from hdf5_samples import collect, make_slabs, write_hdf5
from hsgd.errors import DataError
from loaders import loader_of

ROWS = np.arange(16)
_WRITER = """
import sys, h5py
path, libver, swmr = sys.argv[1], sys.argv[2] or None, sys.argv[3] == "swmr"
file = h5py.File(path, "w", libver=libver)
rows = file.create_dataset("x", (16,), "i8", maxshape=(None,), chunks=(4,))
rows[:12] = range(12)
if swmr:
    file.swmr_mode = True
file.flush()
print("written", flush=True)
sys.stdin.read()
"""


@contextmanager
def written(path, libver="", swmr=""):
    """While the block runs another program has the file open and has not written all."""
    command = [sys.executable, "-c", _WRITER, str(path), libver, swmr]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"written\n"
        try:
            yield
        finally:
            writer.stdin.close()


@pytest.mark.parametrize("kind", [("", ""), ("latest", ""), ("latest", "swmr")])
def test_a_file_that_is_being_written_is_refused_in_one_line(hsgd_data, tmp_path, kind):
    path = tmp_path / "a.h5"
    with written(path, *kind):
        with pytest.raises(DataError, match=r"a\.h5: (is being written by|a program writes it)"):
            loader_of(path, 4)
        with pytest.raises(DataError, match=r"is being written by|a program writes it"):
            convert_to_slabs(path, tmp_path / "out")
        code, _, error = hsgd_data("info", path)
        assert code == 1 and len(error.splitlines()) == 1


def test_a_source_or_link_target_that_is_being_written_is_no_missing_file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout((16,), "i8")
        layout[:] = h5py.VirtualSource("part.h5", "x", (16,), "i8")
        file.create_virtual_dataset("x", layout)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = ROWS
        file["label"] = h5py.ExternalLink("part.h5", "/x")
    with written(tmp_path / "part.h5"):
        for name in ("a.h5", "b.h5"):
            with pytest.raises(DataError, match=r"part\.h5: is being written by another program"):
                open_map(tmp_path / name)


def test_a_writer_that_starts_later_is_kept_out_while_rows_are_read(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": ROWS})
    script = f"import h5py; h5py.File({str(path)!r}, 'r+')"
    batches = iter(loader_of(path, 4, as_numpy=True))
    next(batches)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode and "unable to lock file" in done.stderr
    assert len(list(batches)) == 3


def test_readers_do_not_keep_one_another_out(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": ROWS})
    script = f"import h5py; print(h5py.File({str(path)!r})['x'][:].sum())"
    batches = iter(loader_of(path, 4, as_numpy=True))
    next(batches)
    other = collect(loader_of(path, 4, as_numpy=True))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{ROWS.sum()}\n" and sorted(other["x"]) == ROWS.tolist()


@pytest.mark.parametrize("locking", [None, False, True, "best-effort"])
@pytest.mark.parametrize("chunks", [None, (4,)])
def test_a_file_that_this_program_reads_with_h5py_is_read_as_well(tmp_path, locking, chunks):
    path = write_hdf5(
        tmp_path / "a.h5", {"x": ROWS}, chunks=chunks, scaleoffset=0 if chunks else None
    )
    with h5py.File(path, locking=locking):
        assert sorted(collect(loader_of(path, 4, as_numpy=True))["x"]) == ROWS.tolist()


@pytest.mark.parametrize("locking", [None, False, True, "best-effort"])
def test_a_file_that_this_program_writes_is_refused_with_the_remedy(tmp_path, locking):
    path = write_hdf5(tmp_path / "a.h5", {"x": ROWS})
    with h5py.File(path, "r+", locking=locking) as file:
        file["x"][:] = 0
        with pytest.raises(DataError, match=r"this program has the file open for writing.*close"):
            loader_of(path, 4)
    assert not collect(loader_of(path, 4, as_numpy=True))["x"].any()


def no_locks(number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_once(tmp_path, monkeypatch, number):
    path = write_hdf5(tmp_path / "a.h5", {"x": ROWS})
    monkeypatch.setattr(fcntl, "flock", no_locks(number))
    monkeypatch.setattr(file_lock, "_warned", False)
    with pytest.warns(UserWarning, match="this file system has no locks") as told:
        assert sorted(collect(loader_of(path, 4, as_numpy=True))["x"]) == ROWS.tolist()
    assert len(told) == 1


@pytest.mark.parametrize("value", ["FALSE", "0", "BEST_EFFORT"])
def test_the_variable_of_hdf5_is_obeyed(tmp_path, monkeypatch, value, recwarn):
    path = write_hdf5(tmp_path / "a.h5", {"x": ROWS})
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", value)
    monkeypatch.setattr(fcntl, "flock", no_locks(errno.ENOSYS))
    monkeypatch.setattr(file_lock, "_warned", False)
    assert sorted(collect(loader_of(path, 4, as_numpy=True))["x"]) == ROWS.tolist()
    assert not recwarn.list


def test_sealed_slabs_are_read_without_locks_of_their_own(tmp_path, monkeypatch):
    """Thousands of files of thousands of ranks: nobody writes them."""
    folder = make_slabs(tmp_path / "out", 40, 4)
    asked = []
    monkeypatch.setattr(
        "hsgd.io.reading.slab_files.lock_shared", lambda *words: asked.append(words)
    )
    assert len(collect(loader_of(folder, 4, as_numpy=True))["number"]) == 40
    assert asked == []
