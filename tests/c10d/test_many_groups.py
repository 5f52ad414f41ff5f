"""Many process groups of the same ranks: what each takes, and what the later ones know already."""

from __future__ import annotations

import os
import resource

import pytest
import torch
import torch.distributed as dist

from backend_programs import group
from hsgd.comm.connect import own_node, tcp_meeting
from ranks import Ranks, Seat

__all__: list[str] = []

SIZE = 3
MOST_RANKS = SIZE
GROUPS = 60


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def limit_files(more: int) -> None:
    """Allow so many descriptors besides those that are open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, most))


def do_make_many(seat: Seat, path: str) -> int:
    """Make more groups than there are descriptors, and use all of them; return what they took."""
    with group(seat.rank, SIZE, path):
        own = dist.group.WORLD
        assert own is not None
        pairs = dist.new_group([0, 2])
        before = open_files()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit_files(GROUPS // 2)
        try:
            groups = [dist.new_group() for _ in range(GROUPS)]
            for number, part in enumerate(groups):
                tensor = torch.full((number + 1,), float(seat.rank))
                dist.all_reduce(tensor, group=part)
                assert tensor.tolist() == [3.0] * (number + 1)
            taken = open_files() - before
            talk(seat.rank, groups[7], pairs)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return taken


def talk(rank: int, part: dist.ProcessGroup, pairs: dist.ProcessGroup) -> None:
    """Send messages that differ by group alone, and receive them in another order."""
    both = list(enumerate((part, pairs)))
    if rank == 0:
        sent = [dist.isend(torch.tensor([value]), 2, group=each) for value, each in both]
        for work in sent:
            assert work is not None
            work.wait()
    if rank == 2:
        for value, each in reversed(both):
            found = torch.tensor([-1])
            dist.recv(found, 0, group=each)
            assert found.item() == value


def test_a_group_takes_no_descriptor_until_messages(ranks: Ranks, path: str) -> None:
    assert max(ranks.run(do_make_many, path)) < 5  # FileStore opens its file now and then


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


def do_tag(seat: Seat, path: str) -> list[int]:
    """Exchange messages with all kinds of tags in groups that share a gloo, in two orders."""
    found = []
    with group(seat.rank, SIZE, path):
        parts = [dist.group.WORLD, dist.new_group(), dist.new_group([2, 0])]
        tags = [0, 1, (1 << 18) - 1, 1 << 18, (1 << 19) + 1, 1 << 30, (1 << 31) - 1]
        calls = [(part, tag) for part in parts for tag in tags]
        if seat.rank == 0:
            sent = [
                dist.isend(torch.tensor([number]), 2, group=part, tag=tag)
                for number, (part, tag) in enumerate(calls)
            ]
            dist.barrier()
            for work in sent:
                assert work is not None
                work.wait()
        else:
            dist.barrier()
        with pytest.raises(ValueError, match="tag -1 is negative"):
            dist.isend(torch.tensor([1]), (seat.rank + 1) % SIZE, group=parts[1], tag=-1)
        for part, tag in reversed(calls) if seat.rank == 2 else ():
            value = torch.tensor([-1])
            assert dist.recv(value, group=part, tag=tag) == 0
            found.append(int(value))
    return found


def test_messages_find_their_group_and_tag(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_tag, path)[2] == list(range(20, -1, -1))
