"""A training loop: batches of PartitionedLoader, whose slabs are kept in the memory of the node,
gradients averaged by Comm, epoch after epoch.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from hsgd.io import CacheOptions, PartitionedLoader
from torch import nn

from campaigns.soak.sampled_seat import SampledSeat
from hsgd import Comm

__all__ = ["training"]

_SAMPLES, _WIDTH, _BATCH = 4000, 64, 16


def _write(path: str) -> None:
    import h5py

    luck = np.random.default_rng(1)
    given = luck.standard_normal((_SAMPLES, _WIDTH), np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=given, chunks=(32, _WIDTH))
        file.create_dataset("y", data=given.sum(1, keepdims=True), chunks=(32, 1))


def _batches(loader: PartitionedLoader) -> Generator[Any, None, None]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def training(seat: SampledSeat) -> None:
    """Until the time is up; all ranks must have the same weights then."""
    path = str(seat.folder / "data.h5")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(_WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with seat.communicator() as comm:
        if comm.rank == 0:
            _write(path)
        comm.barrier()
        cache = CacheOptions(1 << 20, "comm" if seat.node_count > 1 else "files")
        loader = PartitionedLoader(path, _BATCH, comm.rank, comm.size, comm=comm, cache=cache)
        batches = _batches(loader)
        for _ in seat.steps_in_time(comm):
            batch = next(batches)
            optimizer.zero_grad()
            loss: Any = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            loss.backward()
            _average(model, comm)
            optimizer.step()
        seat.notes["steps per second"] = seat.done / seat.report()["seconds"]
        batches.close()
        loader.close()
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        if not torch.equal(comm.broadcast(weights.clone()), weights):
            raise AssertionError("ranks have different weights")


def _average(model: nn.Module, comm: Comm) -> None:
    handles = []
    for number, each in enumerate(model.parameters()):
        assert each.grad is not None
        if number % 2:
            handles.append(comm.allreduce_async(each.grad, "mean", out=each.grad))
        else:
            comm.allreduce(each.grad, "mean", out=each.grad)
    for handle in handles:
        handle.wait()
