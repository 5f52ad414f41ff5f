"""Ranks whose parameters differ are told of it within the promised steps, with the parameter and
the ranks in the minority."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

PROMISED = 264


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as pool:
        yield pool


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


def found(seat: Seat, path: str, size: int, fault: str, at: int) -> tuple[int, Any, str]:
    from hsgd import ReplicasDiffer

    with job(seat, path, size) as hvd:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(6, 5))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters()
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
