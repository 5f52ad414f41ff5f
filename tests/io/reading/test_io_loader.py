"""PartitionedLoader: every sample once, same steps everywhere, nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading

import h5py
import numpy as np
import pytest
from hsgd.io import RowReader, memory_plan
from hsgd.io.batches import iteration as iterating
from hsgd.io.batches.filler import Filler
from hsgd.io.reading import row_copies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdf5_samples import arrays_of, collect, make_slabs, write_hdf5
from hsgd.errors import DataError
from loaders import loader_of
from outcomes import told_by
from toolkit.forked_child import in_forked_child

torch = pytest.importorskip("torch")

TINY = {"block_bytes": 200, "window_bytes": 900}  # 4 samples in a block, 18 in a window


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name == "hsgd-io"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert reading_threads() == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Slab folders by (samples, slabs), made once."""
    root = tmp_path_factory.mktemp("folders")
    created = {}

    def get(samples, slabs):
        key = samples, slabs
        if key not in created:
            created[key] = make_slabs(root / f"{samples}-{slabs}", samples, slabs)
        return created[key]

    return get


@pytest.fixture
def folder(folders, tmp_path):
    """101 samples in 7 slabs; a copy that the test may spoil."""
    return shutil.copytree(folders(101, 7), tmp_path / "data")


def numbers(loader):
    return collect(loader)["number"].tolist()


def assert_samples_are_whole(found):
    """Fields belong together: all follow from `number`."""
    everything = arrays_of(int(found["number"].max()) + 1)
    for name, values in found.items():
        np.testing.assert_array_equal(values, everything[name][found["number"]])


@pytest.mark.long
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=st.sampled_from([5, 6, 29, 101]),
    slabs=st.sampled_from([1, 3, 5]),
    world_size=st.integers(1, 5),
    batch_size=st.sampled_from([1, 2, 3, 8, 64]),
    shuffle=st.sampled_from(["block", "none", "full"]),
    epoch=st.integers(0, 3),
)
def test_every_sample_comes_exactly_once_per_epoch_besides_padding(
    folders, samples, slabs, world_size, batch_size, shuffle, epoch
):
    seen, padded, steps = [], 0, set()
    for rank in range(world_size):
        loader = loader_of(
            folders(samples, slabs), batch_size, rank, world_size, shuffle, seed=3, **TINY
        )
        loader.set_epoch(epoch)
        batches = list(loader)
        steps.add((len(batches), len(loader)))
        found = collect(batches)
        assert_samples_are_whole(found)
        padding = loader.metrics()["padding"]
        padded += padding
        seen += found["number"].tolist()[: loader.samples_per_epoch - padding]
    assert sorted(seen) == list(range(samples))
    assert padded == -samples % world_size
    assert steps == {(len(loader), len(loader))}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7])
def test_without_padding_no_sample_comes_twice_and_steps_stay_equal(folders, world_size):
    path = folders(101, 7)
    ranks = [loader_of(path, 10, r, world_size, pad=False, **TINY) for r in range(world_size)]
    batches = [list(loader) for loader in ranks]
    assert len({len(b) for b in batches}) == 1
    assert sorted(n for rank in batches for n in collect(rank)["number"]) == list(range(101))


def test_an_exact_share_may_end_with_an_empty_batch(folders):
    path = folders(5, 1)
    last = [list(loader_of(path, 1, r, 2, pad=False))[-1]["image"].shape for r in (0, 1)]
    assert last == [(1, 2, 3), (0, 2, 3)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_drop_last_gives_full_batches_only(folders, world_size):
    for rank in range(world_size):
        loader = loader_of(folders(101, 7), 8, rank, world_size, drop_last=True)
        assert [len(batch["number"]) for batch in loader] == [8] * (101 // (8 * world_size))


def test_no_shuffle_gives_each_rank_its_contiguous_range(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", arrays_of(10))
    parts = [numbers(loader_of(path, 3, r, 2, "none")) for r in (0, 1)]
    assert parts == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(("given", "meant"), [(True, "block"), (False, "none")])
def test_shuffle_may_be_true_or_false_as_in_a_data_loader(folder, given, meant):
    found = [numbers(loader_of(folder, 8, shuffle=shuffle, **TINY)) for shuffle in (given, meant)]
    assert found[0] == found[1]


@pytest.mark.parametrize("shuffle", ["block", "full"])
def test_epochs_differ_and_the_same_seed_gives_the_same_order(folder, shuffle):
    def order(seed, epoch):
        loader = loader_of(folder, 8, shuffle=shuffle, seed=seed, **TINY)
        loader.set_epoch(epoch)
        return numbers(loader)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_the_global_stream_does_not_depend_on_the_number_of_ranks(folder):
    def stream(world_size):
        ranks = [loader_of(folder, 8, r, world_size, pad=False, **TINY) for r in range(world_size)]
        return [n for loader in ranks for n in numbers(loader)]

    assert stream(1) == stream(2) == stream(5)


@pytest.mark.parametrize("shuffle", ["none", "block", "full"])
def test_the_first_batch_is_read_alone_where_single_rows_can_be(folder, shuffle):
    def pieces(**options):
        loader = loader_of(folder, 4, shuffle=shuffle, window_bytes=2000, **options)
        iteration = iter(loader)
        found = list(iteration.source.plan.pieces())
        iteration.close()
        return [(piece.stream_rows, piece.buffer_rows) for piece in found]

    (rows, read), *others = pieces()
    assert rows == 4 and read <= 4 * rows
    assert sum(piece_rows for piece_rows, _ in others) == 101 - 4
    if shuffle != "full":
        assert pieces(verify=True)[0][0] > 4


@pytest.mark.parametrize("shuffle", ["block", "none", "full"])
@pytest.mark.parametrize(
    ("options", "read_by"),
    [
        ({}, "preadv"),
        ({"chunks": (7,)}, "preadv + no filter"),
        ({"chunks": (16,), "compression": "gzip"}, "preadv + gzip"),
        (
            {"chunks": (16,), "scaleoffset": 0},
            "h5py: filters (6,), only these are known: gzip, shuffle, fletcher32, bzip2, lzf, "
            "blosc, lz4, bitshuffle, zstd",
        ),
    ],
)
def test_ordinary_files_are_read_in_place(tmp_path, shuffle, options, read_by):
    arrays = {"number": arrays_of(50)["number"]}
    path = write_hdf5(tmp_path / "a.h5", arrays, **options)
    loader = loader_of(path, 8, shuffle=shuffle, block_bytes=32, window_bytes=100)
    assert sorted(numbers(loader)) == list(range(50))
    stats = loader.metrics()
    assert stats["bypass"] == {"number": read_by}
    calls = stats["preadv_calls"] > 0, stats["h5py_calls"] > 0
    assert calls == ((False, True) if read_by.startswith("h5py") else (True, False))


def test_stats_count_what_was_delivered(folder):
    loader = loader_of(folder, 10, shuffle="none")
    list(loader)
    stats = loader.metrics()
    assert (stats["batches"], stats["samples"]) == (11, 101)
    assert stats["bytes_read"] == 101 * (8 + 24 + 5 + 1)


def test_batches_are_tensors_that_share_the_memory_that_was_read(folder, monkeypatch):
    arrays = []
    convert = iterating._as_tensors
    monkeypatch.setattr(iterating, "_as_tensors", lambda a: (arrays.append(a), convert(a))[1])
    batches = list(loader_of(folder, 8))
    assert {name: values.dtype for name, values in batches[0].items()} == {
        "even": torch.bool,
        "image": torch.float32,
        "number": torch.int64,
        "pixels": torch.uint8,
    }
    for batch, source in zip(batches, arrays, strict=True):
        assert all(batch[n].data_ptr() == source[n].ctypes.data for n in batch)
    assert len({batch["image"].data_ptr() for batch in batches}) == len(batches)


def test_as_numpy_gives_arrays(folder):
    (batch, *_) = loader_of(folder, 8, as_numpy=True)
    assert all(type(values) is np.ndarray for values in batch.values())


@pytest.mark.long
def test_big_endian_fields_arrive_in_native_order(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.arange(30, dtype=">f4").reshape(10, 3)})
    found = collect(loader_of(path, 4, shuffle="none"))["x"]
    assert found.ravel().tolist() == list(range(30))


@pytest.mark.long
def test_types_that_torch_does_not_know_are_refused_at_once(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.zeros(4, np.longdouble)})
    with pytest.raises(TypeError, match=r"'x' has dtype .*as_numpy=True"):
        loader_of(path, 2)
    assert len(list(loader_of(path, 2, as_numpy=True))) == 2


@pytest.mark.long
def test_fields_can_be_chosen(folder):
    (batch, *_) = loader_of(folder, 8, fields=["pixels", "number"])
    assert list(batch) == ["pixels", "number"]


@pytest.mark.long
def test_breaking_off_ends_the_thread(folder):
    for _ in loader_of(folder, 1, read_ahead=1, threads=3, **TINY):
        assert reading_threads()
        break
    gc.collect()
    assert reading_threads() == []


@pytest.mark.long
def test_close_ends_an_iteration_that_somebody_still_holds(folder):
    iteration = iter(loader_of(folder, 1, read_ahead=1))
    next(iteration)
    iteration.close()
    assert reading_threads() == []
    assert list(iteration) == []


@pytest.mark.long
def test_an_error_in_the_loop_ends_the_thread(folder):
    def train():
        for _ in loader_of(folder, 1, read_ahead=1):
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        train()


@pytest.mark.long
def test_two_iterations_at_once_do_not_disturb_each_other(folder):
    loader = loader_of(folder, 8, **TINY)
    pairs = [
        (a["number"].tolist(), b["number"].tolist()) for a, b in zip(loader, loader, strict=True)
    ]
    assert all(a == b for a, b in pairs)


@pytest.mark.long
def test_threads_that_stop_helping_and_start_again_lose_no_sample(folder, monkeypatch):
    draw = random.Random(0)
    adapt = Filler._want_threads
    monkeypatch.setattr(
        Filler, "_want_threads", lambda self, waits: adapt(self, waits=draw.random() < 0.5)
    )
    loader = loader_of(folder, 5, threads=7, read_ahead=1, **TINY)
    for epoch in range(30):
        loader.set_epoch(epoch)
        assert sorted(numbers(loader)) == list(range(101))


@pytest.mark.parametrize("slept", [0, 1])
def test_all_threads_help_only_while_tasks_wait_for_a_disk(folder, monkeypatch, slept):
    work, helping = row_copies.TaskBatch.work, []

    def of_a_disk(self, staging):
        was_last = work(self, staging)
        self.tasks["slept"] = slept
        return was_last

    adapt = Filler._want_threads

    def noted(self, *, waits):
        adapt(self, waits=waits)
        helping.append(self._wanted)

    monkeypatch.setattr(row_copies.TaskBatch, "work", of_a_disk)
    monkeypatch.setattr(Filler, "_want_threads", noted)
    numbers(loader_of(folder, 5, threads=100, **TINY))
    cores = max(2, len(os.sched_getaffinity(0)))
    assert set(helping) == {100 if slept else cores}


def test_batches_of_more_rows_than_can_be_numbered_are_refused(folder, monkeypatch):
    monkeypatch.setattr(memory_plan, "MOST_ROWS", 102)
    loader_of(folder, 1 << 40)
    monkeypatch.setattr(memory_plan, "MOST_ROWS", 101)
    with pytest.raises(ValueError, match="batches of 101 samples; use a batch_size below 101"):
        loader_of(folder, 1 << 40)


def test_all_threads_help_where_python_reads_a_field(tmp_path, monkeypatch):
    path = write_hdf5(tmp_path / "a.h5", {f"x{n}": np.arange(200) for n in range(10)})
    with h5py.File(path, "a") as file:
        file.create_dataset("packed", data=np.arange(200), chunks=(50,), compression="gzip")
    seen = []
    monkeypatch.setattr(Filler, "_want_threads", lambda self, waits: seen.append(waits))
    for batch in loader_of(path, 8, **TINY):
        assert (batch["packed"] == batch["x3"]).all()
    assert seen and all(seen)


def test_errors_of_the_thread_reach_the_loop(folder):
    loader = loader_of(folder, 1, shuffle="none", read_ahead=1)
    path = folder / "slab-00004.h5"
    with h5py.File(path, "r+") as file:
        file["number"][0] = 5
    iteration = iter(loader)
    delivered = []
    with pytest.raises(DataError, match=r"slab-00004\.h5: changed since it was opened"):
        delivered.extend(iteration)
    assert len(delivered) == 101 * 4 // 7


def test_unexpected_errors_of_the_thread_reach_the_loop_too(folder, monkeypatch):
    def fail(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(row_copies.TaskBatch, "work", fail)
    with pytest.raises(MemoryError):
        list(loader_of(folder, 8))


def test_a_file_system_that_hangs_is_reported_after_the_timeout(folder, monkeypatch):
    release = threading.Event()
    work = row_copies.TaskBatch.work
    monkeypatch.setattr(row_copies.TaskBatch, "work", lambda *a: (release.wait(60), work(*a))[1])
    iteration = iter(loader_of(folder, 8, timeout_s=0.01))
    with pytest.raises(DataError, match=r"batch 0 did not arrive within 0\.01 s"):
        next(iteration)
    release.set()
    for thread in reading_threads():
        thread.join(60)


@pytest.mark.long
def test_a_forgotten_iterator_does_not_keep_the_interpreter_from_ending(folder):
    script = (
        "import sys\n"
        "from loaders import loader_of\n"
        "iteration = iter(loader_of(sys.argv[1], 1, as_numpy=True, read_ahead=1))\n"
        "print(len(next(iteration)['number']))\n"
    )
    # Elsewhere than in the source tree, where `hsgd` would be the folder and not the package.
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(
        command, cwd=folder, timeout=60, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.long
def test_a_pickled_loader_reads_the_same_elsewhere(folder):
    loader = loader_of(folder, 8, 1, 2, seed=4, as_numpy=True)
    loader.set_epoch(3)
    expected = numbers(loader)
    loader.set_epoch(3)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(numbers, (loader,)) == expected


@pytest.mark.long
def test_a_pickled_loader_refuses_files_that_changed(folder):
    data = pickle.dumps(loader_of(folder, 8))
    os.utime(folder / "slab-00000.h5", ns=(1, 1))
    with pytest.raises(DataError, match=r"slab-00000\.h5: changed since it was opened"):
        list(pickle.loads(data))


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"chunks": (7,)}])
def test_a_forked_child_reads_by_itself_while_the_parent_goes_on(tmp_path, options):
    path = write_hdf5(tmp_path / "a.h5", {"number": np.arange(50)}, **options)
    loader = loader_of(path, 1, as_numpy=True, read_ahead=1)
    expected = numbers(loader)
    loader.set_epoch(0)
    iteration = iter(loader)
    first = next(iteration)["number"].tolist()
    assert in_forked_child(lambda: (loader.set_epoch(0), numbers(loader))[1]) == expected
    kind, message = in_forked_child(lambda: told_by(lambda: next(iteration)))
    assert kind == "RuntimeError" and message.startswith("iteration over")
    assert "call iter(loader) here" in message
    assert first + numbers(iteration) == expected


def test_a_forked_child_keeps_no_descriptor_and_its_reader_opens_anew(folder):
    loader = loader_of(folder, 101, as_numpy=True)
    with RowReader(loader._data) as reader:
        out = np.empty(101, np.int64)
        reader.read("number", 0, out)

        def look():
            left = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            kept = [path for path in left if path.startswith(str(folder))]
            again = np.empty(101, np.int64)
            reader.read("number", 0, again)
            return kept, again.tolist()

        assert in_forked_child(look) == ([], out.tolist())
        reader.read("number", 0, out)


def test_more_ranks_than_samples_is_refused_with_both_numbers(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.arange(3)})
    with pytest.raises(ValueError, match=r"3 samples for 4 ranks.*start at most 3"):
        loader_of(path, 1, 0, 4)


def test_an_empty_dataset_is_refused(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.zeros((0, 3), np.float32)})
    with pytest.raises(ValueError, match="the dataset is empty"):
        loader_of(path, 1)


@pytest.mark.parametrize(
    "options",
    [{"shuffle": "yes"}, {"seed": -1}, {"read_ahead": 0}, {"window_bytes": 0}, {"batch_size": 0}],
)
def test_bad_options_are_refused_at_once(folder, options):
    with pytest.raises(ValueError, match="use"):
        loader_of(folder, **{"batch_size": 8, **options})


@pytest.mark.long
@pytest.mark.parametrize(("epoch", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_a_bad_epoch_is_refused_and_the_old_one_stays(folder, epoch, error):
    loader = loader_of(folder, 8)
    loader.set_epoch(2)
    expected = numbers(loader)
    loader.set_epoch(2)
    with pytest.raises(error, match="epoch is"):
        loader.set_epoch(epoch)
    assert numbers(loader) == expected


@pytest.mark.long
def test_importing_the_package_loads_neither_h5py_nor_torch(tmp_path):
    script = (
        "import sys, hsgd.io, hsgd.io.loader, hsgd.io.cli\n"
        "hsgd.io.PartitionedLoader\n"
        "print([name for name in ('h5py', 'torch', 'tqdm', 'sklearn') if name in sys.modules])\n"
        "import io; print(io.__file__ != hsgd.io.__file__)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\nTrue\n"


@pytest.mark.long
def test_with_ends_the_iterations_that_run_and_the_loader_can_be_used_again(folder):
    with loader_of(folder, 1, as_numpy=True, threads=2) as loader:
        iteration = iter(loader)
        next(iteration)
        assert [t for t in threading.enumerate() if t.name.startswith("hsgd-io")]
    assert not [t for t in threading.enumerate() if t.name.startswith("hsgd-io")]
    with pytest.raises(StopIteration):
        next(iteration)
    assert len(list(loader)) == len(loader)
