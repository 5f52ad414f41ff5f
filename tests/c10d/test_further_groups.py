"""Process groups of ranks that another group has: what the later ones know, and must not know."""

from __future__ import annotations

import os
import resource
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from backend_programs import LIMIT, group
from hsgd.comm.connect import own_node, tcp_meeting
from ranks import Ranks, Seat

__all__: list[str] = []

SIZE = 3
MOST_RANKS = SIZE


def do_place(seat: Seat, path: str, nodes: list[int]) -> list[tuple[int, dict[str, int]]]:
    """Return nodes and sizes of a group of all ranks, and of the same again, and of two."""
    tcp_meeting.find_nodes = lambda board, _: own_node.number_nodes(
        [nodes[member] for member in board.members]
    )
    found = []
    with group(seat.rank, SIZE, path):
        again, pair = dist.new_group(), dist.new_group([1, 2])
        for part in (dist.group.WORLD, again, pair):
            if isinstance(part, dist.ProcessGroup):  # this rank is in it
                tensor = torch.ones(100_000)
                dist.all_reduce(tensor, group=part)
                assert bool((tensor == part.size()).all())
                comm = part.comm  # type: ignore[attr-defined]
                found.append((comm.cross_size, comm.measured(comm._config)))
    return found


def test_groups_of_known_ranks_lie_where_these_do_and_measure_nothing(
    ranks: Ranks, path: str
) -> None:
    for number, (nodes, whole, part) in enumerate([([0, 0, 0], 1, 1), ([0, 1, 1], 2, 1)]):
        for rank, found in enumerate(ranks.run(do_place, f"{path}-{number}", nodes)):
            assert [each for each, _ in found] == [whole, whole, part][: 3 if rank else 2]
            assert found[0][1] == found[1][1]


def do_make_many(seat: Seat, path: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with group(seat.rank, SIZE, path):
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
        for _ in range(60):  # of four descriptors and more, never destroyed
            tensor = torch.ones(4)
            dist.all_reduce(tensor, group=dist.new_group())
            assert tensor.tolist() == [SIZE] * 4


def test_many_groups_outgrow_the_soft_limit_of_descriptors(ranks: Ranks, path: str) -> None:
    ranks.run(do_make_many, path)


def do_join_two_jobs(seat: Seat, path: str) -> tuple[float, int]:
    """Make a group of rank 1 of each of two jobs, as programs do that connect a trainer to others.

    Its ranks have no numbers in a job, and so the same ones as those of each job. Each job has a
    node of its own.
    """
    tcp_meeting.find_nodes = lambda board, _: [0, 1] if "both" in board.prefix else [0, 0]
    job, rank = divmod(seat.rank, 2)
    with group(rank, 2, f"{path}-{job}", limit=timedelta(seconds=20)):
        dist.new_group()
        if rank == 1:
            store = dist.FileStore(f"{path}-both", 2)
            made = distributed_c10d._new_process_group_helper(
                2, job, [], "hsgd", dist.PrefixStore("both", store), "both", timeout=LIMIT
            )
            tensor = torch.full((3,), 1.0 + job)
            made[0].allreduce([tensor]).wait()
            return float(tensor.sum()), made[0].comm.cross_size
    return 0.0, 0


def test_a_group_of_two_jobs_is_not_taken_for_one_of_a_job(path: str) -> None:
    with Ranks(4) as pool:
        assert pool.run(do_join_two_jobs, path) == [(0.0, 0), (9.0, 2)] * 2
