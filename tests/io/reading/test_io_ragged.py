"""Ragged fields: samples of different lengths, as values and offsets."""

from __future__ import annotations

import shutil

import h5py
import numpy as np
import pytest
from hsgd.io import (
    PartitionedDataset,
    Ragged,
    RowReader,
    convert_to_slabs,
    open_map,
)
from hsgd.io.convert import shuffle_passes
from hsgd.io.convert import slab_folder_writer as writer
from hsgd.io.convert.find_damage import find_damage
from hsgd.io.format.ragged import join, offsets_of, ragged_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hsgd.errors import DataError
from hsgd.tools import cli
from loaders import grouped, loader_of

torch = pytest.importorskip("torch")

TINY = {"block_bytes": 300, "window_bytes": 900}


def length_of(number):
    """Elements of sample `number`: many are empty, some are long."""
    return (number * 7919) % 23 if number % 4 else 0


def sample(number):
    return (np.arange(length_of(number)) + number).astype(np.int32)


def vectors(number):
    return np.full((number % 3, 2), number, np.float32)


def write_vlen(path, count):
    """An HDF5 file with a plain field and two of variable length."""
    with h5py.File(path, "w") as file:
        file["number"] = np.arange(count)
        tokens = file.create_dataset("tokens", (count,), h5py.vlen_dtype(np.int32))
        pixels = file.create_dataset("in/bytes", (count,), h5py.vlen_dtype(np.uint8))
        for number in range(count):
            tokens[number] = sample(number)
            pixels[number] = sample(number + 1) % 251
    return path


def make(folder, compress=None):
    """101 samples in 7 slabs, a checksum, and four chunks if there are any, for each few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHECKSUM_BYTES", 200)
        patch.setattr(shuffle_passes, "BLOCK_BYTES", 100)
        source = write_vlen(folder / "a.h5", 101)
        convert_to_slabs(source, folder / "data", num_slabs=7, compress=compress)
    return folder / "data"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make(tmp_path_factory.mktemp("ragged"))


@pytest.fixture(scope="module", params=["plain", "gzip", "zstd"])
def stored(request, tmp_path_factory):
    """As `original`, and in compressed slabs, whose chunks end within samples."""
    if request.param == "zstd":
        pytest.importorskip("hdf5plugin")
    compress = None if request.param == "plain" else request.param
    folder = make(tmp_path_factory.mktemp("stored"), compress)
    extents = [slab.extents["tokens"] for slab in open_map(folder).slabs]
    for extent in extents if compress else ():
        assert extent.chunks.rows < extent.offsets.longest
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "data")


def check(batch):
    """Every sample of a batch is whole and belongs to its number."""
    numbers = np.asarray(batch["number"]).tolist()
    for name, values in (("tokens", sample), ("in/bytes", lambda n: sample(n + 1) % 251)):
        field = batch[name]
        assert len(field) == len(numbers)
        assert int(field.offsets[0]) == 0
        for number, found in zip(numbers, field, strict=True):
            np.testing.assert_array_equal(np.asarray(found), values(number))
    return numbers


@pytest.mark.parametrize("batch_size", [1, 8, 200])
@pytest.mark.parametrize(
    ("shuffle", "options"),
    [
        *((shuffle, {}) for shuffle in ("none", "block", "full")),
        *((shuffle, {"direct": True}) for shuffle in ("none", "block", "full")),
        *((shuffle, {"verify": True}) for shuffle in ("none", "block")),
        ("block", {"threads": 1}),
    ],
)
def test_every_sample_comes_once_and_whole(original, shuffle, options, batch_size):
    seen = []
    for rank in range(3):
        loader = loader_of(original, batch_size, rank, 3, shuffle, pad=False, **TINY, **options)
        for batch in loader:
            seen += check(batch)
    assert sorted(seen) == list(range(101))


def test_batches_are_tensors_over_the_ring_that_live_as_long_as_they_are_kept(original):
    loader = loader_of(original, 4, **TINY, memory_limit=8 << 20)
    kept = list(loader)
    assert sorted(number for batch in kept for number in check(batch)) == list(range(101))
    values = kept[0]["tokens"].values
    assert isinstance(values, torch.Tensor)
    assert values.dtype == torch.int32
    nested = torch.nested.nested_tensor_from_jagged(values, kept[0]["tokens"].offsets)
    assert [len(row) for row in nested.unbind()] == kept[0]["tokens"].lengths.tolist()


def test_resume_gives_the_rest(original):
    first = loader_of(original, 5, **TINY)
    iteration = iter(first)
    begun = [number for _ in range(4) for number in check(next(iteration))]
    state = first.state_dict()
    iteration.close()
    second = loader_of(original, 5, **TINY)
    second.load_state_dict(state)
    rest = [number for batch in second for number in check(batch)]
    assert sorted(begun + rest) == list(range(101))


def test_single_samples_come_through_the_dataset_of_torch(original):
    found = [
        (int(item["number"]), item["tokens"].tolist())
        for item in PartitionedDataset(original, read_batch=7, **grouped(TINY))
    ]
    assert sorted(found) == [(number, sample(number).tolist()) for number in range(101)]


def test_the_index_shows_one_list_of_values_and_offsets_to_stock_h5py(stored):
    with h5py.File(stored / "index.h5") as file:
        numbers = file["number"][:]
        values, offsets = file["tokens/values"][:], file["tokens/offsets"][:]
    assert len(offsets) == 102
    for place, number in enumerate(numbers):
        np.testing.assert_array_equal(values[offsets[place] : offsets[place + 1]], sample(number))


def test_the_reader_gives_ranges_across_chunks_and_slabs(stored):
    data = open_map(stored)
    with RowReader(data) as reader:
        numbers = np.empty(101, np.int64)
        reader.read("number", 0, numbers)
        for start, count in ((0, 101), (13, 20), (100, 1), (50, 0)):
            found = reader.read_ragged("tokens", start, count)
            assert [row.tolist() for row in found] == [
                sample(n).tolist() for n in numbers[start : start + count]
            ]


def test_slabs_with_ragged_fields_can_be_converted_anew(original, tmp_path):
    convert_to_slabs(original, tmp_path / "again", num_slabs=3, seed=9)
    seen = [n for batch in loader_of(tmp_path / "again", 9) for n in check(batch)]
    assert sorted(seen) == list(range(101))


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_samples_that_are_all_empty_are_a_field_too(tmp_path, compress):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["number"] = np.arange(40)
        tokens = file.create_dataset("tokens", (40,), h5py.vlen_dtype(np.int32))
        tokens[:] = [np.empty(0, np.int32)] * 40
    convert_to_slabs(tmp_path / "a.h5", tmp_path / "out", num_slabs=4, compress=compress)
    assert list(find_damage(open_map(tmp_path / "out"))) == []
    batches = list(loader_of(tmp_path / "out", 8, verify=True))
    assert [batch["tokens"].offsets.tolist() for batch in batches] == [[0] * 9] * 5
    with h5py.File(tmp_path / "out/index.h5") as file:
        assert file["tokens/values"].shape == (0,)
        assert file["tokens/offsets"][:].tolist() == [0] * 41


def test_members_of_different_lengths_in_a_tar_file_are_ragged(tmp_path):
    import io
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(30):
            array = io.BytesIO()
            np.save(array, vectors(number))
            for name, data in (
                ("cls", str(number).encode()),
                ("v.npy", array.getvalue()),
                ("txt", b"x" * number),
            ):
                member = tarfile.TarInfo(f"{number:03d}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    convert_to_slabs(tmp_path / "a.tar", tmp_path / "out", num_slabs=3)
    for batch in loader_of(tmp_path / "out", 7, as_numpy=True):
        for number, found, text in zip(batch["cls"], batch["v.npy"], batch["txt"], strict=True):
            np.testing.assert_array_equal(found, vectors(int(number)))
            assert bytes(text) == b"x" * int(number)


def test_columns_of_lists_in_a_parquet_file_are_ragged(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [sample(number).tolist() for number in range(50)]
    table = pyarrow.table({"number": np.arange(50), "tokens": rows})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    convert_to_slabs(tmp_path / "a.parquet", tmp_path / "out", num_slabs=3)
    for batch in loader_of(tmp_path / "out", 7, as_numpy=True):
        for number, found in zip(batch["number"], batch["tokens"], strict=True):
            np.testing.assert_array_equal(found, sample(int(number)))


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["values", "offsets"])
def test_damage_is_found_and_never_delivered(folder, what):
    extent = open_map(folder).slabs[2].extents["tokens"]
    place = extent.offset if what == "values" else extent.offsets.offset + 8 * 3
    flip(folder / "slab-00002.h5", place)
    (line,) = list(find_damage(open_map(folder)))[:1]
    assert "slab-00002.h5" in line
    with pytest.raises(DataError, match=r"slab-00002\.h5: .*(checksum|damaged)"):
        list(map(check, loader_of(folder, 4, verify=True, **TINY)))
    loader = loader_of(folder, 4, verify=True, on_error="skip", **TINY)
    with pytest.warns(UserWarning, match="batches of this epoch were left out"):
        seen = [number for batch in loader for number in check(batch)]
    assert 60 < len(seen) < 101


@pytest.mark.parametrize("byte", [8 * 2 + 7, 8 * 2 + 2, 8 * 2])
def test_offsets_that_point_astray_never_write_outside_of_a_batch(folder, byte):
    offsets = open_map(folder).slabs[2].extents["tokens"].offsets
    flip(folder / "slab-00002.h5", offsets.offset + byte)
    message = "slab-00002.h5: the offsets of samples"
    try:
        for batch in loader_of(folder, 4, **TINY):
            assert int(batch["tokens"].offsets[-1]) == len(batch["tokens"].values)
    except DataError as error:
        message = str(error)
    assert "slab-00002.h5: the offsets of samples" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("longest_sample", np.int64(-1)),
        ("longest_sample", np.int64(10**9)),
        ("largest_block", np.zeros(3)),
        ("largest_block", np.int64(1)),
    ],
)
def test_wrong_attributes_are_refused(folder, name, value):
    with h5py.File(folder / "slab-00002.h5", "r+") as file:
        file["tokens"].attrs[name] = value
    with pytest.raises(DataError, match=r"slab-00002\.h5: ragged field 'tokens'"):
        open_map(folder)


def store_anew(folder, **options):
    """Values of one slab in another form, as h5repack does it."""
    with h5py.File(folder / "slab-00002.h5", "r+") as file:
        old = file["tokens/values"]
        values, attributes = old[...], dict(old.attrs)
        del file["tokens/values"]
        new = file["tokens"].create_dataset("values", data=values, **options)
        new.attrs.update(attributes)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"chunks": (16,), "scaleoffset": 0}, r"filters \(6,\), only these are known"),
        ({"dtype": ">i4"}, "its values are in another byte order"),
    ],
)
def test_values_that_a_tool_has_stored_otherwise_are_refused(folder, options, why):
    store_anew(folder, **options)
    with pytest.raises(DataError, match=rf"ragged field 'tokens': {why}"):
        open_map(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (16,)},
        {"chunks": (16,), "compression": "gzip"},
        {"chunks": (1,), "compression": "gzip", "shuffle": True},
        {"chunks": (16,), "compression": "lzf", "fletcher32": True},
        {"chunks": (500,), "maxshape": (None,), "dtype": ">i4", "compression": "gzip"},
    ],
)
def test_values_that_a_tool_has_put_into_chunks_are_read_and_checked(folder, options):
    store_anew(folder, **options)
    assert list(find_damage(open_map(folder))) == []
    for verify in (False, True):
        loader = loader_of(folder, 8, verify=verify, **TINY)
        assert sorted(number for batch in loader for number in check(batch)) == list(range(101))


def test_info_and_verify_know_ragged_fields(folder, capsys):
    assert cli.main(["data", "info", str(folder)]) == 0
    assert "(any)" in (text := capsys.readouterr().out) and "int32" in text
    assert cli.main(["data", "verify", str(folder), "--quiet"]) == 0


def test_what_cannot_be_done_is_refused(original, tmp_path):
    with pytest.raises(ValueError, match="another of ragged field 'in/bytes'"):
        loader_of(original, 4, on_error="substitute")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2, 2), h5py.vlen_dtype(np.int32))
    with pytest.raises(DataError, match=r"'x' has shape \(2, 2\) of variable-length"):
        convert_to_slabs(tmp_path / "a.h5", tmp_path / "out")


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=12), st.randoms())
def test_ragged_arithmetic_is_that_of_lists(rows, random):
    found = ragged_of([np.array(row, np.int64) for row in rows], (), np.dtype(np.int64))
    assert [row.tolist() for row in found] == rows
    chosen = random.sample(range(len(rows)), len(rows) // 2)
    taken = found.take(np.array(chosen, np.int64))
    assert [row.tolist() for row in taken] == [rows[place] for place in chosen]
    low = random.randint(0, len(rows))
    assert [row.tolist() for row in found.part(low, len(rows))] == rows[low:]
    both = join([found, taken])
    assert isinstance(both, Ragged)
    assert [row.tolist() for row in both] == rows + [rows[place] for place in chosen]
    assert offsets_of(both.lengths).tolist() == both.offsets.tolist()
