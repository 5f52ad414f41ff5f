"""The learning rate of large-batch training: linear warm-up, polynomial decay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hsgd.optim import LARS, WarmupPolynomialLR

__all__: list[str] = []

WARMUP, TOTAL = 5, 30


def make(**options: float) -> tuple[LARS, WarmupPolynomialLR]:
    first, second = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = LARS([{"params": [first]}, {"params": [second], "lr": 2.0}], lr=10.0)
    return optimizer, WarmupPolynomialLR(optimizer, WARMUP, TOTAL, **options)


def expected(step: int, base: float) -> float:
    if step <= WARMUP:
        return base * step / WARMUP
    left = 1 - (min(step, TOTAL) - WARMUP) / (TOTAL - WARMUP + 1)
    return (base - 1e-4) * left**2 + 1e-4


def test_the_rate_of_each_group_follows_the_reference() -> None:
    optimizer, scheduler = make()
    for step in range(TOTAL + 5):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([expected(step, 10.0), expected(step, 2.0)], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_a_loaded_state_continues() -> None:
    optimizer, scheduler = make(power=1.0, end_lr=0.0)
    for _ in range(12):
        optimizer.step()
        scheduler.step()
    other_optimizer, other = make()
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(scheduler.state_dict())
    for each in (optimizer, other_optimizer):
        each.step()
    scheduler.step()
    other.step()
    assert other.get_last_lr() == scheduler.get_last_lr()


def test_without_warm_up_the_first_rate_is_the_base_rate() -> None:
    optimizer = LARS([nn.Parameter(torch.ones(2, 2))], lr=3.0)
    WarmupPolynomialLR(optimizer, 0, 10)
    assert optimizer.param_groups[0]["lr"] == 3.0


@pytest.mark.parametrize("arguments", [(5, 4), (-1, 4), (0, 0), (1, 4, 0.0), (1, 4, 2.0, -1.0)])
def test_arguments_out_of_range_are_refused(arguments: tuple[float, ...]) -> None:
    optimizer = LARS([nn.Parameter(torch.ones(2, 2))], lr=3.0)
    with pytest.raises(ValueError, match=r"^WarmupPolynomialLR: "):
        WarmupPolynomialLR(optimizer, *arguments)  # type: ignore[arg-type]
