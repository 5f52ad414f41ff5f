"""Numbers that a damaged or hostile file claims are refused by one line, before memory is taken."""

from __future__ import annotations

import re
import resource
import shutil
import struct
import zlib
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hsgd.io import open_map
from hsgd.io.convert.find_damage import find_damage
from hsgd.io.convert.sources import Hdf5Source

from hdf5_samples import collect, make_slabs
from hsgd.errors import DataError
from loaders import loader_of
from toolkit.range_server import RangeServer

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


BOMB_BYTES = 1 << 30


def bomb():
    """A gzip stream of a MB with far more bytes."""
    packer = zlib.compressobj(1)
    parts = [packer.compress(bytes(64 << 20)) for _ in range(BOMB_BYTES >> 26)]
    return b"".join([*parts, packer.flush()])


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    """Files with a chunk of 512 bytes that inflates to a GB, which only h5py can read: by columns,
    behind a filter, and as the source of a virtual dataset or of a link; one with known filters.
    """
    home, data = tmp_path_factory.mktemp("bombs"), bomb()
    for name, shape, options in (
        ("columns", (64, 16), {"chunks": (64, 8), "scaleoffset": 0}),
        ("offset", (64, 8), {"chunks": (64, 8), "scaleoffset": 0}),
        ("known", (64, 16), {"chunks": (64, 8)}),
    ):
        with h5py.File(home / f"{name}.h5", "w") as file:
            made = file.create_dataset("x", shape, "u1", compression="gzip", **options)
            made[:] = 1
            made.id.write_direct_chunk((0, 0), data)
    with h5py.File(home / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((64, 8), "u1")
        layout[:] = h5py.VirtualSource(home / "offset.h5", "x", (64, 8))
        file.create_virtual_dataset("x", layout)
    with h5py.File(home / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink(str(home / "columns.h5"), "x")
    return home


@pytest.mark.parametrize("name", ["columns", "offset", "virtual", "link"])
def test_a_chunk_that_inflates_beyond_its_size_is_refused(
    bombs, tmp_path, hsgd_data, little_memory, name
):
    with pytest.raises(
        DataError, match=r"\.h5: /x: \d+ bytes are stored for the chunk at \(0, 0\)"
    ):
        list(loader_of(bombs / f"{name}.h5", 8, as_numpy=True))
    for words in (["info"], ["convert", tmp_path / "copy"]):
        line = one_line(*hsgd_data(words[0], bombs / f"{name}.h5", *words[1:]))
        assert "which has 512" in line


def test_a_chunk_that_inflates_beyond_its_size_is_not_decoded(bombs, hsgd_data, little_memory):
    with pytest.raises(DataError, match=r"known\.h5: the chunk .* does not end after 512 bytes"):
        list(loader_of(bombs / "known.h5", 8, as_numpy=True))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_chunk_that_is_shorter_than_its_rows_is_refused(tmp_path, hsgd_data, compression):
    """HDF5, which reads complex numbers, gives what lies behind it in the memory of the process."""
    path = tmp_path / "short.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (8, 8), "c8", chunks=(8, 4), compression=compression)[:] = 1
        if compression:
            file["x"].id.write_direct_chunk((0, 0), bytes(16), filter_mask=1)
    if not compression:
        data = bytearray(path.read_bytes())
        first_size = data.index(b"TREE\x01") + 24  # of the chunk's key in the B-tree
        assert data[first_size] == 0 and data[first_size + 1] == 1  # 8 * 4 * 8 bytes
        data[first_size : first_size + 2] = 16, 0
        path.write_bytes(data)
    with pytest.raises(
        DataError, match=r"16 bytes are stored for the chunk at \(0, 0\), which has"
    ):
        list(loader_of(path, 8, as_numpy=True))
    for words in (["info", path], ["convert", path, tmp_path / "copy"]):
        assert "16 bytes are stored for the chunk" in one_line(*hsgd_data(*words))


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize(
    ("column", "line"),
    [(8, "a chunk is stored at (0, 8), in byte"), (0, "two chunks are stored at (0, 0)")],
)
def test_a_chunk_at_the_place_of_none_or_of_another_is_refused(
    tmp_path, hsgd_data, compression, column, line
):
    """HDF5 gives fill values for the chunk that is missing then, or ends the process."""
    path = tmp_path / "outside.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (8, 8), "c8", chunks=(8, 4), compression=compression)[:] = 1
    data = bytearray(path.read_bytes())
    place = data.index(b"TREE\x01") + 24 + 40 + 16  # column of the second chunk, in its key
    assert data[place] == 4
    data[place] = column
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"x: {re.escape(line)}"):
        list(loader_of(path, 8, as_numpy=True))
    for words in (["info", path], ["convert", path, tmp_path / "copy"]):
        assert line in one_line(*hsgd_data(*words))


@pytest.mark.parametrize("columns", [4, 8])
def test_a_chunk_where_the_file_begins_is_refused(tmp_path, columns):
    """By HDF5 its rows are fill values, whether hsgd or h5py reads it."""
    path = tmp_path / "zero.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (8, 8), "i8", chunks=(8, columns))[:] = 1
    data = bytearray(path.read_bytes())
    address = data.index(b"TREE\x01") + 24 + 32
    data[address : address + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"zero\.h5: .*in byte 0|damaged, .* from byte 0 on"):
        list(loader_of(path, 8, as_numpy=True))


def test_rows_without_all_their_bytes_are_refused(tmp_path):
    """HDF5 gives what lies in its memory for those that are missing."""
    path = tmp_path / "short.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(70)
        place = struct.pack("<QQ", file["x"].id.get_offset(), 560)
    path.write_bytes(path.read_bytes().replace(place, place[:8] + struct.pack("<Q", 544)))
    with pytest.raises(DataError, match=r"/x has 544 bytes and its shape \(70,\) needs 560"):
        list(loader_of(path, 8, as_numpy=True))


def test_the_chunk_of_a_sample_that_lies_elsewhere_is_refused(tmp_path):
    path = tmp_path / "groups.h5"
    with h5py.File(path, "w") as file:
        for number in range(20):
            file.create_dataset(f"{number}/x", (4, 3), "u1", chunks=(4, 3))[:] = 1
    data = bytearray(path.read_bytes())
    key = data.index(b"TREE\x01", data.index(b"TREE\x01") + 1) + 24  # of the second sample
    data[key + 8] = 4
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"groups\.h5: damaged, the chunk of .*/x lies at \(4, 0\)"):
        open_map(path)


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
def test_a_chunk_far_larger_than_all_rows_is_refused(
    tmp_path, hsgd_data, little_memory, compression
):
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        options = {"maxshape": (None, 1024), "chunks": (1 << 17, 1024), "compression": compression}
        file.create_dataset("x", (8, 1024), "i8", **options)
    with pytest.raises(
        DataError, match=r"large\.h5: /x has chunks of \(131072, 1024\), 1073741824"
    ):
        list(loader_of(path, 8))
    for words in (["info", path], ["convert", path, tmp_path / "copy"]):
        assert "/x has chunks of" in one_line(*hsgd_data(*words))


def test_a_filter_that_is_applied_twice_is_refused(tmp_path):
    with h5py.File(tmp_path / "twice.h5", "w") as file:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_chunk((8, 8))
        create.set_deflate(4)
        create.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (4,))
        space = h5py.h5s.create_simple((8, 8))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT64, space, create)
    with pytest.raises(DataError, match=r"twice\.h5: /x applies a filter twice, \(1, 1\)"):
        open_map(tmp_path / "twice.h5")


def test_memory_that_cannot_be_had_is_an_error_with_file_and_field(tmp_path, little_memory):
    path = tmp_path / "huge.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1, 1 << 38), "u1", chunks=(1, 1 << 20), compression="gzip")
    source = Hdf5Source(path, None)
    with pytest.raises(DataError, match=r"huge\.h5: 1 rows of 'x' needs 274877906944 bytes of mem"):
        next(source.stream(source.specs[0], 1))


def test_an_order_that_fits_in_no_memory_is_an_error_with_file(tmp_path, little_memory):
    with h5py.File(tmp_path / "many.h5", "w") as file:
        file.create_dataset("x", (1 << 36,), "u1", chunks=(16,), compression="gzip")
    options = {"block_bytes": 1, "fill_unwritten": True, "as_numpy": True}
    with pytest.raises(DataError, match=r"many\.h5: the order of 68719476736 samples needs more"):
        loader_of(tmp_path / "many.h5", 8, **options)


@pytest.mark.parametrize("rows", [1 << 24, 1 << 28])
def test_checksum_blocks_that_fit_in_no_memory_are_an_error_with_file(
    folder, hsgd_data, little_memory, rows
):
    """A slab may be as large as it says, and still not fit."""
    data = open_map(folder)
    wide = tuple(replace(spec, shape=(rows, *spec.shape)) for spec in data.fields)
    with pytest.raises(DataError, match=r"its largest chunk or checksum block needs \d+ bytes"):
        list(find_damage(replace(data, fields=wide), threads=1))
