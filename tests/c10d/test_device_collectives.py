"""The group of CUDA tensors with streams that do nothing, on host tensors: what a machine without a
GPU can show of it. Owns the stand-ins; tests/gpu has the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backend_programs import COLLECTIVES
from hsgd.c10d.devices import device_collectives
from ranks import Ranks, Seat

__all__: list[str] = []

SKIPPED = ("messages", "coalescing", "subgroups")  # which need the group around it


class Stream:
    """Everything is done at once."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: True


@contextlib.contextmanager
def stood_in(rank: int, size: int, path: str) -> Iterator[None]:
    """A default group of the class under test, which takes host tensors."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, Stream)
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        make = torch.futures.Future
        patch.setattr(torch.futures, "Future", lambda **_: make())
        patch.setattr(device_collectives, "_DeviceSide", _HostSide)
        patch.setattr(device_collectives.DeviceCollectives, "_device_type", "cpu")
        patch.setattr(device_collectives.DeviceCollectives, "_device_types", [Stream.device], False)

        def create(options: Any, _: Any) -> Any:
            members = list(options.global_ranks_in_group) or list(range(options.group_size))
            place = options.store, options.group_id, options.group_rank
            return device_collectives.DeviceCollectives(*place, members, options.timeout)

        if "standindevice" not in dist.Backend.backend_list:
            dist.Backend.register_backend("standindevice", create, extended_api=True, devices="cpu")
        store = dist.FileStore(path, size)
        limit = timedelta(seconds=30)
        dist.init_process_group(
            "standindevice", store=store, rank=rank, world_size=size, timeout=limit
        )
        yield
        dist.destroy_process_group()


class _HostSide:
    """What the class under test makes of a Comm, for host tensors."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def check(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def collectives(seat: Seat, path: str, size: int) -> list[str]:
    """Names of collectives that give something else than gloo."""
    names = [name for name in COLLECTIVES if name not in SKIPPED]
    found = {}
    with stood_in(seat.rank, size, path):
        for name in names:
            found[name] = COLLECTIVES[name](seat.rank, size)
    store = dist.FileStore(f"{path}-gloo", size)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=size)
    differing = []
    for name in names:
        try:
            wanted = COLLECTIVES[name](seat.rank, size)
        except RuntimeError:  # gloo cannot
            continue
        if any(not torch.equal(*pair) for pair in zip(found[name], wanted, strict=True)):
            differing.append(name)
    dist.destroy_process_group()
    return differing


def trained(seat: Seat, path: str, size: int) -> list[torch.Tensor]:
    with stood_in(seat.rank, size, path):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 20), float(seat.rank + step))).square().sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_give_what_gloo_gives(size: int, tmp_path: Any) -> None:
    with Ranks(size) as ranks:
        assert ranks.run(collectives, str(tmp_path / "store"), size) == [[]] * size


def test_ddp_trains(tmp_path: Any) -> None:
    with Ranks(2) as ranks:
        one, other = ranks.run(trained, str(tmp_path / "store"), 2)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert all(parameter.isfinite().all() for parameter in one)
