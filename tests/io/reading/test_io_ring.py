"""Buffers of batches: used again only after the last tensor died, within the memory limit."""

from __future__ import annotations

import gc
import os
import queue
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from hsgd.io import PartitionedDataset
from hsgd.io.batches.buffer_ring import BufferRing, RingClosed
from hsgd.io.format.slab_folder import FieldSpec

from hdf5_samples import arrays_of, collect, make_slabs, write_hdf5
from loaders import grouped, loader_of

torch = pytest.importorskip("torch")

TINY = {"block_bytes": 200, "window_bytes": 900}
SPECS = (
    FieldSpec("x", (3,), np.dtype(np.float32)),
    FieldSpec("y", (), np.dtype(np.int64)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """101 samples in 7 slabs."""
    return make_slabs(tmp_path_factory.mktemp("ring") / "data", 101, 7)


def numbers(batches):
    return collect(batches)["number"].tolist()


def test_a_slot_is_free_again_only_after_the_last_view_of_any_field_died():
    ring = BufferRing(SPECS, 5, 1)
    arrays = ring.arrays(ring.take(0), 4)
    assert {name: a.shape for name, a in arrays.items()} == {"x": (4, 3), "y": (4,)}
    part = torch.from_numpy(arrays["y"])[1:3]
    del arrays
    gc.collect()
    with pytest.raises(queue.Empty):
        ring.take(0)
    del part
    assert ring.take(0) is not None


def test_fields_of_a_slot_do_not_overlap():
    ring = BufferRing(SPECS, 5, 2)
    batches = [ring.arrays(ring.take(0), 5) for _ in range(2)]
    for number, batch in enumerate(batches):
        batch["x"][:], batch["y"][:] = number, number + 10
    for number, batch in enumerate(batches):
        assert set(batch["x"].ravel()) == {number} and set(batch["y"]) == {number + 10}


def test_a_ring_grows_up_to_its_limit_and_gives_up_what_it_added():
    ring = BufferRing(SPECS, 5, 2, memory_limit=4 * 4096)
    assert ring.nbytes == 2 * 4096
    ring.grow(10)
    assert ring.nbytes == 4 * 4096
    assert not ring.can_grow()
    held = [ring.arrays(ring.take(0), 5) for _ in range(4)]
    ring.trim()
    assert ring.nbytes == 2 * 4096
    for batch in held:
        batch["y"][:] = 1  # memory that was given up lives as long as its arrays
    del held, batch
    assert [ring.take(0) is not None for _ in range(2)] == [True, True]
    with pytest.raises(queue.Empty):
        ring.take(0)


def test_a_thread_that_waits_for_a_slot_can_be_woken():
    ring = BufferRing(SPECS, 5, 1)
    ring.take(0)
    ended = []

    def wait():
        try:
            ring.take(None)
        except RingClosed:
            ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    ring.wake()
    thread.join(60)
    assert ended == [True]


def test_batches_that_were_dropped_are_read_into_again(folder):
    pointers = [batch["number"].data_ptr() for batch in loader_of(folder, 1, read_ahead=1, **TINY)]
    assert len(set(pointers)) < len(pointers) == 101


def test_batches_that_are_kept_stay_as_they_were(folder):
    loader = loader_of(folder, 3, shuffle="full", read_ahead=1, **TINY)
    kept, seen = [], []
    for number, batch in enumerate(loader):
        seen.append(batch["number"].tolist())
        if number % 3 == 0:
            kept.append((number, batch))
    for number, batch in kept:
        assert batch["number"].tolist() == seen[number]


@pytest.mark.parametrize("shuffle", ["block", "slabs", "full", "none"])
def test_memory_stays_when_an_epoch_follows_another(tmp_path, shuffle):
    folder = make_slabs(tmp_path / "data", 240, 40)  # blocks of 5 and of 1
    loader = loader_of(folder, 2, shuffle=shuffle, **TINY)
    rings = set()
    for epoch in range(8):
        loader.set_epoch(epoch)
        numbers(loader)
        gc.collect()
        (ring,) = loader._iterations._kept
        rings.add(ring)
    assert len(rings) == 1
    assert loader.metrics()["buffer_bytes"] == ring.base_slots * ring.slot_bytes


def test_the_memory_limit_holds_and_a_loop_that_keeps_too_much_is_told(folder, monkeypatch):
    monkeypatch.setattr("hsgd.io.batches.filler.RELEASE_S", 0.05)
    limit = 2 * (1 << 20) + 30 * 4096
    loader = loader_of(folder, 1, threads=2, memory_limit=limit, **TINY)
    assert sorted(int(batch["number"]) for batch in loader) == list(range(101))
    assert loader.metrics()["buffer_bytes"] <= limit
    with pytest.raises(MemoryError, match=r"keeps batches of 0 MiB, all that memory_limit allows"):
        list(loader)
    assert loader.metrics()["buffer_bytes"] <= limit


def test_a_memory_limit_below_one_window_is_refused_with_what_it_takes(folder):
    with pytest.raises(ValueError, match=r"memory_limit=100 is too small.*need \d+ bytes"):
        loader_of(folder, 1, memory_limit=100)


@pytest.mark.parametrize("window_bytes", [900, 2000])
def test_a_memory_limit_that_is_just_enough_is_enough_in_every_epoch(folder, window_bytes):
    sizes = {"block_bytes": 200, "window_bytes": window_bytes}  # windows differ in length
    with pytest.raises(ValueError, match="need") as refused:
        loader_of(folder, 1, memory_limit=100, **sizes)
    needed = int(re.search(r"need (\d+) bytes", str(refused.value))[1])
    loader = loader_of(folder, 1, memory_limit=needed, **sizes)
    for _ in range(10):
        assert sorted(int(batch["number"]) for batch in loader) == list(range(101))


def test_pinning_without_a_gpu_is_refused(folder):
    if torch.cuda.is_available():
        assert next(iter(loader_of(folder, 8, pin_memory=True)))["number"].is_pinned()
        return
    with pytest.raises(ValueError, match="pin_memory=True needs torch with a CUDA device"):
        loader_of(folder, 8, pin_memory=True)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("direct", [False, True])
def test_the_order_does_not_depend_on_threads_or_on_the_page_cache(folder, threads, direct):
    loader = loader_of(folder, 8, seed=3, threads=threads, direct=direct, **TINY)
    assert numbers(loader) == numbers(loader_of(folder, 8, seed=3, **TINY))


@pytest.mark.parametrize("row_bytes", [1, 37, 2048, 5000, 300_001])
@pytest.mark.parametrize("shuffle", ["none", "block", "full"])
@pytest.mark.parametrize("direct", [False, True])
def test_rows_of_any_size_arrive_whole(tmp_path, row_bytes, shuffle, direct):
    count = 40
    values = np.random.default_rng(1).integers(0, 256, (count, row_bytes), np.uint8)
    path = write_hdf5(tmp_path / "a.h5", {"number": np.arange(count), "x": values})
    loader = loader_of(
        path,
        7,
        shuffle=shuffle,
        block_bytes=5 * row_bytes,
        window_bytes=17 * row_bytes,
        direct=direct,
    )
    found = collect(loader)
    assert sorted(found["number"]) == list(range(count))
    np.testing.assert_array_equal(found["x"], values[found["number"]])
    refusal = loader.metrics()["direct_refusal"]
    assert not refusal or direct


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(folder, monkeypatch):
    monkeypatch.setattr("os.O_DIRECT", os.O_DIRECTORY)  # open() refuses
    loader = loader_of(folder, 8, direct=True)
    assert sorted(numbers(loader)) == list(range(101))
    assert "slab-" in loader.metrics()["direct_refusal"]


@pytest.mark.parametrize("threads", [0, 3])
def test_transforms_are_applied_in_order(folder, threads):
    loader = loader_of(
        folder,
        4,
        seed=2,
        transform=lambda batch: {"number": batch["number"] * 2},
        transform_threads=threads,
        **TINY,
    )
    plain = numbers(loader_of(folder, 4, seed=2, **TINY))
    assert numbers(loader) == [2 * number for number in plain]
    stats = loader.metrics()
    assert (stats["batches"], stats["samples"]) == (26, 101)


@pytest.mark.parametrize("threads", [0, 2])
def test_errors_of_a_transform_reach_the_loop(folder, threads):
    def fail(batch):
        raise KeyError("the user's own")

    with pytest.raises(KeyError):
        list(loader_of(folder, 4, transform=fail, transform_threads=threads))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_torch_data_loader_gets_every_sample_once_per_epoch(folder, workers):
    from torch.utils.data import DataLoader

    seen = []
    for rank in range(2):
        dataset = PartitionedDataset(folder, rank=rank, world_size=2, pad=False, **grouped(TINY))
        dataset.set_epoch(1)
        for batch in DataLoader(dataset, batch_size=8, num_workers=workers):
            np.testing.assert_array_equal(
                batch["image"], arrays_of(101)["image"][np.asarray(batch["number"])]
            )
            seen += batch["number"].tolist()
    assert sorted(seen) == list(range(101))


def test_a_dataset_with_a_batch_size_gives_the_batches_of_a_loader(folder):
    dataset = PartitionedDataset(folder, 8, 1, 2, seed=4)
    assert len(dataset) == 7
    assert numbers(dataset) == numbers(loader_of(folder, 8, 1, 2, seed=4))


def test_a_large_ring_is_private_memory_of_which_large_pages_are_asked():
    """Linux gives no large pages to anonymous memory that may be shared."""
    ring = BufferRing(SPECS, 1 << 20, 2)
    address = ring.arrays(ring.take(0), 1)["x"].ctypes.data
    flags: set[str] = set()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            inside = low <= address < high
        if inside and line.startswith("VmFlags:"):
            flags = set(line.split()[1:])
    assert "wr" in flags and "sh" not in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()
