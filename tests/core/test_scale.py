"""What a communicator and its arrays cost each rank, counted at several numbers of ranks."""

from __future__ import annotations

import itertools
import os
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd import Comm
from pretended_nodes import meet
from ranks import PATIENT, Ranks, Seat, meeting_point

__all__: list[str] = []

SIZES = (1, 2, 4, 8)
MOST_RANKS = max(SIZES)


def held() -> tuple[int, int]:
    """Mappings of shared memory, and descriptors, of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:hsgd")
    return maps, len(os.listdir("/proc/self/fd"))


def do_count(seat: Seat, path: str, size: int) -> list[tuple[int, int]]:
    """What the communicator adds, then an array of each kind, and another communicator."""
    counts = [held()]
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        comm.barrier()
        counts.append(held())
        arrays = [comm.empty(5000)]
        counts.append(held())
        arrays.append(comm.shared(5000))
        counts.append(held())
        arrays.append(comm.empty(3 << 20))  # on huge pages where there are some
        counts.append(held())
        with comm.split(0) as other:
            other.barrier()
            counts.append(held())
    pairs = itertools.pairwise(counts)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_has_a_mapping_of_each_memory_and_a_descriptor_of_each_process(
    ranks: Ranks, size: int
) -> None:
    for first, *others in ranks.run(do_count, meeting_point(), size, on=range(size)):
        # And one that tells when they end, and the status page.
        assert first == (1, size + 2)
        assert others == [(1, 0)] * 4


def do_meet_below_the_limit(seat: Seat, path: str, size: int) -> bool:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        comm.barrier()
    return few < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 4 * few


def test_a_soft_limit_of_descriptors_is_raised(ranks: Ranks) -> None:
    assert all(ranks.run(do_meet_below_the_limit, meeting_point(), 4, on=range(4)))


def do_count_threads(seat: Seat, path: str, size: int) -> list[int]:
    tasks = Path("/proc/self/task")
    counts = [len(list(tasks.iterdir()))]
    data = np.ones(5000)
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        comm.allreduce(data)
        counts.append(len(list(tasks.iterdir())))
        for _ in range(3):
            comm.allreduce_async(data).wait()
        counts.append(len(list(tasks.iterdir())))
    return [count - counts[0] for count in counts[1:]]


@pytest.mark.parametrize("size", [2, 8])
def test_a_communicator_has_a_thread_from_its_first_asynchronous_call_on(
    ranks: Ranks, size: int
) -> None:
    told = ranks.run(do_count_threads, meeting_point(), size, on=range(size))
    assert told == [[0, 1]] * size


class Counting:
    """A store that counts what its rank asks of it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()
        self.read = 0

    def __getattr__(self, name: str) -> Any:
        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            found = getattr(self._store, name)(*args)
            self.read += len(found) if name == "get" else 0
            return found

        return counted


def do_count_set_up(seat: Seat, folder: str, nodes: list[int]) -> tuple[Counter[str], int, int]:
    """What this rank asks of the store, bytes that it reads there, and descriptors it then has."""
    from torch.distributed import FileStore

    store = Counting(FileStore(f"{folder}/store", -1))
    before = held()[1]
    with meet(seat, folder, nodes, store=store):
        return store.calls, store.read, held()[1] - before


EXCHANGES = 3  # and two more where nodes are found out, and not pretended


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("per_node", [1, 2])
def test_set_up_through_a_store_asks_little_of_each_rank(
    ranks: Ranks, tmp_path: Path, size: int, per_node: int
) -> None:
    nodes = [rank // per_node for rank in range(size)]
    told = ranks.run(do_count_set_up, str(tmp_path), nodes, on=range(size))
    count = max(nodes) + 1
    for rank, (calls, read, descriptors) in enumerate(told):
        assert calls["set"] == (2 if rank == 0 else 1) * EXCHANGES, calls
        assert calls["get"] == (size if rank == 0 else 1) * EXCHANGES, calls
        assert calls["add"] == 1 and calls["wait"] <= calls["get"], calls
        assert read <= size * (800 if rank == 0 else 600), (read, size)
        local = nodes.count(nodes[rank])
        leads = count > 1 and rank - nodes.index(nodes[rank]) < min(map(nodes.count, nodes))
        # One tells when processes end, and one is the status page.
        assert descriptors == local + 2 + ((10 * (count - 1) + 1) if leads else 0)
