"""What scripts do with gradients between backward() and step(), under DDP over backend "hsgd"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hsgd.c10d
from gradient_idioms import IDIOMS, Net, Script, bits_of, largest_difference
from ranks import Ranks, Seat

__all__: list[str] = []

MOST_RANKS = 3
# What DDP itself does not serve, over gloo neither: backward() without its forward(), parameters
# that begin or cease to need gradients, a closure whose loss the optimizer looks at (it is that of
# one rank), and, with torch 2.13, dense parameters beside sparse ones.
NOT_DDPS = {
    "lbfgs",
    "sparse",
    "two_losses",
    "a_backward_that_failed",
    "a_checkpointed_backward_that_failed",
    "frozen_and_thawed",
    "groups_added_later",
    "checkpointed_reentrantly",
}


def run(name: str, rank: int, size: int) -> Net:
    torch.manual_seed(5)
    model = Net()
    script = Script(model, None, lambda **_: None, lambda rows: rows, model)
    script.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if size > 1:

        def wrap(**_: Any) -> None:
            script.called = DistributedDataParallel(model, bucket_cap_mb=1e-3)

        script.wrap = wrap
        script.take_part(rank, size)
        if name == "channels_last":
            model.to(memory_format=torch.channels_last)
        wrap()
    (idiom,) = (idiom for idiom in IDIOMS if idiom.__name__ == name)
    idiom(script)
    return model


def compare(seat: Seat, path: str, size: int) -> list[Any]:
    torch.set_num_threads(1)
    failures, finals = [], []
    hsgd.c10d.register()
    store = dist.FileStore(path, size)
    dist.init_process_group("hsgd", store=store, rank=seat.rank, world_size=size)
    try:
        for name in [i.__name__ for i in IDIOMS if i.__name__ not in NOT_DDPS]:
            model, reference = run(name, seat.rank, size), run(name, 0, 1)
            finals.append(bits_of(model))
            difference = largest_difference(model, reference)
            if not difference < 1e-9:
                failures.append((name, difference))
    finally:
        dist.destroy_process_group()
    return [failures, finals]


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_trains_like_one_process(ranks: Ranks, size: int, tmp_path: Path) -> None:
    found = ranks.run(compare, str(tmp_path / "store"), size, on=range(size))
    assert [failures for failures, _ in found] == [[]] * size
    assert all(finals == found[0][1] for _, finals in found)
