"""What was read from a server once comes from the disk after that, and is never wrong."""

from __future__ import annotations

import os
import random
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hsgd.io import PartitionedDataset, ReadOptions, convert_to_slabs, open_map
from hsgd.io import loader as loading
from hsgd.io.remote.object_reader import ObjectReader, RemoteAccess
from torch.utils.data import DataLoader

from hdf5_samples import collect, make_ragged_slabs, make_slabs
from hsgd.errors import DataError
from loaders import loader_of
from ranks import Ranks, meeting_point
from tiers import short_form
from toolkit.processes import kill_soon, run_together
from toolkit.range_server import RangeServer

COUNT, SLABS = 300, 4
SIZES = {"block_bytes": 300_000, "window_bytes": 900_000}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Slabs of 2.5 MB, so of three blocks each, and small ones of other kinds."""
    home = tmp_path_factory.mktemp("remote")
    chance = np.random.default_rng(0)
    arrays = {"x": chance.integers(0, 99, (COUNT, 8192), np.int32), "number": np.arange(COUNT)}
    for name, compress in (("plain", None), ("gzip", "gzip")):
        convert_to_slabs(arrays, home / name, num_slabs=SLABS, compress=compress)
    make_ragged_slabs(home / "ragged", 60, 3)
    return home


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def make(path, cache, rank=0, world_size=1, batch_size=16, **options):
    settings = {"seed": 3, "as_numpy": True, "retry_s": 30, **SIZES, **options}
    return loader_of(path, batch_size, rank, world_size, disk_cache=cache, **settings)


def same_epoch(one, other):
    """The batches of one epoch of both are the same; returns how many samples they have."""
    total = 0
    for left, right in zip(one, other, strict=True):
        for name, values in left.items():
            if hasattr(values, "offsets"):
                np.testing.assert_array_equal(values.offsets, right[name].offsets)
                values, right[name] = values.values, right[name].values
            np.testing.assert_array_equal(values, right[name])
        total += len(left["number"])
    return total


def opening_requests(server, name):
    """What is asked for to open a dataset."""
    before = len(server.requests)
    open_map(f"{server.url}/{name}")
    return set(server.requests[before:])


def blocks_of(cache):
    return [path for path in cache.rglob("*") if path.is_file() and path.name != "hsgd-ledger"]


@pytest.mark.parametrize("shuffle", ["block", "slabs", "full", "none"])
@pytest.mark.parametrize("name", ["plain", "gzip", "ragged"])
def test_no_epoch_but_the_first_asks_the_server(server, home, cache, name, shuffle):
    loader = make(f"{server.url}/{name}", cache, shuffle=shuffle)
    files = make(home / name, None, shuffle=shuffle)
    server.requests.clear()
    same_epoch(loader, files)
    fetched = loader.metrics()["fetched_bytes"]
    objects = sum(path.stat().st_size for path in (home / name).glob("slab-*"))
    assert sum(r.stop - r.start for r in server.requests) == fetched <= objects
    server.requests.clear()
    same_epoch(loader, files)
    assert not server.requests
    assert loader.metrics()["fetched_bytes"] == fetched


def test_the_next_job_asks_for_metadata_only(server, home, cache):
    list(make(f"{server.url}/plain", cache))
    server.requests.clear()
    loader = make(f"{server.url}/plain", cache, verify=True)
    opened = len(server.requests)
    assert opened == len(opening_requests(server, "plain"))
    same_epoch(loader, make(home / "plain", None, verify=True))
    assert len(server.requests) == 2 * opened
    figures = loader.metrics()
    assert figures["requests"] == figures["fetched_bytes"] == figures["disk_damaged"] == 0
    assert figures["disk_bytes"] >= COUNT * 8192 * 4


def test_what_one_rank_has_read_the_others_need_not_fetch(server, home, cache):
    ranks = [make(f"{server.url}/plain", cache, rank, 3) for rank in range(3)]
    files = [make(home / "plain", None, rank, 3) for rank in range(3)]
    for one, other in zip(ranks, files, strict=True):
        same_epoch(one, other)
    server.requests.clear()
    for one, other in zip(ranks, files, strict=True):
        same_epoch(one, other)
    assert not server.requests


def test_processes_that_were_forked_share_the_cache(server, cache):
    read = ReadOptions(disk_cache=cache, **SIZES)
    dataset = PartitionedDataset(f"{server.url}/plain", 10, rank=0, world_size=1, read=read)
    collect(dataset)  # the cache is in use here
    server.requests.clear()
    batches = DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(collect(batches)["number"].tolist()) == list(range(COUNT))
    assert set(server.requests) <= opening_requests(server, "plain")


def test_a_job_goes_on_where_another_stopped(server, home, cache):
    loader = make(f"{server.url}/plain", cache)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    resumed = make(f"{server.url}/plain", cache)
    resumed.load_state_dict(loader.state_dict())
    files = make(home / "plain", None)
    files.load_state_dict(loader.state_dict())
    assert same_epoch(resumed, files) == COUNT - 7 * 16


def read_with_node_memory(seat, url, cache, point):
    options = {"comm": seat.comm(point, 2), "cache_bytes": 1 << 30, "verify": True}
    loader = make(url, cache, seat.rank, 2, **options)
    return collect(loader)["number"].tolist(), loader.metrics()


@pytest.mark.long
def test_the_memory_of_a_node_is_filled_from_the_disk(server, cache):
    list(make(f"{server.url}/plain", cache))
    server.requests.clear()
    with Ranks(2) as ranks:
        found = ranks.run(read_with_node_memory, f"{server.url}/plain", cache, meeting_point())
    assert sorted(number for numbers, _ in found for number in numbers) == list(range(COUNT))
    assert {figures["cached_slabs"] for _, figures in found} == {SLABS}
    assert len(server.requests) == len(opening_requests(server, "plain"))


def test_an_object_that_has_changed_is_fetched_anew(server, home, cache):
    list(make(f"{server.url}/plain", cache))
    arrays = {"x": np.ones((COUNT, 8192), np.int32), "number": np.arange(COUNT)}
    convert_to_slabs(arrays, home / "plain", num_slabs=SLABS, overwrite=True)
    loader = make(f"{server.url}/plain", cache)
    same_epoch(loader, make(home / "plain", None))
    assert loader.metrics()["disk_bytes"] < COUNT * 8192 * 4


def test_an_object_that_changes_meanwhile_is_an_error(server, home, cache):
    loader = make(f"{server.url}/plain", cache)
    (home / "plain" / "slab-00002.h5").touch()
    with pytest.raises(DataError, match=r"slab-00002.h5: changed since it was opened"):
        list(loader)


@pytest.mark.parametrize("verify", [False, True])
def test_damaged_blocks_are_fetched_again(server, home, cache, verify):
    list(make(f"{server.url}/plain", cache))
    chance = random.Random(5)
    damaged = blocks_of(cache)[::2]
    for path in damaged:
        with open(path, "r+b") as file:
            file.seek(chance.randrange(path.stat().st_size))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))
    loader = make(f"{server.url}/plain", cache, verify=verify)
    files = make(home / "plain", None, verify=verify)
    same_epoch(loader, files)
    same_epoch(loader, files)
    figures = loader.metrics()
    assert 0 < figures["disk_damaged"] <= len(damaged)
    assert 0 < figures["requests"] <= figures["disk_damaged"]  # neighbours come together


@pytest.mark.parametrize(
    ("name", "part"),
    [("plain", "values"), ("gzip", "values"), ("ragged", "values"), ("ragged", "offsets")],
)
def test_wrong_bytes_of_a_server_do_not_stay(server, home, cache, name, part):
    """The checksums of the slab find what that of the block, made on arrival, cannot."""
    field = "tokens" if name == "ragged" else "x"
    slab = open_map(home / name).slabs[1]
    extent = slab.extents[field]
    at = extent.chunks.place(0)[0] if extent.chunks else extent.offset
    path, before = Path(slab.path), os.stat(slab.path)
    content = path.read_bytes()
    with open(path, "r+b") as file:
        file.seek((extent.offsets.offset if part == "offsets" else at) + 8)
        file.write(b"\x7f")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    url, options = f"{server.url}/{name}", {"verify": True, "shuffle": "none"}
    with pytest.raises(DataError, match=r"slab-00001\.h5"), make(url, cache, **options) as loader:
        list(loader)
    for thread in threading.enumerate():
        if thread.name == "hsgd-io":  # might still keep what it fetched
            thread.join()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    loader = make(url, cache, **options)
    same_epoch(loader, make(home / name, None, **options))
    server.requests.clear()
    list(make(url, cache, **options))
    assert set(server.requests) <= opening_requests(server, name)


def test_a_range_that_another_thread_has_dropped_is_read_again(server, home, cache):
    """Two readers find wrong bytes; when the second drops them, the first has done so."""
    data = make(f"{server.url}/plain", cache, verify=True)._data
    slab = data.slabs[1]
    reader = ObjectReader(data.access)
    span = (slab.path, slab.identity, slab.extents["x"].offset, 1000)
    assert reader.forget(*span) and reader.forget(*span)
    assert not ObjectReader(RemoteAccess()).forget(*span)


def test_a_dataset_beyond_the_limit_has_a_part_from_the_cache(server, home, cache):
    limit = 5 << 20
    loader = make(f"{server.url}/plain", cache, disk_cache_bytes=limit)
    files = make(home / "plain", None)
    same_epoch(loader, files)
    for _ in range(2):
        before = loader.metrics()["fetched_bytes"]
        same_epoch(loader, files)
        fetched = loader.metrics()["fetched_bytes"] - before
        assert 0 < fetched < 0.7 * COUNT * 8192 * 4
        assert sum(path.stat().st_size for path in blocks_of(cache)) <= limit


def test_another_dataset_takes_the_place_of_the_last(server, home, cache):
    for name in ("plain", "gzip"):
        loader = make(f"{server.url}/{name}", cache, disk_cache_bytes=11 << 20)
        list(loader)
        assert sum(path.stat().st_size for path in blocks_of(cache)) <= 11 << 20
    server.requests.clear()
    files = make(home / "gzip", None)
    files.set_epoch(1)
    same_epoch(loader, files)
    assert not server.requests


def test_a_full_disk_is_one_warning_and_the_data_comes(server, home, cache):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    loader, files = make(f"{server.url}/plain", cache), make(home / "plain", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        text = "the disk cache keeps nothing more in this process: File too large"
        with pytest.warns(UserWarning, match=text) as caught:
            same_epoch(loader, files)
        assert len(caught) == 1
        same_epoch(loader, files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not blocks_of(cache)


@pytest.mark.long
def test_few_descriptors_are_enough_for_many_slabs(tmp_path, cache):
    make_slabs(tmp_path / "many", 200, 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with RangeServer(tmp_path) as server:
        loader = make(f"{server.url}/many", cache, shuffle="full", batch_size=5)
        collect(loader)  # connections are open
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
        try:
            assert len(collect(loader)["number"]) == 200
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir("/proc/self/fd")) <= before


def test_files_have_no_disk_cache(home, cache):
    list(make(home / "plain", cache))
    assert not cache.exists()


def test_arguments_that_cannot_hold_are_refused(server, cache):
    cache.write_text("no folder")
    with pytest.raises(ValueError, match=r"disk_cache=.*cannot be used"):
        make(f"{server.url}/plain", cache)
    with pytest.raises(ValueError, match="disk_cache_bytes=5; use at least"):
        ReadOptions(disk_cache_bytes=5)


READER = """
import sys
import numpy as np
from hsgd.io import PartitionedLoader, ReadOptions
url, cache, limit, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
read = ReadOptions(disk_cache=cache, disk_cache_bytes=limit, block_bytes=300_000,
                   window_bytes=900_000, verify=True)
loader = PartitionedLoader(url, 16, rank=rank, world_size=2, as_numpy=True, read=read)
print("opened", flush=True)
for epoch in range(int(sys.argv[5])):
    print(sum(int(batch["x"].sum()) for batch in loader), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("attempt", short_form("chaos", range(20), keep=[0]))
def test_processes_at_once_and_killed_ones_leave_right_samples(server, home, cache, attempt):
    seed = time.time_ns() + attempt
    print(f"seed {seed}")
    chance, limit = random.Random(seed), 6 << 20  # so that blocks come and go
    command = [sys.executable, "-c", READER, f"{server.url}/plain", str(cache), str(limit)]
    kill_soon([[*command, str(rank), "1000"] for rank in range(2)], "opened", chance, 0.5)
    whole = run_together([[*command, str(rank), "2"] for rank in range(2)], os.environ, 120.0)
    assert [done.returncode for done in whole] == [0, 0], whole
    sums = [done.stdout.split()[1:] for done in whole]
    expected = sum(int(batch["x"].sum()) for batch in make(home / "plain", None))
    assert [sum(map(int, epoch)) for epoch in zip(*sums, strict=True)] == [expected] * 2
    assert sum(path.stat().st_size for path in blocks_of(cache)) <= limit
    assert not list(cache.glob("tmp-*"))


@pytest.mark.parametrize(
    "options",
    [
        {"disk_cache_bytes": float("nan")},
        {"disk_cache_bytes": float("inf")},
        {"disk_cache_bytes": "10GB"},
        {"disk_cache": ""},
        {"retry_s": float("nan")},
    ],
)
def test_options_without_meaning_are_refused_by_name(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        ReadOptions(**options)


class Pair:
    """What _open() needs of a communicator, of which the other rank has failed, or not."""

    rank = 0

    def __init__(self, failures):
        self.failures = failures

    def broadcast(self, array):
        return array

    def allreduce(self, array):
        return array + self.failures


def test_a_folder_that_one_rank_cannot_use_ends_all(server, tmp_path, cache):
    (tmp_path / "file").write_text("")
    bad = ReadOptions(disk_cache=tmp_path / "file", retry_s=1)
    with pytest.raises(ValueError, match="cannot be used"):
        loading._open(f"{server.url}/plain", None, None, Pair(0), bad)
    for read in (ReadOptions(disk_cache=cache, retry_s=1), ReadOptions(retry_s=1)):
        with pytest.raises(ValueError, match="another rank cannot use its folder"):
            loading._open(f"{server.url}/plain", None, None, Pair(1), read)


def test_each_rank_has_the_folder_that_it_names(server, cache):
    url = f"{server.url}/plain"
    sent = open_map(url, access=RemoteAccess(1.0))
    data = loading._open(url, None, None, Pair(0), ReadOptions(disk_cache=cache, retry_s=2))
    assert sent.access.disk is None
    assert (data.access.disk.folder, data.access.retry_s) == (str(cache), 2)
