"""Numbers that a damaged or hostile file claims are refused by one line, before memory is taken."""

from __future__ import annotations

import resource
import shutil

import h5py
import numpy as np
import pytest
from hsgd.io import open_map

from hdf5_samples import collect, make_slabs
from hsgd.errors import DataError
from hsgd.testing.range_server import RangeServer
from loaders import loader_of

__all__: list[str] = []

MANY = [1 << 31, 1 << 40, (1 << 62) - 1, 1 << 62, (1 << 63) - 1]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_slabs(tmp_path_factory.mktemp("claims") / "data", 20, 2)


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "data")


@pytest.fixture
def little_memory():
    """256 MiB of address space more than there is now."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def claim(folder, name, value, *files):
    for file in files or ("*.h5",):
        for path in folder.glob(file):
            with h5py.File(path, "r+") as opened:
                opened.attrs[name] = value


def one_line(code, out, err):
    assert code == 1
    (line,) = [text for text in (out + err).splitlines() if "error" in text]
    return line


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", MANY)
@pytest.mark.parametrize("files", [["index.h5"], ["*.h5"]])
def test_more_slabs_than_there_can_be_are_refused(
    folder, tmp_path, hsgd_data, little_memory, count, files
):
    claim(folder, "num_slabs", count, *files)
    with pytest.raises(DataError, match=rf"index\.h5: .*num_slabs.*{count}"):
        open_map(folder)
    for words in (["info", folder], ["verify", folder], ["convert", folder, tmp_path / "copy"]):
        line = one_line(*hsgd_data(*words))
        assert "index.h5" in line and "num_slabs" in line and str(count) in line


@pytest.mark.timeout(60)
def test_more_slabs_than_a_server_has_are_refused(folder):
    claim(folder, "num_slabs", 1 << 31)
    with RangeServer(folder.parent) as server:
        with pytest.raises(DataError, match=r"slab-00002\.h5: slab 2 of 2147483648 is missing"):
            open_map(f"{server.url}/data")
        assert len(server.requests) < 200


def test_a_slab_that_is_missing_is_named(folder, hsgd_data):
    (folder / "slab-00001.h5").unlink()
    with pytest.raises(DataError, match=r"slab-00001\.h5: slab 1 of 2 is missing"):
        open_map(folder)


@pytest.mark.parametrize("rows", MANY)
def test_checksums_of_more_rows_than_there_are_take_no_memory(
    folder, hsgd_data, little_memory, rows
):
    claim(folder, "checksum_rows", rows)
    if rows > 1 << 62:
        with pytest.raises(DataError, match=r"index\.h5: attribute checksum_rows is "):
            open_map(folder)
        return
    code, out, _ = hsgd_data("verify", folder, "--quiet")
    assert code == 0 and "all checksums right" in out
    found = collect(loader_of(folder, 5, as_numpy=True, verify=True))["number"]
    assert sorted(found.tolist()) == list(range(20))


@pytest.mark.parametrize(
    "name", ["num_slabs", "slab_index", "global_start", "num_samples", "checksum_rows"]
)
def test_numbers_beyond_64_bits_are_refused(folder, hsgd_data, name):
    claim(folder, name, np.uint64(2**64 - 1))
    for command in ("info", "verify"):
        assert name in one_line(*hsgd_data(command, folder))
