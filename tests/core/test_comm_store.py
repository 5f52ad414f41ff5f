"""Comm.over_store: nodes that meet without MPI, with the bits that MPI gives.

Run under mpirun, this file is the program of the ranks: MPI starts them, and is what the results
are compared with.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hsgd import Comm
from hsgd.testing.cluster import Cluster

__all__: list[str] = []

PORT = 29651
SIZES = (0, 1, 7, 1021, 100_003, 1_048_577)


@pytest.mark.parametrize("hosts", ["node1:2,node2:2", "node1:2,node2:1,node3:1"])
def test_results_are_those_of_mpi_bit_for_bit(cluster: Callable[..., Cluster], hosts: str) -> None:
    done = cluster(hosts.count(",") + 1).mpirun(
        4, [sys.executable, __file__, "compare"], hosts=hosts
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("alike") == 4


def test_a_killed_rank_of_another_node_is_named(cluster: Callable[..., Cluster]) -> None:
    done = cluster(2).mpirun(
        4,
        [sys.executable, __file__, "kill"],
        hosts="node1:2,node2:2",
        mca={"orte_abort_on_non_zero_status": 0},
    )
    assert done.stdout.count("named rank 3") + done.stderr.count("named rank 3") >= 1, done.stderr


def test_one_process_needs_nobody() -> None:
    import torch.distributed as dist

    with Comm.over_store(dist.HashStore(), 0, 1) as comm:
        assert (comm.rank, comm.size, comm.cross_size) == (0, 1, 1)
        assert comm.allreduce(np.ones(3, np.float32)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(rank: int, size: int) -> None:
    import torch.distributed as dist

    with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
        Comm.over_store(dist.HashStore(), rank, size)


def test_who_does_not_come_is_named_when_the_time_is_over() -> None:
    import torch.distributed as dist

    from hsgd import CollectiveTimeout

    with pytest.raises(CollectiveTimeout, match=r"rank 1 did not come within 0\.5 s"):
        Comm.over_store(dist.HashStore(), 0, 2, timeout_s=0.5)


def make(store_host: str) -> tuple[Comm, Any]:
    import torch.distributed as dist

    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    store = dist.TCPStore(store_host, PORT, size, rank == 0)
    return Comm.over_store(store, rank, size), store


def compare() -> None:
    own, _store = make("node1")
    mpi = Comm()
    assert own.nodes == mpi.nodes
    numbers = np.random.default_rng(own.rank)
    for count in SIZES:
        given = numbers.standard_normal(count).astype(np.float32)
        np.testing.assert_array_equal(own.allreduce(given), mpi.allreduce(given))
        np.testing.assert_array_equal(own.allgather(given), mpi.allgather(given))
        received = [comm.broadcast(given.copy(), root=3) for comm in (own, mpi)]
        np.testing.assert_array_equal(*received)
        whole = np.resize(given, own.size * count)
        scattered = [comm.reduce_scatter(whole) for comm in (own, mpi)]
        np.testing.assert_array_equal(*scattered)
    own.barrier()
    with own.split(own.rank % 2, -own.rank) as part:
        assert part.size == 2
        assert part.allreduce(np.full(5, own.rank, np.float32))[0] == (
            2 if own.rank % 2 == 0 else 4
        )
    print("alike", flush=True)
    own.close()
    mpi.close()


def kill() -> None:
    import signal

    from hsgd import PeerLost

    comm, _store = make("node1")
    comm.barrier()
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1000):
            comm.allreduce(np.ones(1000, np.float32))
    except PeerLost as error:
        with contextlib.suppress(OSError):
            print(f"named rank {error.rank}: {error}", flush=True)
        os._exit(1)


if __name__ == "__main__":
    {"compare": compare, "kill": kill}[sys.argv[1]]()
