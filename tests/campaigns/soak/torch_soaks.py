"""Programs of ranks over torch.distributed, on the backend "hsgd"."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from campaigns.seat import check
from campaigns.soak.sampled_seat import SampledSeat

__all__ = ["groups", "works"]


def works(seat: SampledSeat) -> None:
    """Eight at a time; every other one is waited for, the rest by the last of them."""
    seat.join_torch()
    wanted = float(sum(range(seat.size)))
    for todo in seat.blocks():
        for left in range(todo, 0, -8):
            given = [torch.full((16,), float(seat.rank)) for _ in range(min(8, left))]
            started: list[Any] = [dist.all_reduce(each, async_op=True) for each in given]
            for work in [*started[::2], started[-1]]:
                work.wait()
            check(given[-1], wanted)
    dist.destroy_process_group()


def groups(seat: SampledSeat) -> None:
    """Of all ranks, used once and destroyed, one after the other."""
    seat.join_torch()
    for _ in seat.operations():
        group: Any = dist.new_group(list(range(seat.size)))
        given = torch.full((16,), float(seat.rank))
        dist.all_reduce(given, group=group)
        check(given, float(sum(range(seat.size))))
        dist.destroy_process_group(group)
    dist.destroy_process_group()
