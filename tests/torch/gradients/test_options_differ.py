"""Options of DistributedOptimizer that differ between ranks are an error on all of them, in the
first step and before gradients are mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

SIZE = 2
MOST_RANKS = SIZE


def first_step(seat: Seat, path: str, name: str, values: list[Any]) -> str:
    with job(seat, path, SIZE) as hvd:
        model = torch.nn.Linear(2, 1)
        value = values[seat.rank]
        value = getattr(hvd.Compression, value) if name == "compression" else value
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **{name: value})
        passes = 2 if name == "backward_passes_per_step" and seat.rank else 1

        def step() -> None:
            for _ in range(passes):
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        with pytest.raises(hvd.HorovodInternalError) as raised:
            step()
        return str(raised.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("backward_passes_per_step", [1, 2]),
        ("op", [0, 1]),
        ("gradient_predivide_factor", [1.0, 2.0]),
        ("compression", ["none", "bf16"]),
        ("sparse_as_dense", [False, True]),
    ],
)
def test_options_that_differ_are_named_on_all_ranks(
    ranks: Ranks, name: str, values: list[Any]
) -> None:
    texts = ranks.run(first_step, meeting_point(), name, values)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"DistributedOptimizer: {name} is ")
    assert "on rank 1" in texts[0]
    assert "on rank 0; give the same on every rank" in texts[0]
