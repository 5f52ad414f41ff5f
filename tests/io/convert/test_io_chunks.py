"""Chunked and compressed datasets: read around HDF5, written by a conversion, never wrong."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hsgd.io import RowReader, convert_to_slabs, open_map
from hsgd.io.batches.scheduler import staging_bytes
from hsgd.io.convert import slab_folder_writer as writer
from hsgd.io.convert.find_damage import find_damage
from hsgd.io.format import plugin_codecs
from hsgd.io.format.chunk_compression import COMPRESSIONS
from hsgd.io.format.chunks import RUN_BYTES, chunks_of
from hsgd.io.format.filters import Filter, undo_filters

from hdf5_samples import arrays_of, collect, write_hdf5
from hsgd.errors import DataError, MissingExtra
from hsgd.tools import cli
from loaders import loader_of

hdf5plugin = pytest.importorskip("hdf5plugin")
torch = pytest.importorskip("torch")

NEITHER = {"direct": False, "verify": False}
TINY = {"block_bytes": 200, "window_bytes": 900}


def zeros_and_numbers(count):
    """Arrays that compress, with all kinds of types."""
    return {**arrays_of(count), "wide": np.arange(count * 4.0).reshape(count, 4) // 9}


FILTERS = {
    "none": ({}, "no filter"),
    "gzip": ({"compression": "gzip"}, "gzip"),
    "shuffle": ({"compression": "gzip", "shuffle": True}, "shuffle + gzip"),
    "blosc": (hdf5plugin.Blosc("lz4", 5, hdf5plugin.Blosc.SHUFFLE), "blosc"),
    "zstd": (hdf5plugin.Zstd(), "zstd"),
}
MORE = {
    **FILTERS,
    "lz4": (hdf5plugin.LZ4(), "lz4"),
    "lzf": ({"compression": "lzf", "shuffle": True}, "shuffle + lzf"),
    "bitshuffle lz4": (hdf5plugin.Bitshuffle(cname="lz4"), "bitshuffle"),
    "bitshuffle zstd": (hdf5plugin.Bitshuffle(cname="zstd"), "bitshuffle"),
    "bzip2": (hdf5plugin.BZip2(), "bzip2"),
    "several": (
        {"compression": "gzip", "shuffle": True, "fletcher32": True},
        "shuffle + gzip + fletcher32",
    ),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("shuffle", ["none", "block", "full"])
def test_chunked_files_are_read_in_place_around_hdf5(tmp_path, name, byteorder, shuffle):
    options, words = FILTERS[name]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for field, array in zeros_and_numbers(101).items():
            stored = array.astype(array.dtype.newbyteorder(byteorder))
            file.create_dataset(field, data=stored, chunks=(7, *array.shape[1:]), **options)
    assert set(open_map(tmp_path / "a.h5").read_by().values()) == {f"preadv + {words}"}
    seen = []
    for rank in range(2):
        loader = loader_of(tmp_path / "a.h5", 8, rank, 2, shuffle, pad=False, **TINY)
        found = collect(loader)
        for field, values in found.items():
            expected = zeros_and_numbers(101)[field][found["number"]]
            np.testing.assert_array_equal(values, expected)
        seen += found["number"].tolist()
        assert loader.metrics()["h5py_calls"] == 0
    assert sorted(seen) == list(range(101))


PARTS = {"halves": lambda n: -(-n // 2), "single": lambda n: 1, "larger": lambda n: n + 2}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_chunks_that_hold_parts_of_rows_are_read_around_hdf5(tmp_path, name, part, byteorder):
    options, words = MORE[name]
    numbers = np.arange(200)
    expected = {
        "number": numbers,
        "wide": np.repeat(numbers, 11).astype(np.int16).reshape(200, 11),
        "deep": np.repeat(numbers, 105).astype(np.float64).reshape(200, 5, 7, 3),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for field, array in expected.items():
            stored = array.astype(array.dtype.newbyteorder(byteorder))
            room = {"maxshape": (None,) * array.ndim} if part == "larger" else {}
            chunks = (70, *map(PARTS[part], array.shape[1:]))
            file.create_dataset(field, data=stored, chunks=chunks, **room, **options)
    loader = loader_of(tmp_path / "a.h5", 8, shuffle="block", **TINY)
    found = collect(loader)
    assert set(loader.metrics()["bypass"].values()) == {f"preadv + {words}"}
    assert sorted(found["number"]) == list(range(200))
    for field, values in found.items():
        np.testing.assert_array_equal(values, expected[field][found["number"]])


def test_bitshuffle_without_compression_is_undone(tmp_path):
    array = np.arange(64 * 33, dtype=np.int16).reshape(64, 33)
    options = hdf5plugin.Bitshuffle(cname="none")
    data = open_map(write_hdf5(tmp_path / "a.h5", {"x": array}, chunks=(16, 11), **options))
    assert data.read_by() == {"x": "preadv + bitshuffle"}
    out = np.empty_like(array)
    with RowReader(data) as reader:
        reader.read("x", 0, out)
    np.testing.assert_array_equal(out, array)


def test_chunks_of_h5pys_own_choice_are_read_around_hdf5(tmp_path):
    array = np.arange(300 * 90 * 70, dtype=np.int32).reshape(300, 90, 70)
    path = write_hdf5(tmp_path / "a.h5", {"x": array}, compression="gzip")
    with h5py.File(path) as file:
        assert file["x"].chunks[1:] != (90, 70)
    data = open_map(path)
    assert data.read_by() == {"x": "preadv + gzip"}
    out = np.empty((117, 90, 70), np.int32)
    with RowReader(data) as reader:
        reader.read("x", 101, out)
    np.testing.assert_array_equal(out, array[101:218])


def test_rows_of_chunks_that_take_too_much_memory_together_are_left_to_h5py(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", (1 << 14, 1 << 18), "u1", chunks=(1 << 13, 1 << 18))
        assert "missing" in chunks_of(made, 1 << 40)
        made = file.create_dataset("y", (1 << 14, 1 << 18), "u1", chunks=(1 << 13, 1 << 17))
        assert "hold parts of rows, and whole ones take 2147483648 bytes" in chunks_of(
            made, 1 << 40
        )


def test_the_memory_of_blocks_counts(tmp_path):
    array = np.zeros((8, 1000, 1000), np.uint8)
    write_hdf5(tmp_path / "whole.h5", {"x": array}, chunks=(4, 1000, 1000))
    write_hdf5(tmp_path / "parts.h5", {"x": array}, chunks=(4, 500, 1000))
    plain = staging_bytes(open_map(write_hdf5(tmp_path / "a.h5", {"x": array})), **NEITHER)
    whole = staging_bytes(open_map(tmp_path / "whole.h5"), **NEITHER)
    parts = staging_bytes(open_map(tmp_path / "parts.h5"), **NEITHER)
    assert whole - plain == 3 * 4_000_000  # as stored, between filters, decoded
    assert parts - plain == 3 * 2_000_000 + 4_000_000 + RUN_BYTES


def test_chunks_that_lie_together_are_read_together(tmp_path):
    array = np.arange(96).reshape(8, 12)
    path = write_hdf5(tmp_path / "a.h5", {"x": array}, chunks=(4, 3), compression="gzip")
    out = np.empty_like(array)
    with RowReader(open_map(path)) as reader:
        reader.read("x", 0, out)
        np.testing.assert_array_equal(out, array)
        assert reader.stats.preadv_calls <= 4  # of 8 chunks


def test_damage_in_a_part_of_rows_is_named(tmp_path):
    array = np.arange(60).reshape(10, 6)
    path = write_hdf5(tmp_path / "a.h5", {"x": array}, chunks=(4, 3), compression="gzip")
    position, nbytes = open_map(path).slabs[0].extents["x"].chunks.place(3)
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(b"\xff" * nbytes)
    out = np.empty((4, 6), np.int64)
    with RowReader(open_map(path)) as reader:
        reader.read("x", 0, out)
        np.testing.assert_array_equal(out, array[:4])
        with pytest.raises(DataError, match=f"the chunk at byte {position} of 'x' cannot be dec"):
            reader.read("x", 4, out)


def test_blocks_are_whole_chunks_and_each_is_read_once(tmp_path):
    write_hdf5(tmp_path / "a.h5", {"x": np.arange(84.0)}, chunks=(7,), compression="gzip")
    loader = loader_of(tmp_path / "a.h5", 5, shuffle="block", block_bytes=10, threads=1)
    assert sorted(collect(loader)["x"].tolist()) == list(range(84))
    assert loader.metrics()["preadv_calls"] == 12


OTHERS = {
    "scaleoffset": ({"scaleoffset": 0}, "filters (6,), only these are known"),
    "blosc2": (hdf5plugin.Blosc2(), "filters (32026,), only these are known"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_chunks_are_read_by_h5py_with_the_reason(tmp_path, name):
    options, reason = OTHERS[name]
    array = np.arange(60).reshape(10, 6)
    data = open_map(write_hdf5(tmp_path / "a.h5", {"x": array}, **options))
    assert reason in data.refusals()["x"]
    out = np.empty((10, 6), np.int64)
    with RowReader(data) as reader:
        reader.read("x", 0, out)
    np.testing.assert_array_equal(out, array)


def test_chunks_that_were_never_written_are_read_by_h5py(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", (20,), "i4", chunks=(5,), fillvalue=7)
        dataset[5:10] = 1
    assert "missing" in open_map(tmp_path / "a.h5").refusals()["x"]
    with pytest.warns(UserWarning, match="3 of 4 chunks were never written"):
        loader = loader_of(tmp_path / "a.h5", 20, shuffle="none", fill_unwritten=True)
    found = collect(loader)["x"].tolist()
    assert found == [7] * 5 + [1] * 5 + [7] * 10


def leave_the_edge_as_it_is(create):
    """Set H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS in a property list, which h5py has no name for."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in maps if re.search(r"/libhdf5[-.][^_]*$", line)}
    library = ctypes.CDLL(loaded.pop())
    assert library.H5Pset_chunk_opts(ctypes.c_int64(create.id), 2) >= 0


@pytest.mark.parametrize("rows", [8, 10])
@pytest.mark.parametrize("filters", [("gzip",), ("shuffle",), ("shuffle", "gzip")])
def test_a_chunk_at_the_edge_that_was_left_as_it_is_comes_out_right(tmp_path, rows, filters):
    """HDF5 does not say so in the mask of the chunk."""
    array = np.arange(3 * rows, dtype=np.int32).reshape(rows, 3)
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_chunk((4, 3))
        leave_the_edge_as_it_is(create)
        if "shuffle" in filters:
            create.set_shuffle()
        if "gzip" in filters:
            create.set_deflate(4)
        space = h5py.h5s.create_simple(array.shape)
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, create)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array)
    loader = loader_of(tmp_path / "a.h5", rows, shuffle="none", as_numpy=True)
    np.testing.assert_array_equal(collect(loader)["x"], array)
    how = loader.metrics()["bypass"]["x"]
    edge = "h5py: chunks at the edge may lie there without their filters"
    assert how == (edge if rows % 4 else f"preadv + {' + '.join(filters)}")


def with_chunk(path, chunk, **options):
    """A file of 100 numbers whose first chunk of 50 has these bytes."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=np.arange(100), chunks=(50,), **options)
        dataset.id.write_direct_chunk((0,), chunk)
    return path


def read_all(path):
    return collect(loader_of(path, 100, shuffle="none", as_numpy=True))["x"]


def stored_chunk(path, values, **options):
    """The bytes that HDF5 stores for a chunk."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=values, chunks=values.shape, **options)
        return dataset.id.read_direct_chunk((0,))[1]


@pytest.mark.parametrize("name", ["zstd", "lz4", "lzf", "blosc", "bitshuffle lz4", "bzip2"])
@pytest.mark.parametrize("count", [49, 51])
def test_a_frame_of_another_length_is_an_error_and_nothing_old_is_delivered(tmp_path, name, count):
    options, _ = MORE[name]
    reverse = stored_chunk(tmp_path / "c.h5", np.arange(50)[::-1].copy(), **options)
    good = with_chunk(tmp_path / "a.h5", reverse, **options)
    assert read_all(good).tolist() == [*range(50)[::-1], *range(50, 100)]
    other = stored_chunk(tmp_path / "d.h5", np.arange(count), **options)
    bad = with_chunk(tmp_path / "b.h5", other, **options)
    with pytest.raises(DataError, match=r"b\.h5: the chunk at byte \d+ of 'x' cannot be"):
        read_all(bad)


@pytest.mark.parametrize("length", [2**40, 399])
def test_a_frame_that_claims_another_length_takes_no_memory(tmp_path, length):
    zstd = bytes.fromhex("28b52ffd") + b"\xe0" + length.to_bytes(8, "little") + b"\x01\x00\x00"
    blocks = length.to_bytes(8, "big") + bytes.fromhex("00002000") + bytes(64)
    frames = {"zstd": zstd, "lz4": blocks, "bitshuffle lz4": blocks}
    for name, frame in frames.items():
        path = with_chunk(tmp_path / "a.h5", frame, **MORE[name][0])
        with pytest.raises(DataError, match=r"a\.h5: the chunk at byte .* cannot be decompressed"):
            read_all(path)


def test_a_wrong_fletcher32_checksum_is_an_error(tmp_path):
    chunk = stored_chunk(tmp_path / "c.h5", np.arange(50), fletcher32=True)
    swapped = chunk[:-4] + bytes(chunk[n] for n in (-3, -4, -1, -2))  # by HDF5 before 1.6.3
    for right in (chunk, swapped):
        path = with_chunk(tmp_path / "a.h5", right, fletcher32=True)
        assert read_all(path).tolist() == list(range(100))
    bad = bytes([chunk[0] ^ 1]) + chunk[1:]
    with pytest.raises(DataError, match="its Fletcher-32 checksum is wrong"):
        read_all(with_chunk(tmp_path / "b.h5", bad, fletcher32=True))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 719, 720, 721, 722, 99_999])
def test_the_fletcher32_checksum_is_that_of_hdf5(tmp_path, count):
    values = np.random.default_rng(count).integers(0, 256, count + 1, np.uint8)
    chunk = np.frombuffer(stored_chunk(tmp_path / "a.h5", values, fletcher32=True), np.uint8)
    found = undo_filters([Filter(3, ())], chunk, count + 1)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("item", [1, 2, 3, 4, 8, 16, 1000])
@pytest.mark.parametrize("count", [0, 1, 4097])
def test_items_are_unshuffled_with_what_is_left_of_them(item, count):
    planes = np.random.default_rng(item).integers(0, 256, (item, count), np.uint8)
    rest = np.arange(item - 1, dtype=np.uint8)
    shuffled = np.concatenate([planes.reshape(-1), rest])
    found = undo_filters([Filter(2, (item,))], shuffled, len(shuffled))
    np.testing.assert_array_equal(found, np.concatenate([planes.T.reshape(-1), rest]))


def test_a_gzip_stream_without_its_end_is_an_error(tmp_path):
    whole = zlib.compress(np.arange(50).tobytes())
    assert read_all(with_chunk(tmp_path / "a.h5", whole, compression="gzip"))[49] == 49
    path = with_chunk(tmp_path / "b.h5", whole[:-2], compression="gzip")
    with pytest.raises(DataError, match="it does not end after 400 bytes"):
        read_all(path)


class Listed:
    """A dataset of 10 rows in chunks of 4 whose index lists what it is given."""

    shape, chunks, dtype, name = (10,), (4,), np.dtype("i8"), "/x"
    file = SimpleNamespace(filename="a.h5")

    def __init__(self, chunks):
        found = [SimpleNamespace(chunk_offset=(n,), filter_mask=0, byte_offset=b, size=32)
                 for n, b in chunks]  # fmt: skip
        self.id = SimpleNamespace(
            get_num_chunks=lambda: len(found),
            chunk_iter=lambda call: [call(info) for info in found],
            get_create_plist=lambda: SimpleNamespace(get_nfilters=lambda: 0),
        )


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([(0, 8), (4, 32), (7, 64)], "a chunk at (7,), or two of them"),
        ([(0, 8), (4, 32), (12, 64)], "a chunk at (12,), or two of them"),
        ([(0, 8), (4, 32), (4, 64)], "a chunk at (4,), or two of them"),
        ([(0, 8), (4, 32)], "chunks are missing"),
    ],
)
def test_chunks_that_are_not_one_for_each_range_of_rows_are_left_to_h5py(chunks, found):
    assert chunks_of(Listed(chunks), 1000) == found


@pytest.mark.parametrize("start", [69, 2**64 - 1, None])
def test_a_chunk_beyond_the_file_is_an_error(start):
    assert chunks_of(Listed([(0, 8), (4, 32), (8, 68)]), 100).names == "no filter"
    with pytest.raises(DataError, match=r"a\.h5: truncated, a chunk of /x needs 32 bytes from"):
        chunks_of(Listed([(0, 8), (4, 32), (8, start)]), 100)


def test_a_shape_that_no_file_of_this_size_has_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (1 << 50,), "i8", chunks=(5,))
    with pytest.raises(DataError, match=r"a\.h5: /x claims the shape \(1125899906842624,\)"):
        open_map(tmp_path / "a.h5")


COMPLEX = """\
import pickle, sys
from hsgd.io import RowReader, open_map
from loaders import loader_of

if len(sys.argv) > 3:
    sys.modules["hdf5plugin"] = None
if sys.argv[2] == "open":
    data = open_map(sys.argv[1])
    sys.stdout.buffer.write(pickle.dumps(data))
else:  # a rank that did not examine the file
    import numpy as np
    data, out = pickle.load(sys.stdin.buffer), np.empty(100, np.complex64)
    RowReader(data).read("x", 0, out)
    print(out.sum(), "hdf5plugin" in sys.modules)
"""


def test_compressed_complex_numbers_need_no_import_by_the_user(tmp_path):
    """HDF5 has to read them, with a filter that it does not have of its own."""
    array = (np.arange(100) + 1j).astype(np.complex64)
    path = write_hdf5(tmp_path / "a.h5", {"x": array}, chunks=(10,), **hdf5plugin.Zstd())

    def run(*words, given=None):
        command = [sys.executable, "-c", COMPLEX, str(path), *words]
        return subprocess.run(command, input=given, capture_output=True, timeout=100, check=False)

    opened = run("open")
    assert opened.returncode == 0, opened.stderr
    read = run("read", given=opened.stdout)
    assert read.stdout.split() == [b"(4950+100j)", b"True"], read.stderr
    refused = run("open", "without").stderr.decode().splitlines()[-1]
    assert "a.h5: field 'x': HDF5 has no filter 32015 here; pip install" in refused


@pytest.fixture(scope="module", params=COMPRESSIONS)
def original(request, tmp_path_factory):
    """101 samples in 7 compressed slabs, chunks of 5."""
    folder = tmp_path_factory.mktemp("chunks")
    np.savez(folder / "a.npz", **zeros_and_numbers(101))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHECKSUM_BYTES", 5 * (8 + 24 + 5 + 1 + 32))
        convert_to_slabs(folder / "a.npz", folder / "data", num_slabs=7, compress=request.param)
    return folder / "data"


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "data")


@pytest.mark.parametrize("shuffle", ["none", "block"])
@pytest.mark.parametrize("verify", [False, True])
def test_compressed_slabs_give_every_sample_once(original, shuffle, verify):
    seen = []
    for rank in range(3):
        loader = loader_of(original, 8, rank, 3, shuffle, pad=False, verify=verify, **TINY)
        found = collect(loader)
        for field, values in found.items():
            expected = zeros_and_numbers(101)[field][found["number"]]
            np.testing.assert_array_equal(values, expected)
        seen += found["number"].tolist()
    assert sorted(seen) == list(range(101))


def test_stock_h5py_with_the_plugin_reads_slabs_and_index(original):
    with h5py.File(original / "index.h5") as file:
        numbers = file["number"][:]
        np.testing.assert_array_equal(file["wide"][:], zeros_and_numbers(101)["wide"][numbers])
    assert sorted(numbers.tolist()) == list(range(101))
    with h5py.File(original / "slab-00002.h5") as file:
        assert file["wide"].chunks == (5, 4)
        assert len(file["wide"].attrs["crc32c"]) == 3


def test_compressed_slabs_are_those_of_plain_ones_otherwise(original, tmp_path):
    convert_to_slabs(original, tmp_path / "plain", num_slabs=7, permute=False)
    found = collect(loader_of(tmp_path / "plain", 101, shuffle="none"))
    expected = collect(loader_of(original, 101, shuffle="none"))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_chunks_that_do_not_get_smaller_are_stored_as_they_are(tmp_path, compress):
    noise = np.random.default_rng(0).integers(0, 256, (50, 999), np.uint8)
    np.savez(tmp_path / "a.npz", noise=noise, zeros=np.zeros((50, 999), np.uint8))
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", permute=False, compress=compress)
    extents = open_map(tmp_path / "out").slabs[0].extents
    applied = {name: len(extent.chunks.applied(0)) for name, extent in extents.items()}
    assert applied == {"noise": 0, "zeros": 1}
    loader = loader_of(tmp_path / "out", 50, shuffle="none", as_numpy=True, verify=True)
    np.testing.assert_array_equal(collect(loader)["noise"], noise)
    with h5py.File(tmp_path / "out/index.h5") as file:
        np.testing.assert_array_equal(file["noise"][:], noise)


def test_slabs_whose_chunks_a_tool_has_changed_are_checked_all_the_same(folder):
    with h5py.File(folder / "slab-00002.h5", "r+") as file:
        values, attributes = file["wide"][...], dict(file["wide"].attrs)
        del file["wide"]
        file.create_dataset("wide", data=values, chunks=(3, 4)).attrs.update(attributes)
    assert list(find_damage(open_map(folder))) == []
    found = collect(loader_of(folder, 8, verify=True, **TINY))
    expected = zeros_and_numbers(101)["wide"][found["number"]]
    np.testing.assert_array_equal(found["wide"], expected)
    position, _ = open_map(folder).slabs[2].extents["wide"].chunks.place(1)
    (line,) = list(find_damage(open_map(_spoilt(folder, position))))
    assert "the checksum of the block at byte" in line


def test_damage_in_a_chunk_is_found_and_never_delivered(folder):
    data = open_map(folder)
    assert list(find_damage(data)) == []
    position, nbytes = data.slabs[2].extents["wide"].chunks.place(1)
    path = folder / "slab-00002.h5"
    for place in range(0, nbytes, 7):
        content = bytearray(path.read_bytes())
        content[position + place] ^= 8
        damaged = folder / "damaged.h5"
        damaged.write_bytes(content)
        damaged.replace(path)
        (line,) = list(find_damage(open_map(folder)))
        assert "the ch" in line and f"at byte {position} of 'wide'" in line
        loader = loader_of(folder, 1, shuffle="none", verify=True, on_error="skip")
        with pytest.warns(UserWarning, match="5 of 101 batches"):
            assert len(list(loader)) == 96
        content[position + place] ^= 8
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"slab-00002\.h5"):
        list(loader_of(_spoilt(folder, position), 4, verify=True))


def _spoilt(folder, position):
    with open(folder / "slab-00002.h5", "r+b") as file:
        file.seek(position)
        file.write(b"\xff" * 8)
    return folder


def test_the_command_compresses_and_says_so(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((5000, 30)))
    words = ["data", "convert", str(tmp_path / "x.npy"), str(tmp_path / "out")]
    assert cli.main([*words, "--compress", "zstd", "--quiet"]) == 0
    assert cli.main(["data", "info", str(tmp_path / "out")]) == 0
    assert "preadv + blosc, around HDF5" in capsys.readouterr().out
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert size < 5000 * 30 * 8
    assert cli.main(["data", "verify", str(tmp_path / "out"), "--quiet"]) == 0


def test_a_compression_that_is_not_there_is_named(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.zeros(10))
    with pytest.raises(ValueError, match="compress='rar'; use one of 'gzip', 'lz4', 'zstd'"):
        convert_to_slabs(tmp_path / "x.npy", tmp_path / "out", compress="rar")
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(MissingExtra, match=r"hdf5plugin .*pip install hdf5plugin"):
        convert_to_slabs(tmp_path / "x.npy", tmp_path / "out", compress="zstd")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_codecs_that_are_not_there_leave_chunks_to_h5py(tmp_path, monkeypatch):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.arange(9)}, **hdf5plugin.Zstd())
    plugin_codecs._codec.cache_clear()
    monkeypatch.setattr(hdf5plugin, "PLUGIN_PATH", str(tmp_path))
    assert "zstd needs hdf5plugin" in open_map(path).refusals()["x"]
