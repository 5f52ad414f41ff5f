"""The node's memory for slabs: read once, the same samples, and whose turn it is."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from hsgd.io import PartitionedDataset, ReadOptions, convert_to_slabs, open_map
from hsgd.io.cache.seats import seats_of
from hsgd.io.convert import slab_folder_writer as writing

from hdf5_samples import arrays_of, collect, make_ragged_slabs, make_slabs, tokens_of
from loaders import loader_of
from ranks import Ranks, meeting_point

torch = pytest.importorskip("torch")

TINY = {"block_bytes": 200, "window_bytes": 900, "as_numpy": True}
ROW_BYTES = 8 + 24 + 5 + 1


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """120 samples in 12 slabs of 10, with a checksum for each 4 samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "CHECKSUM_BYTES", 4 * ROW_BYTES)
        return make_slabs(tmp_path_factory.mktemp("cache") / "data", 120, 12)


@pytest.fixture(scope="module")
def pool():
    with Ranks(3) as ranks:
        yield ranks


def read_epochs(seat, folder, path, epochs, options):
    """Numbers of each epoch, whether all fields fit them, and the figures after each epoch."""
    loader = loader_of(
        folder, 7, seat.rank, 3, comm=seat.comm(path, 3), pad=False, **TINY, **options
    )
    numbers, stats = [], []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        found = collect(loader)
        for name, values in found.items():
            np.testing.assert_array_equal(values, arrays_of(120)[name][found["number"]])
        numbers.append(found["number"].tolist())
        stats.append(loader.metrics())
    return numbers, stats


@pytest.mark.long
@pytest.mark.parametrize("shuffle", ["block", "slabs", "none", "full"])
def test_each_slab_is_read_once_by_one_rank_of_the_node(pool, original, shuffle):
    options = {"shuffle": shuffle, "cache_bytes": 1 << 20}
    found = pool.run(read_epochs, original, meeting_point(), 3, options)
    plain = pool.run(read_epochs, original, meeting_point(), 3, {"shuffle": shuffle})
    assert [numbers for numbers, _ in found] == [numbers for numbers, _ in plain]
    for epoch in range(3):
        assert sorted(n for numbers, _ in found for n in numbers[epoch]) == list(range(120))
        stats = [of_rank[epoch] for _, of_rank in found]
        assert sum(s["cache_bytes"] for s in stats) == 120 * ROW_BYTES
        assert {s["cached_slabs"] for s in stats} == {12}
        assert {s["bytes_read"] for s in stats} == {0}  # nothing besides


def test_what_does_not_fit_is_read_from_the_files(pool, original):
    slot = 3 * 64 + 320  # of 10 samples: fields begin on cache lines
    options = {"shuffle": "block", "cache_bytes": 5 * slot + 9}
    found = pool.run(read_epochs, original, meeting_point(), 2, options)
    for epoch in range(2):
        assert sorted(n for numbers, _ in found for n in numbers[epoch]) == list(range(120))
    assert {s["cached_slabs"] for _, stats in found for s in stats} == {5}
    assert all(stats[0]["bytes_read"] > 0 for _, stats in found)


def test_a_slab_is_given_up_for_one_that_is_needed(pool, original):
    """Without a full cache each epoch wants slabs in its own order."""
    options = {"shuffle": "slabs", "cache_bytes": 1 << 20, "drop_last": True}
    found = pool.run(read_epochs, original, meeting_point(), 4, options)
    for epoch in range(4):
        seen = [n for numbers, _ in found for n in numbers[epoch]]
        assert len(seen) == len(set(seen)) == 3 * 7 * (120 // 21)


@pytest.fixture
def damaged(original, tmp_path):
    """A copy in which sample 5 of slab 1 is damaged."""
    folder = shutil.copytree(original, tmp_path / "data")
    slab = open_map(folder).slabs[1]
    with open(slab.path, "r+b") as file:
        file.seek(slab.extents["number"].offset + 5 * 8)
        file.write(b"\xff")
    return folder


def test_a_damaged_slab_is_left_out_and_the_policy_decides(pool, damaged):
    options = {"shuffle": "block", "cache_bytes": 1 << 20, "verify": True}
    found = pool.run(read_epochs, damaged, meeting_point(), 1, {**options, "on_error": "skip"})
    assert {stats[0]["cached_slabs"] for _, stats in found} == {11}
    assert len({stats[0]["skipped"] for _, stats in found}) == 1
    assert found[0][1][0]["skipped"] >= 1
    with pytest.raises(AssertionError, match=r"DataError: .*(checksum|could not be read)"):
        pool.run(read_epochs, damaged, meeting_point(), 1, options)


def test_compressed_slabs_lie_decompressed_in_the_memory(pool, original, tmp_path):
    convert_to_slabs(original, tmp_path / "packed", num_slabs=5, compress="gzip")
    options = {"shuffle": "block", "cache_bytes": 1 << 20}
    found = pool.run(read_epochs, tmp_path / "packed", meeting_point(), 2, options)
    for epoch in range(2):
        assert sorted(n for numbers, _ in found for n in numbers[epoch]) == list(range(120))
    assert {s["bytes_read"] for _, stats in found for s in stats} == {0}


def read_ragged(seat, folder, path, options):
    """Numbers of two epochs, whether their tokens fit them, and the figures."""
    loader = loader_of(
        folder, 7, seat.rank, 3, comm=seat.comm(path, 3), pad=False, **TINY, **options
    )
    seen = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            for number, tokens in zip(batch["number"].tolist(), batch["tokens"], strict=True):
                np.testing.assert_array_equal(tokens, tokens_of(number))
                seen.append(number)
    return seen, loader.metrics()


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "CHECKSUM_BYTES", 200)
        return make_ragged_slabs(tmp_path_factory.mktemp("ragged") / "data", 101, 9)


@pytest.mark.parametrize("options", [{"verify": True}, {"shuffle": "full"}, {"shuffle": "slabs"}])
def test_ragged_fields_lie_in_the_memory_too(pool, ragged, options):
    options = {"cache_bytes": 1 << 20, **options}
    found = pool.run(read_ragged, ragged, meeting_point(), options)
    assert sorted(n for seen, _ in found for n in seen) == sorted([*range(101)] * 2)
    assert {stats["bytes_read"] for _, stats in found} == {0}
    data = open_map(ragged)
    offsets = 8 * sum(count + 1 for count in data.slab_counts)
    assert sum(stats["cache_bytes"] for _, stats in found) == data.nbytes + offsets


def test_compressed_ragged_fields_lie_decompressed_in_the_memory(pool, ragged, tmp_path):
    convert_to_slabs(ragged, tmp_path / "packed", num_slabs=5, compress="gzip")
    options = {"cache_bytes": 1 << 20, "verify": True}
    found = pool.run(read_ragged, tmp_path / "packed", meeting_point(), options)
    assert sorted(n for seen, _ in found for n in seen) == sorted([*range(101)] * 2)
    assert {stats["bytes_read"] for _, stats in found} == {0}


@pytest.mark.parametrize("what", ["values", "offsets"])
def test_a_slab_with_damaged_ragged_fields_is_left_out(pool, ragged, tmp_path, what):
    folder = shutil.copytree(ragged, tmp_path / "data")
    slab = open_map(folder).slabs[4]
    extent = slab.extents["tokens"]
    with open(slab.path, "r+b") as file:
        file.seek(extent.offset + 9 if what == "values" else extent.offsets.offset + 8 * 3)
        file.write(b"\xee")
    options = {"cache_bytes": 1 << 20, "verify": True, "on_error": "skip"}
    found = pool.run(read_ragged, folder, meeting_point(), options)
    assert {stats["cached_slabs"] for _, stats in found} == {8}
    assert found[0][1]["skipped"] > 0


def keep_one_open(seat, folder, path):
    """Rank 1 keeps an iteration open while all begin another epoch; what the cache read then."""
    loader = loader_of(
        folder, 5, seat.rank, 3, "slabs", comm=seat.comm(path, 3), cache_bytes=2000, **TINY
    )
    kept = iter(loader)
    begun = next(kept)["number"].tolist()
    if seat.rank != 1:
        kept.close()
    loader.set_epoch(1)
    before = loader.metrics()["cache_bytes"]
    whole = collect(loader)["number"].tolist()
    busy = loader.metrics()["cache_bytes"] - before
    kept.close()
    loader.set_epoch(2)
    collect(loader)
    return begun, whole, busy, loader.metrics()["cache_bytes"] - before


def test_slabs_that_somebody_still_reads_stay(pool, original):
    found = pool.run(keep_one_open, original, meeting_point())
    assert sorted(n for _, whole, _, _ in found for n in whole) == list(range(120))
    assert [busy for _, _, busy, _ in found] == [0, 0, 0]
    assert sum(later for *_, later in found) > 0


@pytest.mark.parametrize("local_size", [1, 2, None])
def test_ranks_take_the_parts_of_the_stream_in_turn(original, local_size):
    small = {**TINY, "window_bytes": 5 * ROW_BYTES}  # blocks move among two slabs only
    seen = {rank: [] for rank in range(4)}
    for epoch in range(4):
        whole = []
        for rank in range(4):
            loader = loader_of(original, 10, rank, 4, "slabs", local_size=local_size, **small)
            loader.set_epoch(epoch)
            numbers = collect(loader)["number"].tolist()
            seen[rank] += numbers
            whole += numbers
        assert sorted(whole) == list(range(120))
    # Slabs at the edges of parts are shared, so this holds for most samples, not for all.
    assert all(len(set(numbers)) > 100 for numbers in seen.values())


def test_resume_holds_while_parts_go_round(original):
    seen = []
    loaders = [loader_of(original, 6, rank, 4, "slabs", **TINY) for rank in range(4)]
    for loader in loaders:
        loader.set_epoch(3)
        iteration = iter(loader)
        seen += [n for _ in range(2) for n in next(iteration)["number"].tolist()]
        state = loader.state_dict()
        iteration.close()
    for rank in range(3):
        loader = loader_of(original, 8, rank, 3, "slabs", pad=False, **TINY)
        loader.load_state_dict(state)
        seen += collect(loader)["number"].tolist()
    assert sorted(seen) == list(range(120))


def test_workers_of_a_dataset_take_turns_too(original):
    dataset = PartitionedDataset(
        original,
        5,
        1,
        2,
        shuffle="slabs",
        local_size=2,
        read=ReadOptions(block_bytes=200, window_bytes=900),
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert len(collect(loader)["number"]) == 60


@dataclass
class Elsewhere:
    """A communicator whose ranks sit on these nodes."""

    nodes: list[int]
    rank: int = 0

    @property
    def size(self):
        return len(self.nodes)

    @property
    def cross_rank(self):
        return self.nodes[self.rank]

    def allreduce(self, array, op, name):
        return array

    def allgather(self, array):
        assert array.tolist() == [self.cross_rank]
        return np.array(self.nodes)


def test_seats_count_ranks_node_by_node_however_they_are_numbered():
    seats = seats_of(4, None, Elsewhere([0, 1, 0, 1]))
    assert (seats.numbers, seats.local_size) == ((0, 2, 1, 3), 2)
    assert seats.by_node() == [[0, 2], [1, 3]]
    for epoch in range(2):
        assert sorted(seats.part(rank, epoch) for rank in (0, 2)) == [0, 1]
    assert sorted(seats.part(rank, 2) for rank in (0, 2)) == [2, 3]
    uneven = seats_of(3, None, Elsewhere([0, 0, 1]))
    assert (uneven.local_size, uneven.by_node()) == (1, [[0, 1], [2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bytes": 1000}, "cache= needs comm="),
        ({"cache_bytes": 0}, "node_bytes=0; use at least 1"),
        ({"cache_bytes": 9, "exchange": "post"}, "exchange='post'; use one of 'files', 'comm'"),
        ({"shuffle": "slabs", "local_size": 2}, "local_size=2 of world_size 3; use a divisor"),
        ({"shuffle": "slabs", "comm": Elsewhere([0])}, "world_size is 3 and comm has 1 ranks"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(original, monkeypatch, options, message):
    monkeypatch.setattr("hsgd.io.loader.open_map_together", lambda path, *_: open_map(path))
    with pytest.raises(ValueError, match=message):
        loader_of(original, 5, 0, 3, **TINY, **options)
