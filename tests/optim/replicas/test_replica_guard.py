"""Ranks whose parameters differ are told of it within the promised steps, with the parameter and
the ranks in the minority."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hsgd import Comm, ReplicasDiffer
from hsgd.optim.replicas.checksums import CHUNK_WORDS, value_sums
from hsgd.optim.replicas.replica_guard import ReplicaGuard
from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 3
PROMISED = 520
LARGE = 3_000_000


def flip_bit(net: nn.Sequential) -> None:
    net[1].weight.detach().view(torch.int32)[2, 3] ^= 1


def flip_two_signs(net: nn.Sequential) -> None:
    net[1].weight.detach()[2, 3:5].neg_()


def swap(net: nn.Sequential) -> None:
    weights = net[1].weight.detach()
    weights[0] = weights[0].flip(0)


def load(net: nn.Sequential) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def lay_out(net: nn.Sequential) -> None:
    net[0].weight.data = net[0].weight.data.to(memory_format=torch.channels_last)


FAULTS: dict[str, tuple[Any, str]] = {
    "bit": (flip_bit, "values of 1.weight"),
    "signs": (flip_two_signs, "values of 1.weight"),
    "swapped": (swap, "values of 1.weight"),
    "checkpoint": (load, "values of 0.bias"),
    "layout": (lay_out, "strides, shape or dtype of 0.weight"),
}


def found(
    seat: Seat, path: str, size: int, fault: str, at: int, op: str = "Average"
) -> tuple[int, Any, str]:
    with job(seat, path, size) as hvd:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(6, 5))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters(), op=getattr(hvd, op)
        )
        for step in range(at + PROMISED):
            if step == at and seat.rank == size - 1:
                FAULTS[fault][0](net)
            optimizer.zero_grad()
            try:
                net(torch.ones(1, 2, 8, 8)).mean().backward()
                optimizer.step()
            except ReplicasDiffer as error:
                return step, error.ranks, str(error)
        return -1, (), ""


# A layout that differs from the start is refused before the guard looks.
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("fault", "at"), [(fault, at) for fault in FAULTS for at in (0, 3) if at or fault != "layout"]
)
def test_a_rank_that_differs_is_named(ranks: Ranks, size: int, at: int, fault: str) -> None:
    answers = ranks.run(found, meeting_point(), size, fault, at, on=range(size))
    assert len(set(answers)) == 1
    step, minority, line = answers[0]
    assert at <= step < at + PROMISED and minority == (size - 1,)
    assert f"rank {size - 1} has other {FAULTS[fault][1]} than" in line and "\n" not in line


@pytest.mark.parametrize("fault", ["bit", "checkpoint", "layout"])
def test_a_rank_that_differs_is_named_with_adasum(ranks: Ranks, fault: str) -> None:
    answers = ranks.run(found, meeting_point(), 3, fault, 3, "Adasum", on=range(3))
    assert len(set(answers)) == 1
    step, minority, line = answers[0]
    assert 3 <= step < 3 + PROMISED and minority == (2,)
    assert f"rank 2 has other {FAULTS[fault][1]} than" in line


PLACES = [  # tensor, element, bit
    ("large", 0, 31),
    ("large", 1234567, 0),
    ("large", LARGE - 1, 22),
    ("odd", 3, 3),
    ("odd", 2001, 9),  # behind the last whole word of 32 bits, as a view that begins at an odd one
    ("strided", 17, 5),
]


def odd_places(seat: Seat, path: str, size: int) -> list[tuple[int, str]]:
    """Of each place the steps until a flipped bit is found, and the tensor."""
    torch.manual_seed(1)
    held = {
        "large": torch.randn(LARGE),
        "odd": torch.randn(2003).bfloat16()[1:],
        "strided": torch.randn(40, 50)[:, 3:9],
    }
    answers = []
    with Comm.local(path, seat.rank, size) as comm:
        for name, element, bit in PLACES:
            guard = ReplicaGuard(lambda: list(held.items()))
            flat = held[name]
            for step in range(PROMISED + 9):
                if step == 9 and seat.rank == 1:
                    place = tuple(torch.unravel_index(torch.tensor(element), flat.shape))
                    octets = flat[place].reshape(1).view(torch.uint8).clone()
                    octets[bit // 8] ^= 1 << bit % 8
                    kept, flat[place] = flat[place].clone(), octets.view(flat.dtype)[0]
                try:
                    guard.check(comm)
                except ReplicasDiffer as error:
                    answers.append((step, str(error.parameter)))
                    break
            if seat.rank == 1:
                flat[place] = kept
    return answers


def test_each_bit_of_a_large_model_is_compared_in_its_turn(ranks: Ranks) -> None:
    answers = ranks.run(odd_places, meeting_point(), 2, on=range(2))
    assert answers[0] == answers[1]
    assert [name for _, name in answers[0]] == [name for name, _, _ in PLACES]
    assert all(9 <= step < 9 + PROMISED for step, _ in answers[0])


def test_the_core_and_torch_have_the_same_sums() -> None:
    """A device has no core: one of its ranks is compared with one in host memory."""
    words = torch.randint(-(1 << 31), 1 << 31, (CHUNK_WORDS + 77,), dtype=torch.int32)
    own = list(value_sums(words, 5, len(words)))
    shifted = torch.empty(4 * len(words) + 2, dtype=torch.uint8)[2:]
    shifted.copy_(words.view(torch.uint8))  # begins within a word, so torch sums
    assert own == [int(one) for one in value_sums(shifted, 5, len(words))]
