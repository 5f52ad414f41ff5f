"""torch.ops.hsgd over two nodes and MPI, beside asynchronous calls, where MPI is for one thread at
a time.

Run under mpirun, this file is the program of the ranks.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hsgd import Comm, HsgdError, operators
from hsgd.config import Config
from hsgd.operators import Group, kernels
from toolkit.cluster import Cluster

__all__: list[str] = []

RANKS = 4  # two nodes of two
TURNS = 40
SIZES = (3, 40_000)  # rows of a rank: with the headers, and in several steps
JOB_S = 150.0
KINDS = ["python"] if "older" in kernels.why_in_python() else ["native", "python"]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_operators_between_nodes_are_right_beside_asynchronous_calls(
    cluster: Callable[..., Cluster], tmp_path: Path, kind: str
) -> None:
    argv = [sys.executable, __file__, kind, str(tmp_path / "store")]
    done = cluster(2).mpirun(RANKS, argv, timeout_s=JOB_S)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines == [["well", "well", TURNS]] * RANKS, done.stdout


# --- the program of the ranks ---


def check(found: torch.Tensor, wanted: float, what: str) -> None:
    assert bool((found == wanted).all()), f"{what}: {found[:4].tolist()}, expected {wanted}"


def use_operators(group: Group, rank: int, turn: int) -> None:
    """Each operator once; all sums are exact."""
    rows, size = SIZES[turn % 2], group.size
    mine = torch.full((rows, 2), rank + turn * 1.0)
    total = sum(range(size)) + size * turn
    check(operators.allreduce(mine, group), total, "allreduce")
    check(operators.allreduce_(mine.clone(), group, "max"), size - 1 + turn, "allreduce_")
    check(operators.broadcast_(mine.clone(), group, turn % size), turn % size + turn, "broadcast_")
    for each, part in enumerate(operators.allgather(mine, group).split(rows)):
        check(part, each + turn, "allgather")
    whole = torch.full((size * rows, 2), rank + turn * 1.0)
    check(operators.reduce_scatter(whole, group), total, "reduce_scatter")


def start(comm: Comm, turn: int) -> Any:
    data = torch.full((SIZES[(turn + 1) % 2],), comm.rank + turn * 1.0)
    return comm.allreduce_async(data), sum(range(comm.size)) + comm.size * turn


def run_turns(comm: Comm, beside: list[Comm]) -> int:
    """Operators of `comm` while calls of the others are under way; how often it refused one."""
    group, refused = operators.group(comm), 0
    for turn in range(TURNS):
        under_way = [start(each, turn) for each in beside for _ in range(3)]
        use_operators(group, comm.rank, turn)
        with contextlib.suppress(HsgdError):  # MPI is not for the thread of its queue
            start(comm, turn)
            refused -= 1
        refused += 1
        use_operators(group, comm.rank, turn + 1)
        for handle, total in under_way:
            check(handle.wait(), total, "beside")
    return refused


def main() -> None:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI
    from torch.distributed import FileStore

    if sys.argv[1] == "python":
        kernels.LIBRARY = Path("/nonexistent")
    assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
    world = MPI.COMM_WORLD
    config = Config(oneshot_bytes=1024, store="ordinary", timeout_s=60)
    comm, other = Comm(world.Dup(), config), Comm(world.Dup(), config)
    near = comm.split(comm.cross_rank)
    far = Comm.over_store(FileStore(sys.argv[2], RANKS), world.rank, RANKS, config=config)
    assert near is not None and (near.cross_size, far.cross_size, comm.cross_size) == (1, 2, 2)
    ended = []

    def work() -> None:
        try:
            group = operators.group(other)
            for turn in range(2 * TURNS):
                use_operators(group, other.rank, turn)
            ended.append("well")
        except Exception as error:
            ended.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        refused = run_turns(comm, [near, far])
        ended.append("well")
    except Exception as error:
        refused = -1
        ended.append(f"{type(error).__name__}: {error}")
    thread.join()
    for each in (near, far, other, comm):
        each.close()
    print(json.dumps([*ended, refused]), flush=True)


if __name__ == "__main__":
    main()
