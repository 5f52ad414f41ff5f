"""A slab folder that was copied to each node's own disk: other inodes and times, one dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hdf5_samples import make_slabs
from toolkit.cluster import Cluster

__all__: list[str] = []

pytestmark = pytest.mark.long
# Each node has a /dev/shm of its own.
PROGRAM = """
import shutil, sys
from mpi4py import MPI
import hsgd
from hsgd.io import PartitionedLoader
comm = hsgd.Comm()
own = sys.argv[1]
if comm.local_rank == 0:
    shutil.copytree(sys.argv[2 + comm.cross_rank], own, copy_function=shutil.copyfile)
comm.barrier()
try:
    with PartitionedLoader(own, 4, pad=False, comm=comm, as_numpy=True) as loader:
        rows = [int(row) for batch in loader for row in batch["number"]]
    every = comm.allgather_object(rows)
    if comm.rank == 0:
        print(sorted(row for rows in every for row in rows))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def run(cluster: Callable[..., Cluster], name: str, *folders: Path) -> list[str]:
    argv = [sys.executable, "-c", PROGRAM, f"/dev/shm/{name}", *map(str, folders)]
    done = cluster(2).mpirun(3, argv, hosts="node1:2,node2:1", timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()  # type: ignore[no-any-return]


def test_each_node_reads_its_own_copy(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    folder = make_slabs(tmp_path / "data", 29, 3)
    assert run(cluster, "same", folder, folder) == [str([*range(29)])]


def test_another_dataset_on_a_node_is_refused_by_all(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    folders = [make_slabs(tmp_path / name, 29, 3) for name in "ab"]
    for line in run(cluster, "other", *folders):
        assert line.startswith("SignatureMismatch: PartitionedLoader('/dev/shm/other')"), line
        assert "copy the same folder to every node" in line
