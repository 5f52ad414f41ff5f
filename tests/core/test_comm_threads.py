"""Several threads with a communicator each, where MPI was initialized for less than all of them.

Run under mpirun, this file is the program of the ranks.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolkit.cluster import Cluster

__all__: list[str] = []

RANKS = 4  # two nodes of two
CALLS = 100
JOB_S = 150.0


def outcomes(nodes: Cluster, level: str) -> list[list[str]]:
    """By rank, how each thread ended."""
    done = nodes.mpirun(RANKS, [sys.executable, __file__, level], timeout_s=JOB_S)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == RANKS, done.stdout
    return lines


@pytest.mark.long
@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_threads_with_a_communicator_each_work_at_once(
    cluster: Callable[..., Cluster], level: str
) -> None:
    assert outcomes(cluster(2), level) == [["well", "well"]] * RANKS


@pytest.mark.long
@pytest.mark.parametrize("level", ["single", "funneled"])
def test_a_thread_that_may_not_call_mpi_is_refused_on_all_ranks(
    cluster: Callable[..., Cluster], level: str
) -> None:
    for refused, created in outcomes(cluster(2), level):
        assert refused.startswith("HsgdError: collectives between nodes, in this thread: MPI was ")
        assert created.startswith(
            "HsgdError: set-up over MPI: MPI was initialized for MPI_THREAD_FUN"
        )
        assert "thread_level = 'multiple'" in refused and "\n" not in refused


# --- the program of the ranks ---


def add_up(comm: Any) -> None:
    for call in range(CALLS):
        data = np.full((5, 40_000)[call % 2], float(comm.rank + call))
        total = sum(rank + call for rank in range(comm.size))
        assert (comm.allreduce(data) == total).all()


def main() -> None:
    import mpi4py

    mpi4py.rc.thread_level = sys.argv[1]
    from mpi4py import MPI

    from hsgd import Comm
    from hsgd.config import Config

    world = MPI.COMM_WORLD
    config = Config(oneshot_bytes=1024, store="ordinary", timeout_s=60)
    may_share = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
    comms = [Comm(world.Dup(), config) for _ in range(2)]
    ended = ["", ""]

    def work(index: int) -> None:
        try:
            if index == 1 and not may_share:
                Comm(world, config)
            add_up(comms[index])
            ended[index] = "well"
        except Exception as error:
            ended[index] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        add_up(comm)  # in the thread that may
        comm.close()
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
