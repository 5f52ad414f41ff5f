"""Packed windows: every element once, and where documents begin in each batch."""

from __future__ import annotations

import functools
import pickle
import shutil

import h5py
import numpy as np
import pytest
from hsgd.io import PartitionedDataset, RowReader, convert_to_slabs, open_map
from hsgd.io.batches import segment_finder
from hsgd.io.batches.filler import Filler
from hsgd.io.convert import slab_folder_writer as writer
from hsgd.io.reading import row_copies
from hypothesis import given, settings
from hypothesis import strategies as st

from hsgd.errors import DataError
from loaders import grouped, loader_of
from ranks import Ranks, meeting_point

torch = pytest.importorskip("torch")

TINY = {"block_bytes": 300, "window_bytes": 900}
TOKENS = {"fields": ["tokens"], **TINY}
COUNT = 101


def length_of(number):
    """Elements of document `number`: many are empty, some are long."""
    return 0 if number % 4 == 0 else (number * 7919) % 61


def write_documents(path, lengths, dtype=np.int32):
    """Documents of consecutive numbers, and two fields beside them."""
    with h5py.File(path, "w") as file:
        tokens = file.create_dataset("tokens", (len(lengths),), h5py.vlen_dtype(dtype))
        mask = file.create_dataset("mask", (len(lengths),), h5py.vlen_dtype(np.uint8))
        other = file.create_dataset("other", (len(lengths),), h5py.vlen_dtype(np.uint8))
        file["label"] = np.arange(len(lengths))
        first = 0
        for number, length in enumerate(lengths):
            tokens[number] = np.arange(first, first + length).astype(dtype)
            mask[number] = tokens[number] % 7
            other[number] = np.zeros(length + 1)
            first += length
    return path


def make(folder, lengths, *, slabs=7, compress=None, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHECKSUM_BYTES", 200)
        source = write_documents(folder / "a.h5", lengths, **options)
        convert_to_slabs(source, folder / "data", num_slabs=slabs, compress=compress)
    return folder / "data"


@pytest.fixture(scope="module", params=[None, "gzip"])
def stored(request, tmp_path_factory):
    lengths = [length_of(number) for number in range(COUNT)]
    return make(tmp_path_factory.mktemp("packed"), lengths, compress=request.param)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    lengths = [length_of(number) for number in range(COUNT)]
    return make(tmp_path_factory.mktemp("packed"), lengths)


@pytest.fixture(scope="module")
def pool():
    with Ranks(3) as ranks:
        yield ranks


@functools.cache
def read_whole(folder):
    """All elements in the order of the files, and where documents begin among them."""
    data = open_map(folder, ["tokens"])
    with RowReader(data) as reader:
        whole = reader.read_ragged("tokens", 0, data.num_samples)
    return whole.values, whole.offsets


def check(batch, folder, length):
    """The numbers of the windows of a batch; they, and their segments, are those of the files."""
    stream, offsets = read_whole(folder)
    rows, found = np.asarray(batch["tokens"]), np.asarray(batch["cu_seqlens"])
    assert rows.shape[1:] == (length,)
    assert found.dtype == np.int32
    place_of = np.argsort(stream)
    firsts = place_of[rows[:, 0]] if len(rows) else np.empty(0, np.int64)
    assert not (firsts % length).any()
    expected = {rows.size}
    for number, (first, row) in enumerate(zip(firsts.tolist(), rows, strict=True)):
        np.testing.assert_array_equal(row, stream[first : first + length])
        inside = offsets[(offsets > first) & (offsets < first + length)] - first
        expected |= {number * length, *(number * length + inside).tolist()}
    assert found.tolist() == sorted(expected)
    return (firsts // length).tolist()


@pytest.mark.parametrize("shuffle", ["none", "block", "slabs", "full"])
@pytest.mark.parametrize("length", [1, 13, 64, 500])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_window_comes_once_with_its_segments(stored, shuffle, length, world_size):
    total = len(read_whole(stored)[0])
    seen, steps = [], set()
    for rank in range(world_size):
        options = {"local_size": 1} if shuffle == "slabs" else {}
        loader = loader_of(
            stored, 4, rank, world_size, shuffle, pack=length, pad=False, **TOKENS, **options
        )
        batches = list(loader)
        steps.add(len(batches))
        seen += [n for batch in batches for n in check(batch, stored, length)]
    assert sorted(seen) == list(range(total // length))
    assert len(steps) == 1
    assert loader.metrics()["tail"] == total % length


def test_in_order_the_windows_are_the_stream(stored):
    batches = list(loader_of(stored, 7, shuffle="none", pack=20, **TOKENS))
    found = np.concatenate([np.asarray(batch["tokens"]).reshape(-1) for batch in batches])
    np.testing.assert_array_equal(found, read_whole(stored)[0][: len(found)])


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_one_document_is_cut_into_windows_without_more_segments(tmp_path, dtype):
    folder = make(tmp_path, [1000], slabs=1, dtype=dtype)
    batches = list(loader_of(folder, 4, shuffle="none", pack=33, as_numpy=True, **TOKENS))
    assert [batch["cu_seqlens"].tolist() for batch in batches[:-1]] == [[0, 33, 66, 99, 132]] * 7
    found = np.concatenate([batch["tokens"] for batch in batches])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.reshape(-1), np.arange(990))


def test_windows_reach_over_several_slabs(tmp_path):
    folder = make(tmp_path, [3] * 20, slabs=20)
    (batch,) = loader_of(folder, 8, shuffle="none", pack=25, as_numpy=True, **TOKENS)
    np.testing.assert_array_equal(batch["tokens"].reshape(-1), read_whole(folder)[0][:50])
    assert batch["cu_seqlens"].tolist() == sorted({*range(0, 50, 3), 25, 50})


@pytest.mark.parametrize(
    ("lengths", "length", "ranks", "text"),
    [
        ([5, 0, 7], 13, 1, "12 elements of 'tokens', less than a window; use at most 12"),
        ([0, 0, 0], 1, 1, "has no elements"),
        ([5, 0, 7], 6, 3, "2 samples for 3 ranks"),
        ([5, 0, 7], 0, 1, "pack=0; use at least 1"),
    ],
)
def test_what_makes_no_window_for_every_rank_is_refused(tmp_path, lengths, length, ranks, text):
    folder = make(tmp_path, lengths, slabs=2)
    with pytest.raises(ValueError, match=text):
        loader_of(folder, 4, 0, ranks, pack=length, fields=["tokens"])


def test_fields_with_equal_lengths_are_packed_together(original):
    for batch in loader_of(original, 5, pack=10, fields=["tokens", "mask"], **TINY):
        check(batch, original, 10)
        assert sorted(batch) == ["cu_seqlens", "mask", "tokens"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fields": None}, ValueError, "those of 'mask' and 'other' differ in .*slab-00000"),
        ({"fields": ["tokens", "label"]}, ValueError, "label is none"),
        ({"pack": "8"}, TypeError, "pack='8'; use the number of elements"),
        ({"batch_size": 1 << 28}, ValueError, "cu_seqlens counts to 2147483647"),
        ({"verify": True}, ValueError, "checksums cover whole documents"),
        ({"on_error": "substitute"}, ValueError, "cu_seqlens of other windows"),
    ],
)
def test_what_cannot_be_packed_is_refused(original, options, error, text):
    with pytest.raises(error, match=text):
        loader_of(original, **{"batch_size": 4, "pack": 8, "fields": ["tokens"], **options})


def test_resume_gives_the_rest_on_another_number_of_ranks(original):
    windows = len(read_whole(original)[0]) // 10
    options = {"pack": 10, "fields": ["tokens"], "pad": False, **TINY}
    seen, state = [], None
    for world_size, steps in ((3, 4), (2, 5), (1, 10**6)):
        loaders = [
            loader_of(original, 5, rank, world_size, **options) for rank in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for loader in loaders:
            iteration = iter(loader)
            for _ in range(min(steps, loader.steps_left)):
                seen += check(next(iteration), original, 10)
            iteration.close()
        state = loaders[0].state_dict()
    assert sorted(seen) == list(range(windows))
    with pytest.raises(ValueError, match="of another dataset"):
        loader_of(original, 5, pack=11, fields=["tokens"], **TINY).load_state_dict(state)


def test_loaders_travel_to_workers_of_torch(original):
    loader = pickle.loads(pickle.dumps(loader_of(original, 5, pack=10, fields=["tokens"])))
    windows = sorted(n for batch in loader for n in check(batch, original, 10))
    dataset = PartitionedDataset(original, 5, pack=10, fields=["tokens"], **grouped(TINY))
    batches = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(n for batch in batches for n in check(batch, original, 10)) == windows
    with pytest.raises(ValueError, match="pack= gives batches"):
        PartitionedDataset(original, pack=10, fields=["tokens"])


def read_cached(seat, folder, path):
    loader = loader_of(
        folder,
        5,
        seat.rank,
        3,
        comm=seat.comm(path, 3),
        pad=False,
        pack=10,
        fields=["tokens"],
        cache_bytes=1 << 20,
        **TINY,
    )
    return [
        [{name: np.array(values) for name, values in batch.items()} for batch in loader],
        loader.metrics()["cached_slabs"],
    ]


@pytest.mark.long
def test_windows_come_out_of_the_memory_of_the_node(pool, stored):
    found = pool.run(read_cached, stored, meeting_point())
    seen = [n for batches, _ in found for batch in batches for n in check(batch, stored, 10)]
    assert sorted(seen) == list(range(len(read_whole(stored)[0]) // 10))
    assert all(slabs == 7 for _, slabs in found)


def test_windows_that_lie_in_two_files_call_no_more_threads(original, monkeypatch):
    work, calls = row_copies.TaskBatch.work, []

    def of_the_page_cache(self, staging):
        was_last = work(self, staging)
        self.tasks["slept"] = 0
        return was_last

    monkeypatch.setattr(row_copies.TaskBatch, "work", of_the_page_cache)
    monkeypatch.setattr(Filler, "_want_threads", lambda self, waits: calls.append(waits))
    loader = loader_of(original, 5, pack=10, fields=["tokens"])
    seen = [n for batch in loader for n in check(batch, original, 10)]
    assert sorted(seen) == list(range(len(read_whole(original)[0]) // 10))
    assert calls and not any(calls)


def damage_offsets(folder, tmp_path):
    """A copy of `folder` in which the offsets of slab 3 lead astray."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    slab = open_map(copy, ["tokens"]).slabs[3]
    with open(slab.path, "r+b") as file:
        file.seek(slab.extents["tokens"].offsets.offset + 8 * (slab.count // 2))
        file.write(np.int64(1 << 40).tobytes())
    return copy


def test_damaged_offsets_are_an_error_or_left_out(original, tmp_path):
    folder = damage_offsets(original, tmp_path)
    options = {"shuffle": "none", "pack": 10, "fields": ["tokens"], **TINY}
    with pytest.raises(DataError, match=r"slab-00003\.h5: the offsets of samples .*batch \d+ of"):
        list(loader_of(folder, 5, **options))
    loader = loader_of(folder, 5, on_error="skip", **options)
    with pytest.warns(UserWarning, match="were left out"):
        seen = [n for batch in loader for n in check(batch, original, 10)]
    assert 0 < loader.metrics()["skipped"] < len(loader)
    assert len(seen) == len(set(seen))


@settings(max_examples=30)
@given(few=st.integers(1, 9), first=st.integers(0, 2000), count=st.integers(0, 700))
def test_documents_are_found_by_search(original, few, first, count):
    stream, offsets = read_whole(original)
    stop = min(first + count, len(stream))
    with pytest.MonkeyPatch.context() as patch, RowReader(open_map(original, ["tokens"])) as reader:
        patch.setattr(segment_finder, "_FEW", few)
        found = segment_finder.documents_between(reader, "tokens", first, stop)
    inside = offsets[:-1][(offsets[:-1] >= first) & (offsets[:-1] < stop)]
    assert found.tolist() == [n for n in np.unique(inside).tolist() if n < len(stream)]
