"""What ranks do with torch.distributed on tensors of a device; run by the tests of this folder.

Each is a function of a Seat, a path that is new to the ranks, their number, the kind of a Place,
and a folder for the store. Owns the comparison with gloo, which has its tensors in host memory.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from backend_programs import COLLECTIVES, group
from cuda_training import difference, new_model, sgd, train, trained_alone
from places import Place
from ranks import Seat

__all__ = ["all_collectives", "no_waits_of_groups", "train_with_ddp", "train_with_fsdp"]

Results = dict[str, list[Tensor]]


def _run_all(rank: int, size: int, names: list[str]) -> tuple[Results, list[str]]:
    """What collectives give in the group that is there, and who is refused, on all ranks."""
    found: Results = {}
    refused = []
    for name in names:
        try:
            found[name] = [each.cpu() for each in COLLECTIVES[name](rank, size)]
        except RuntimeError:
            refused.append(name)
    return found, refused


def all_collectives(seat: Seat, path: str, size: int, kind: str, folder: str) -> list[str]:
    """The same calls over hsgd on the device and over gloo on the CPU, or where gloo of this torch
    lacks one over hsgd on the CPU. Returns the names that were compared.
    """
    place, rank = Place(kind, seat.rank), seat.rank
    with group(rank, size, f"{folder}/of", "gloo"):
        expected, refused = _run_all(rank, size, list(COLLECTIVES))
    with group(rank, size, f"{folder}/on-host", "hsgd"):
        more, missing = _run_all(rank, size, refused)
    assert not missing
    expected |= more
    with group(rank, size, f"{folder}/here", place.backend):
        torch.set_default_device(place.device)
        try:
            for name, program in COLLECTIVES.items():
                found = [each.cpu() for each in program(rank, size)]
                assert len(found) == len(expected[name]), name
                for one, other in zip(found, expected[name], strict=True):
                    assert torch.equal(one, other), (name, rank, one, other)
        finally:
            torch.set_default_device(None)
    return sorted(expected)


def train_with_ddp(seat: Seat, path: str, size: int, kind: str, folder: str) -> float:
    """How far DDP's parameters are from those of one rank on the CPU."""
    place = Place(kind, seat.rank)
    with group(seat.rank, size, f"{folder}/store", place.backend):
        model = nn.parallel.DistributedDataParallel(new_model().to(place.device), bucket_cap_mb=0.1)
        train(model, sgd(model.parameters()), seat.rank)
        return difference(model.parameters(), trained_alone(size))


def train_with_fsdp(seat: Seat, path: str, size: int, kind: str, folder: str) -> float:
    """The same of FSDP2."""
    place = Place(kind, seat.rank)
    with group(seat.rank, size, f"{folder}/store", place.backend):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more ranks than devices
            mesh = init_device_mesh(place.device.type, (size,))
        model = new_model().to(place.device)
        for part in model:
            if isinstance(part, nn.Linear):
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, sgd(model.parameters()), seat.rank)
        full = [each.full_tensor() for each in model.parameters()]  # type: ignore[attr-defined]
        return difference(full, trained_alone(size))


def no_waits_of_groups(seat: Seat, path: str, size: int, kind: str, folder: str) -> None:
    """Collectives return while the device has not even come to their inputs."""
    place = Place(kind, seat.rank)

    def calls() -> list[Tensor]:
        mine = torch.full((100_000,), seat.rank + 1.0, device=place.device)
        sums, root, joined = mine.clone(), mine.clone(), mine.new_empty(size * mine.numel())
        works = [dist.all_reduce(sums, async_op=True), dist.broadcast(root, 0, async_op=True)]
        works.append(dist.all_gather_into_tensor(joined, mine, async_op=True))
        for work in works:
            work.wait()
        own = mine.new_empty(mine.numel())
        dist.reduce_scatter_tensor(own, joined)
        return [sums, root, joined, own]

    with group(seat.rank, size, f"{folder}/store", place.backend):
        calls()
        with place.no_waits():
            place.sleep(1000)
            slept = place.mark()
            sums, root, joined, own = calls()
            assert slept is None or not slept.query(), "a call waited for the device"
        assert torch.equal(sums, torch.full_like(sums, size * (size + 1) / 2))
        assert torch.equal(root, torch.ones_like(root))
        rows = joined.view(size, -1)
        assert torch.equal(rows, torch.arange(1.0, size + 1).to(rows)[:, None].expand_as(rows))
        assert torch.equal(own, torch.full_like(own, size * (seat.rank + 1)))
