"""hsgd data convert, info and bench, as typed; verify is in test_io_checksums.py."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from hsgd.io import open_map
from hsgd.io.cli import add_parser

from hdf5_samples import arrays_of, write_hdf5
from hsgd.errors import DataError


@pytest.fixture
def data():
    """Runs `data WORDS...` and gives the exit code."""
    parser = argparse.ArgumentParser("hsgd")
    add_parser(parser.add_subparsers())

    def run(*words):
        options = parser.parse_args(["data", *map(str, words)])
        return options.command_function(options)

    return run


def test_convert_shows_progress_and_a_table_of_what_it_made(data, tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **arrays_of(50))
    assert data("convert", tmp_path / "a.npz", tmp_path / "out", "--slabs", "5", "--seed", "9") == 0
    shown = capsys.readouterr()
    assert "convert" in shown.err
    assert "50 samples in 5 sealed slabs of 10 to 10" in shown.out
    assert "shuffled with seed 9" in shown.out
    assert "image   (2, 3)  float32" in shown.out
    assert "preadv, around HDF5" in shown.out


def test_quiet_is_quiet(data, tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **arrays_of(50))
    data("convert", tmp_path / "a.npz", tmp_path / "out", "--quiet", "--keep-order")
    assert capsys.readouterr() == ("", "")
    assert open_map(tmp_path / "out").header.permutation_seed == -1


def test_info_says_why_hdf5_is_not_bypassed(data, tmp_path, capsys):
    write_hdf5(tmp_path / "a.h5", {"x": np.arange(9), "y": np.arange(9.0)}, scaleoffset=4)
    assert data("info", tmp_path / "a.h5", "--fields", "y") == 0
    shown = capsys.readouterr().out
    assert "HDF5 file, 9 samples, 72 B" in shown
    assert "h5py, because: filters (6,), only these are known: gzip, " in shown
    assert "x" not in shown.splitlines()[-1].split()


def test_info_on_a_text_file_is_a_data_error(data, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="not an HDF5 file"):
        data("info", tmp_path / "a.txt")


@pytest.mark.parametrize("words", [["--help"], ["convert", "--help"], ["info", "--help"]])
def test_help_teaches_with_examples(data, words, capsys):
    with pytest.raises(SystemExit) as end:
        data(*words)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert words[0] == "info" or "examples:" in shown


def test_a_missing_command_is_an_error_of_use(data):
    with pytest.raises(SystemExit) as end:
        data()
    assert end.value.code == 2


def test_info_draws_the_slabs_as_high_as_their_samples(data, tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **arrays_of(70))
    data("convert", tmp_path / "a.npz", tmp_path / "out", "--quiet", "--slabs", "66")
    data("info", tmp_path / "out")
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split()[0] == "0" and second.split()[0] == "64"
    bars = first.split()[1] + second.split()[1]
    assert len(bars) == 66
    assert [bars.count("█"), bars.count("▄")] == [4, 62]  # slabs of two samples, and of one


def test_bench_reads_in_both_orders_and_prints_rates(data, tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **arrays_of(50))
    data("convert", tmp_path / "a.npz", tmp_path / "out", "--quiet")
    assert data("bench", tmp_path / "out", "--batch-size", "8", "--threads", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["order", "samples/s", "GB/s", "first", "batch"]
    assert [line.split()[0] for line in lines[3:]] == ["in", "shuffled"]
    assert all(float(line.split()[-4].replace(",", "")) > 0 for line in lines[3:])


def test_documents_for_programs(data, tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **arrays_of(50))
    out = tmp_path / "out"
    data("convert", tmp_path / "a.npz", out, "--quiet", "--slabs", "5", "--seed", "9")
    found = {}
    for words in (["info"], ["verify", "--quiet"], ["bench"]):
        assert data(words[0], out, *words[1:], "--json") == 0
        found[words[0]] = json.loads(capsys.readouterr().out)
    info = found["info"]
    assert (info["samples"], info["samples_of_files"], info["seed"]) == (50, [10] * 5, 9)
    image = next(field for field in info["fields"] if field["name"] == "image")
    assert (image["shape"], image["dtype"], image["bytes"]) == ([2, 3], "float32", 50 * 24)
    assert image["read_by"] == "preadv" and info["left_out"] == {}
    verify = found["verify"]
    assert (verify["path"], verify["bytes"], verify["slabs"]) == (str(out), info["bytes"], 5)
    assert verify["damaged"] == verify["unchecked"] == []
    assert [row["order"] for row in found["bench"]["orders"]] == ["in order", "shuffled"]


def test_bad_numbers_of_threads_are_refused(data, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays_of(50))
    data("convert", tmp_path / "a.npz", tmp_path / "out", "--quiet")
    with pytest.raises(ValueError, match="--threads 0; use at least 1"):
        data("verify", tmp_path / "out", "--threads", "0")
