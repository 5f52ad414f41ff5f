"""DDP's ranks that differ are told of it, by hsgd.torch.guard() and by HSGD_CHECK_REPLICAS."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import hsgd.c10d
from hsgd import ReplicasDiffer
from ranks import Ranks, Seat

__all__: list[str] = []

MOST_RANKS = 3
STEPS = 270


def flip_bit(net: nn.Sequential) -> None:
    net[0].weight.detach().view(torch.int32)[2, 3] ^= 1


def update_locally(net: nn.Sequential) -> None:
    net[2].bias.detach().add_(1e-3)


def load(net: nn.Sequential) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def count_batch(net: nn.Sequential) -> None:
    net[1].num_batches_tracked.add_(1)


FAULTS: dict[str, tuple[Callable[[nn.Sequential], None], str]] = {
    "bit": (flip_bit, "0.weight"),
    "local": (update_locally, "2.bias"),
    "checkpoint": (load, "0.bias"),
    "buffer": (count_batch, "1.num_batches_tracked"),
}


def found(
    seat: Seat, path: str, size: int, backend: str, fault: str, wanted: str
) -> tuple[int, tuple[int, ...], str]:
    from hsgd.torch import guard

    torch.set_num_threads(1)
    os.environ["HSGD_CHECK_REPLICAS"] = wanted
    hsgd.c10d.register()
    store = dist.FileStore(path, size)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=size)
    try:
        torch.manual_seed(seat.rank)
        net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        model = DistributedDataParallel(net, broadcast_buffers=False)
        guard(model, buffers=fault == "buffer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            if step == 3 and seat.rank == size - 1:
                FAULTS[fault][0](net)
            optimizer.zero_grad()
            try:
                # BatchNorm's statistics are alike, as SyncBatchNorm's
                model(torch.ones(4, 6) + torch.arange(4)[:, None]).sum().backward()
            except ReplicasDiffer as error:
                return step, error.ranks, str(error)
            optimizer.step()
        return -1, (), ""
    finally:
        dist.destroy_process_group()
        del os.environ["HSGD_CHECK_REPLICAS"]


@pytest.mark.parametrize(
    ("size", "backend", "fault", "wanted"),
    [(3, "hsgd", fault, wanted) for fault in FAULTS for wanted in ("share", "1")]
    + [(2, "gloo", "bit", "1")],
)
def test_a_rank_of_ddp_that_differs_is_named(
    ranks: Ranks, tmp_path: Path, size: int, backend: str, fault: str, wanted: str
) -> None:
    path = str(tmp_path / "store")
    answers = ranks.run(found, path, size, backend, fault, wanted, on=range(size))
    assert len(set(answers)) == 1
    step, minority, line = answers[0]
    assert 3 <= step < 3 + (1 if wanted == "1" else 520) and minority == (size - 1,)
    assert f"rank {size - 1} has other values of {FAULTS[fault][1]} than" in line


def undisturbed(seat: Seat, path: str, size: int) -> None:
    """Accumulation, joins of uneven inputs, and evaluation on one rank."""
    from hsgd.torch import guard

    os.environ["HSGD_CHECK_REPLICAS"] = "1"
    hsgd.c10d.register()
    dist.init_process_group(
        "hsgd", store=dist.FileStore(path, size), rank=seat.rank, world_size=size
    )
    try:
        net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        model = guard(DistributedDataParallel(net, broadcast_buffers=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(more: int) -> None:
            optimizer.zero_grad()
            with model.no_sync():
                for _ in range(more):
                    model(torch.randn(4, 6)).sum().backward()
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()

        for _ in range(3):
            step(1 + seat.rank)
        if seat.rank == 0:
            with torch.no_grad():
                model(torch.randn(4, 6))
            net.eval()(torch.randn(4, 6))
            net.train()(torch.randn(4, 6)).sum()
        step(0)
        with Join([model]):
            for _ in range(1 + seat.rank):
                step(0)
        step(0)
    finally:
        dist.destroy_process_group()
        del os.environ["HSGD_CHECK_REPLICAS"]


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_are_alike_are_left_alone(ranks: Ranks, tmp_path: Path, size: int) -> None:
    ranks.run(undisturbed, str(tmp_path / "store"), size, on=range(size))


def by_variable(seat: Seat, path: str, wanted: str) -> str:
    os.environ["HSGD_CHECK_REPLICAS"] = wanted
    hsgd.c10d.register()
    dist.init_process_group("hsgd", store=dist.FileStore(path, 2), rank=seat.rank, world_size=2)
    try:
        model = DistributedDataParallel(nn.Linear(3, 1))
        model(torch.ones(2, 3)).sum().backward()
        if seat.rank == 1:
            model.module.weight.detach().add_(1)
        try:
            model(torch.ones(2, 3)).sum().backward()
        except ReplicasDiffer as error:
            return str(error)
        return ""
    finally:
        dist.destroy_process_group()
        del os.environ["HSGD_CHECK_REPLICAS"]


def test_the_variable_guards_every_ddp(tmp_path: Path) -> None:
    with Ranks(2) as pool:  # of their own: it holds until the process ends
        first = pool.run(by_variable, str(tmp_path / "first"), "", on=range(2))
        second = pool.run(by_variable, str(tmp_path / "second"), "1", on=range(2))
    assert first == ["", ""]
    assert all("rank 1 has other values of weight than rank 0" in line for line in second)


def test_another_model_is_refused() -> None:
    from hsgd.torch import guard

    other: Any = nn.Linear(2, 1)
    with pytest.raises(TypeError, match="Linear is not a DistributedDataParallel"):
        guard(other)
