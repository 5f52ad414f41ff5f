"""Values that float16 does not hold: a rank that sends them, or gets them, says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

WORDS = "finite values are infinite"


def told(call: Any) -> list[str]:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


# Of each collective: what rank 0 gives, and whether it is told. Rank 1 gives ones.
VALUES: dict[str, tuple[list[float], bool]] = {
    "small": ([1.0, -65504.0], False),
    "large": ([1.0, 7e4], True),
    "large and negative": ([-7e4, 1.0], True),
    "infinite before": ([float("inf"), 1.0], False),
    "no number before": ([float("nan"), 1.0], False),
    "none": ([], False),
}


def reduce_in_float16(seat: Seat, path: str) -> list[list[str]]:
    with job(seat, path, 2) as hvd:
        found = []
        for name, (values, _) in VALUES.items():
            own = torch.tensor(values if seat.rank == 0 else [1.0] * len(values))
            fp16 = {"compression": hvd.Compression.fp16, "name": name}
            found.append(told(lambda own=own, fp16=fp16: hvd.allreduce(own, **fp16)))
        return found


def test_an_allreduce_in_float16_tells_of_values_that_it_does_not_hold() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(reduce_in_float16, meeting_point())
    for lines, (_, tells) in zip(first, VALUES.values(), strict=True):
        assert len(lines) == tells
        assert all(WORDS in line and "65504" in line and "bf16" in line for line in lines)
    assert second == [[]] * len(VALUES)


def train(seat: Seat, path: str, factors: list[float], op: str) -> list[list[str]]:
    """What each step tells of whose gradients are this rank's factor."""
    with job(seat, path, 2) as hvd:
        net = nn.Linear(3, 1, bias=False)
        sgd = torch.optim.SGD(net.parameters(), lr=1e-9)
        optimizer = hvd.DistributedOptimizer(
            sgd, net.named_parameters(), compression=hvd.Compression.fp16, op=getattr(hvd, op)
        )

        def step(factor: float) -> None:
            optimizer.zero_grad()
            (net(torch.ones(1, 3)) * (factor if seat.rank == 0 else 4e4)).sum().backward()
            optimizer.step()

        return [told(lambda factor=factor: step(factor)) for factor in factors]


@pytest.mark.parametrize(
    ("factors", "op", "telling"),
    [
        ([1.0, 2.0], "Average", [0, 0]),
        ([1.0, 7e4, 7e4], "Average", [0, 1, 0]),  # once
        ([-1.0, 4e4], "Sum", [0, 1]),  # each can be held, their sum cannot
        ([4e4, 4e4], "Average", [0, 0]),
    ],
)
def test_an_optimizer_tells_once_of_gradients_that_became_infinite(
    factors: list[float], op: str, telling: list[int]
) -> None:
    with Ranks(2) as ranks:
        for steps in ranks.run(train, meeting_point(), factors, op):
            assert [len(lines) for lines in steps] == telling
            for line in (line for lines in steps for line in lines):
                assert WORDS in line and "optimizer bucket" in line and "65504" in line
