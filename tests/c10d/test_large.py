"""Collectives and messages of more than 2**31 elements and bytes, on one node and over TCP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from backend_programs import group
from hsgd.comm.connect import own_node, tcp_meeting
from ranks import Ranks, Seat

__all__: list[str] = []

SIZE = 2
MOST_RANKS = SIZE
LARGE = (1 << 31) + 4098  # beyond what a 32-bit count holds
HALF = LARGE // SIZE
LIMIT = timedelta(seconds=240)  # to touch 2 GiB takes a loaded machine long
PLACES = (0, 1, HALF - 1, HALF, (1 << 31) - 1, 1 << 31, LARGE - 1)


def marked(salt: int, count: int = LARGE) -> torch.Tensor:
    """Zeros, but for numbers at the places where a count or an offset could be cut."""
    tensor = torch.zeros(count, dtype=torch.int8)
    for number, place in enumerate(PLACES):
        if place < count:
            tensor[place] = salt + number
    return tensor


def check(found: torch.Tensor, wanted: dict[int, int]) -> None:
    assert {place: int(found[place]) for place in wanted} == wanted
    assert int(torch.count_nonzero(found)) == sum(value != 0 for value in wanted.values())


def whole(salt: int) -> dict[int, int]:
    return {place: salt + number for number, place in enumerate(PLACES)}


def part(salt: int, begin: int) -> dict[int, int]:
    """What marked() has from `begin` on, in a half."""
    return {
        place - begin: value for place, value in whole(salt).items() if 0 <= place - begin < HALF
    }


def joined(salts: list[int]) -> dict[int, int]:
    """Halves of marked(), one after the other."""
    return {
        begin * HALF + place: value
        for begin, salt in enumerate(salts)
        for place, value in part(salt, 0).items()
    }


def do_all_reduce(rank: int) -> None:
    tensor = marked(10 * rank + 1)
    dist.all_reduce(tensor)
    check(tensor, {place: 2 * value for place, value in whole(6).items()})


def do_broadcast(rank: int) -> None:
    tensor = marked(20 * rank + 1)
    dist.broadcast(tensor, 1)
    check(tensor, whole(21))


def do_all_gather(rank: int) -> None:
    found = torch.empty(LARGE, dtype=torch.int8)
    dist.all_gather_single(found, marked(10 * rank + 1, HALF))
    check(found, joined([1, 11]))


def do_reduce_scatter(rank: int) -> None:
    found = torch.empty(HALF, dtype=torch.int8)
    dist.reduce_scatter_single(found, marked(10 * rank + 1))
    check(found, {place: 2 * value for place, value in part(6, rank * HALF).items()})


def do_all_to_all(rank: int) -> None:
    found = torch.empty(LARGE, dtype=torch.int8)
    dist.all_to_all_single(found, torch.cat([marked(20 * rank + 1 + k, HALF) for k in range(SIZE)]))
    check(found, joined([1 + rank, 21 + rank]))


def do_all_to_one(rank: int) -> None:
    """Send all to rank 1: one part is larger than 2**31."""
    counts = [0, LARGE] if rank == 0 else [0, 0]
    received = [LARGE, 0] if rank == 1 else [0, 0]
    found = torch.empty(sum(received), dtype=torch.int8)
    source = marked(5) if rank == 0 else torch.empty(0, dtype=torch.int8)
    dist.all_to_all_single(found, source, received, counts)
    if rank == 1:
        check(found, whole(5))


def do_send(rank: int) -> None:
    tensor = marked(9 - rank)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
        check(tensor, whole(9))


def do_broadcast_object(rank: int) -> None:
    text = [b"x" * LARGE if rank == 1 else b""]
    dist.broadcast_object_list(text, 1)
    assert len(text[0]) == LARGE and text[0].endswith(b"x")


EACH: dict[str, Callable[[int], None]] = {
    name.removeprefix("do_"): value for name, value in dict(globals()).items() if name[:3] == "do_"
}


def do_call(seat: Seat, path: str, name: str, nodes: list[int]) -> None:
    tcp_meeting.find_nodes = lambda *_: own_node.number_nodes(nodes)
    with group(seat.rank, SIZE, path, limit=LIMIT):
        EACH[name](seat.rank)


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([0, 1], id="two nodes", marks=pytest.mark.long),
        pytest.param([0, 0], id="one node", marks=[pytest.mark.long, pytest.mark.torch]),
    ],
)
@pytest.mark.parametrize("name", EACH)
def test_more_than_32_bits_count_arrive_whole(
    ranks: Ranks, path: str, name: str, nodes: list[int]
) -> None:
    ranks.run(do_call, path, name, nodes, on=range(SIZE), limit_s=300)
