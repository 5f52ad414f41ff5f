"""What ranks do with hsgd.torch on tensors of a device; run by the tests of this folder.

Each is a function of a Seat, a path that is new to the ranks, their number and the kind of a Place.
Owns nothing: parameters are compared with those of one rank on the CPU.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from cuda_training import Optimizers, batch, difference, new_model, sgd, train, trained_alone
from hsgd.optim import LAMB, LARS
from places import Place
from ranks import Seat
from torch_job import job

__all__ = [
    "OPTIMIZERS",
    "batch_norm",
    "mismatch",
    "no_waits_of_a_step",
    "operations",
    "other_order",
    "train_optimizer",
]

OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": sgd,
    "lars": lambda parameters: LARS(parameters, lr=0.1, momentum=0.9),
    "lamb": lambda parameters: LAMB(parameters, lr=0.01),
}


def operations(seat: Seat, path: str, size: int, kind: str) -> None:
    """Each one, of several dtypes, in place and not."""
    device, rank = Place(kind, seat.rank).device, seat.rank
    everybody = sum(range(size))
    with job(seat, path, size) as hvd:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
            base = torch.arange(1000, device=device) % 5
            total = (base * size + everybody).to(dtype)
            mine = (base + rank).to(dtype)
            assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), total)
            hvd.allreduce_(mine, op=hvd.Sum)
            assert torch.equal(mine, total)
            rows = hvd.allgather(torch.full((rank + 1, 2), rank, device=device).to(dtype))
            assert rows.tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]
            root = hvd.broadcast(torch.full((4,), rank, device=device).to(dtype), size - 1)
            assert root.tolist() == [size - 1] * 4
            sent = torch.full((size * (size + 1) // 2,), rank, device=device).to(dtype)
            got, received = hvd.alltoall(sent, torch.arange(1, size + 1, dtype=torch.int32))
            assert got.tolist() == [r for r in range(size) for _ in range(rank + 1)]
            assert received.tolist() == [rank + 1] * size
            own = hvd.reducescatter(torch.ones(3 * size, 2, device=device).to(dtype), op=hvd.Sum)
            assert own.tolist() == [[size] * 2] * 3
        several = [torch.full((k,), rank + 1.0, device=device) for k in (1, 5, 70_000)]
        for mean in hvd.grouped_allreduce(several):
            assert mean.device == device
            assert torch.equal(mean, torch.full_like(mean, (size + 1) / 2))
        parts = [torch.randn(50, generator=torch.Generator().manual_seed(r)) for r in range(size)]
        found = hvd.allreduce(parts[rank].to(device), op=hvd.Adasum)
        assert torch.allclose(found.cpu(), hvd.allreduce(parts[rank], op=hvd.Adasum), atol=1e-5)


def other_order(seat: Seat, path: str, size: int, kind: str) -> None:
    """The last rank calls in reverse, and whoever computes before and after is not waited for."""
    place = Place(kind, seat.rank)
    with job(seat, path, size) as hvd:
        names = list(range(20))
        handles = {}
        for name in names[::-1] if seat.rank == size - 1 else names:
            place.sleep(0.5)
            mine = torch.full((50_000,), float(name + seat.rank), device=place.device)
            handles[name] = hvd.allreduce_async(mine, op=hvd.Sum, name=f"x{name}")
        for name in names:
            total = hvd.synchronize(handles[name])
            copy = total.clone()
            total.fill_(-1)
            assert torch.equal(copy, torch.full_like(copy, size * name + sum(range(size))))


def mismatch(seat: Seat, path: str, size: int, kind: str) -> list[str]:
    """What is raised for shapes that differ, and then for dtypes; the job goes on."""
    device = Place(kind, seat.rank).device
    told = []
    with job(seat, path, size) as hvd:
        odd = int(seat.rank == size - 1)
        shapes = torch.ones(3 + odd, device=device)
        dtypes = torch.ones(3, device=device, dtype=(torch.float32, torch.float64)[odd])
        for number, bad in enumerate((shapes, dtypes)):
            try:
                hvd.allreduce(bad, name=f"bad{number}")
            except Exception as error:
                told.append(type(error).__name__)
            total = hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum, name=f"good{number}")
            assert total.tolist() == [size] * 3
    return told


def train_optimizer(
    seat: Seat, path: str, size: int, kind: str, optimizer: str, compression: str
) -> float:
    """How far the parameters of a DistributedOptimizer are from those of one rank on the CPU."""
    place, make = Place(kind, seat.rank), OPTIMIZERS[optimizer]
    with job(seat, path, size) as hvd:
        model = new_model().to(place.device)
        if seat.rank:
            for parameter in model.parameters():
                parameter.data.zero_()
        hvd.broadcast_parameters(model.state_dict(), 0)
        distributed = hvd.DistributedOptimizer(
            make(model.parameters()),
            model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            bucket_cap_mb=0.1,
        )
        hvd.broadcast_optimizer_state(distributed, 0)
        train(model, distributed, seat.rank)
        return difference(model.parameters(), trained_alone(size, make))


def no_waits_of_a_step(seat: Seat, path: str, size: int, kind: str) -> None:
    """A step of a DistributedOptimizer returns before the device has begun it."""
    place = Place(kind, seat.rank)
    with job(seat, path, size) as hvd:
        model = new_model().to(place.device)
        hvd.broadcast_parameters(model.state_dict(), 0)
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named, bucket_cap_mb=0.1)
        rows, labels = (each.to(place.device) for each in batch(seat.rank, 0))

        def step() -> None:
            optimizer.zero_grad()
            functional.cross_entropy(model(rows), labels).backward()
            optimizer.step()

        for _ in range(3):
            step()
        with place.no_waits():
            place.sleep(1000)
            slept = place.mark()
            step()
            assert slept is None or not slept.query(), "a step waited for the device"
        assert all(bool(each.isfinite().all()) for each in model.parameters())


def batch_norm(seat: Seat, path: str, size: int, kind: str) -> None:
    """SyncBatchNorm is batch normalization of the whole batch, on the CPU."""
    device = Place(kind, seat.rank).device
    with job(seat, path, size) as hvd:
        draw = torch.Generator().manual_seed(7)
        whole = torch.randn(2 * size, 3, 4, generator=draw, dtype=torch.float64)
        factors = torch.randn(2 * size, 3, 4, generator=draw, dtype=torch.float64)
        part = slice(2 * seat.rank, 2 * seat.rank + 2)
        ours = hvd.SyncBatchNorm(3).double().to(device)
        plain = nn.BatchNorm1d(3).double()
        mine, everything = whole[part].to(device).requires_grad_(), whole.clone().requires_grad_()
        output, expected = ours(mine), plain(everything)
        (output * factors[part].to(device)).sum().backward()
        (expected * factors).sum().backward()
        assert mine.grad is not None and everything.grad is not None
        assert torch.allclose(output.cpu(), expected[part])
        assert torch.allclose(mine.grad.cpu(), everything.grad[part])
        for one, other in zip(ours.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(one.cpu(), other)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert other.grad is not None
            assert torch.allclose(hvd.allreduce(one.grad, op=hvd.Sum).cpu(), other.grad)
