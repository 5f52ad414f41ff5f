"""The memory of several nodes: slabs travel between them instead of being read again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hsgd.io.convert import slab_folder_writer as writing

import cache_programs
from cache_programs import CASES, COUNT, EPOCHS
from hdf5_samples import make_ragged_slabs
from toolkit.cluster import Cluster

__all__: list[str] = []

pytestmark = pytest.mark.long

SLABS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 samples in 24 slabs of 5, one field ragged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "CHECKSUM_BYTES", 150)
        return make_ragged_slabs(tmp_path_factory.mktemp("nodes") / "data", COUNT, SLABS)


@pytest.mark.parametrize("hosts", ["node1:2,node2:2", "node1:2,node2:1"])
def test_slabs_travel_between_nodes_and_nothing_is_read_twice(
    cluster: Callable[..., Cluster], folder: Path, hosts: str
) -> None:
    size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    argv = [sys.executable, cache_programs.__file__, str(folder)]
    done = cluster(2).mpirun(size, argv, hosts=hosts, timeout_s=180.0)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # One parse of the metadata per job and case: the index and all slabs, by rank 0.
    assert found["opened"] == [len(CASES) * (SLABS + 1)] + [0] * (size - 1)

    files, exchanged, besides = zip(*found["comm"], strict=True)
    assert files == (files[0],) * EPOCHS  # each slab came from the disk before the first epoch
    assert exchanged[0] == 0 < exchanged[-1]
    assert besides == (0,) * EPOCHS
    files, exchanged, _ = zip(*found["files"], strict=True)
    assert files[0] < files[-1]
    assert exchanged == (0,) * EPOCHS
    for case in ("few", "block"):
        files, exchanged, besides = zip(*found[case], strict=True)
        assert exchanged[-1] > 0 < besides[0]
