"""A damaged index.h5: HDF5 would crash on the maps of its virtual datasets."""

from __future__ import annotations

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hsgd.io import class_names, open_map, upload_slabs

from hdf5_samples import collect, make_ragged_slabs, make_slabs
from hsgd.errors import DataError
from loaders import loader_of
from toolkit.range_server import RangeServer

# Overwrites four bytes at each place, and asks each command for a line.
DAMAGE = """\
import contextlib, faulthandler, io, sys
from pathlib import Path
from hsgd.tools import cli

faulthandler.enable()
folder, step = Path(sys.argv[1]), int(sys.argv[2])
index = folder / "index.h5"
original, has_checksum = index.read_bytes(), sys.argv[3] == "checksum"
if not has_checksum:  # as if another program had changed the file
    original = original[:-16]
for place in range(0, len(original) - 16, step):
    damaged = bytearray(original)
    damaged[place : place + 4] = bytes(255 - byte for byte in damaged[place : place + 4])
    index.write_bytes(damaged)
    for words in (["info"], ["verify", "--quiet"], ["convert", "--quiet"]):
        command, *options = words
        target = [str(folder.parent / "again"), "--overwrite"] if command == "convert" else []
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["data", command, str(folder), *target, *options])
        text = err.getvalue()
        if not has_checksum:
            assert code in (0, 1) and text.count("error: ") == code, (place, command, code, text)
            continue
        assert code == 1 and len(text.splitlines()) == 1, (place, command, code, text)
        assert "index.h5: damaged, its checksum is" in text, (place, command, text)
print("done")
"""


def damage_everywhere(folder, step, kind):
    command = [sys.executable, "-c", DAMAGE, str(folder), step, kind]
    done = subprocess.run(
        command, cwd=folder.parent, timeout=240, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


@pytest.mark.parametrize("make", [make_slabs, make_ragged_slabs])
def test_four_damaged_bytes_anywhere_are_one_line_of_each_command(tmp_path, make):
    folder = make(tmp_path / "out", 40, 5)
    damage_everywhere(folder, "97", "checksum")
    assert not (tmp_path / "again").exists()


@pytest.mark.long
@pytest.mark.parametrize(("make", "step"), [(make_slabs, "159"), (make_ragged_slabs, "291")])
def test_four_damaged_bytes_of_an_index_without_checksum_crash_nobody(tmp_path, make, step):
    """The maps of its virtual datasets are never loaded."""
    damage_everywhere(make(tmp_path / "out", 40, 5), step, "none")


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)


def test_the_loader_class_names_and_upload_refuse_a_damaged_index(tmp_path):
    folder = make_slabs(tmp_path / "out", 40, 5)
    flip(folder / "index.h5", 3000)
    for use in (
        lambda: loader_of(folder, 4),
        lambda: class_names(folder, "number"),
        lambda: class_names(folder / "index.h5", "number"),
        lambda: upload_slabs(folder, "s3://bucket/data"),
    ):
        with pytest.raises(DataError, match=r"index\.h5: damaged, its checksum is"):
            use()
    with RangeServer(folder) as server, pytest.raises(DataError, match=r"index\.h5: damaged, its"):
        class_names(server.url, "number")


def test_hdf5_does_not_mind_the_checksum_and_verify_says_when_it_is_gone(tmp_path, hsgd_data):
    folder = make_slabs(tmp_path / "out", 40, 5, permute=False)
    with h5py.File(folder / "index.h5") as file:
        np.testing.assert_array_equal(file["number"][:], np.arange(40))
    assert json.loads(hsgd_data("verify", folder, "--json", "--quiet")[1])["unchecked"] == []
    with h5py.File(folder / "index.h5", "r+") as file:
        file["number"].attrs["units"] = "none"
    assert len(collect(loader_of(folder, 4))["number"]) == 40
    code, shown, _ = hsgd_data("verify", folder, "--quiet")
    assert code == 0
    assert "index.h5: not checked, it has no checksum" in shown.splitlines()[-1]
    (line,) = json.loads(hsgd_data("verify", folder, "--json", "--quiet")[1])["unchecked"]
    assert line == shown.splitlines()[-1]


def test_an_index_that_cannot_be_read_is_one_line(tmp_path):
    folder = make_slabs(tmp_path / "out", 40, 5)
    (folder / "index.h5").write_bytes(b"short")
    with pytest.raises(DataError, match=r"index\.h5: not an HDF5 file"):
        open_map(folder)
