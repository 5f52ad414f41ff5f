"""HDF5 files with links: fields behind them are read, and what is left out is named."""

from __future__ import annotations

import argparse
import os

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map
from hsgd.io.cli import add_parser

from hdf5_samples import collect, make_ragged_slabs
from hsgd.errors import DataError
from loaders import loader_of

ROWS = np.arange(20)


@pytest.fixture
def linked(tmp_path):
    """A file with `x` of its own, links to it and to another file, and what cannot be a field."""
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["y"] = ROWS * 2.5
        file["inner/z"] = ROWS - 3
        file["home"] = h5py.ExternalLink("main.h5", "/")
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file["x"] = ROWS
        file["soft"] = h5py.SoftLink("/x")
        file["far"] = h5py.ExternalLink("other.h5", "/y")
        file["over"] = h5py.SoftLink("/far")
        file["group"] = h5py.ExternalLink("other.h5", "/")
    return tmp_path / "main.h5"


WANTED = {
    "x": ROWS,
    "soft": ROWS,
    "far": ROWS * 2.5,
    "over": ROWS * 2.5,
    "group/y": ROWS * 2.5,
    "group/inner/z": ROWS - 3,
}


def assert_wanted(found):
    order = np.argsort(found["x"])
    assert sorted(found) == sorted(WANTED)
    for name, values in WANTED.items():
        np.testing.assert_array_equal(found[name][order], values)


def test_fields_behind_soft_and_external_links_are_read(linked, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.warns(UserWarning, match="'group/home' .a link back to a group that holds it"):
        loader = loader_of(linked, 6, as_numpy=True)
    assert_wanted(collect(loader))
    bypass = loader.metrics()["bypass"]
    assert bypass["far"] == f"h5py: external link to {linked.parent / 'other.h5'}"
    assert bypass["x"] == bypass["soft"] == "preadv"


def test_convert_follows_links_too(linked):
    with pytest.warns(UserWarning, match="group/home"):
        convert_to_slabs(linked, linked.parent / "out", num_slabs=3)
    assert_wanted(collect(loader_of(linked.parent / "out", 6, as_numpy=True)))


def test_a_file_behind_a_link_must_not_change_while_it_is_in_use(linked):
    loader = loader_of(linked, 6, as_numpy=True, fields=["far"])
    os.utime(linked.parent / "other.h5", ns=(1, 1))
    with pytest.raises(DataError, match=r"other\.h5: changed since it was opened"):
        list(loader)


def spoil(path):
    os.mkfifo(path.parent / "pipe")
    with h5py.File(path, "w") as file:
        file["x"] = ROWS
        file["number"] = 7
        file["nothing"] = h5py.Empty("f4")
        file["dangling"] = h5py.SoftLink("/nowhere")
        file["missing"] = h5py.ExternalLink("gone.h5", "/x")
        file["pipe"] = h5py.ExternalLink("pipe", "/x")
        file["to_pipe"] = h5py.SoftLink("/pipe")
        file["here"] = h5py.SoftLink("/there")
        file["there"] = h5py.SoftLink("/here")
        file["group/back"] = h5py.SoftLink("/group")
        file["through"] = h5py.SoftLink("/x/y")


REASONS = {
    "number": "a single value, not one for each sample",
    "nothing": "it has no values",
    "dangling": "a link to /nowhere, where nothing is",
    "missing": "a link to the file gone.h5, which is missing",
    "here": "links to links without end",
    "there": "links to links without end",
    "group/back": "a link back to a group that holds it",
    "through": "a link to /x/y, where nothing is",
}


def test_what_is_left_out_is_named_with_its_reason(tmp_path, capsys):
    path = tmp_path / "main.h5"
    spoil(path)
    found = dict(open_map(path).left_out)
    assert (
        found.pop("pipe") == found.pop("to_pipe") == f"a link to {tmp_path}/pipe, which is no file"
    )
    assert found == REASONS
    with pytest.warns(
        UserWarning, match=r"main\.h5: no fields, so left out: .*, 5 more; name the fields"
    ):
        loader_of(path, 6, as_numpy=True)
    with pytest.raises(
        ValueError, match=r"no field missing \(missing: a link to the file gone\.h5"
    ):
        open_map(path, ["missing"])
    assert list(loader_of(path, 6, as_numpy=True, fields=["x"]))
    parser = argparse.ArgumentParser("hsgd")
    add_parser(parser.add_subparsers())
    options = parser.parse_args(["data", "info", str(path)])
    options.command_function(options)
    assert "no field: number (a single value, not one for each sample)" in capsys.readouterr().out
    options = parser.parse_args(["data", "convert", str(path), str(tmp_path / "out"), "--quiet"])
    options.command_function(options)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hsgd: warning: {path}: no fields, so left out: 'dangling' (a link to")


def test_only_rank_0_warns(tmp_path):
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file["x"], file["number"] = ROWS, 7
    assert len(loader_of(tmp_path / "main.h5", 2, 1, 2)) == 5


def test_a_ragged_field_of_another_folder_is_left_out(tmp_path):
    make_ragged_slabs(tmp_path / "data", 20, 1)
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file["x"] = ROWS
        file["tokens"] = h5py.ExternalLink("data/slab-00000.h5", "/tokens")
    assert open_map(tmp_path / "main.h5").left_out == {
        "tokens": "a ragged field of another file; convert that file"
    }


def test_groups_that_hold_one_another_many_times_end_in_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("hsgd.io.format.fields._MOST_AGAIN", 1000)
    with h5py.File(tmp_path / "main.h5", "w") as file:
        inner = file.create_group("leaf")
        for _ in range(12):
            outer = file.create_group(f"level-{len(file)}")
            outer["a"] = outer["b"] = inner
            inner = outer
    with pytest.raises(DataError, match=r"main\.h5: .*more than 1000 names"):
        open_map(tmp_path / "main.h5")


def test_a_file_may_have_more_names_and_links_than_the_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr("hsgd.io.format.fields._MOST_AGAIN", 10)
    monkeypatch.setattr("hsgd.io.format.fields._MOST_STEPS", 10)
    with h5py.File(tmp_path / "main.h5", "w") as file:
        for sample in range(40):
            file[f"samples/{sample}"] = ROWS
            file[f"links/{sample}"] = h5py.SoftLink(f"/samples/{sample}")
    assert len(open_map(tmp_path / "main.h5").fields) == 80


def test_a_link_whose_way_has_too_many_steps_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("hsgd.io.format.fields._MOST_STEPS", 10)
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file["x"] = ROWS
        file["a"] = h5py.SoftLink("/" + "/".join("b" * 11))
        file["b/b"] = h5py.SoftLink("/b")
    assert open_map(tmp_path / "main.h5").left_out["a"] == "a link whose way has more than 10 steps"
