"""Programs of ranks that train a small model with hsgd.optim.

The models are linear, so that what ranks must agree about can be told.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from campaigns.chaos.fault_seat import FaultSeat
from campaigns.seat import WrongResult
from hsgd.optim import DiLoCo, ElasticAveraging, Gossip, Nesterov, NotifiedTree

__all__ = ["diloco", "elastic", "gossip", "tree"]

_RATE = 0.125


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, inputs: Tensor) -> Any:
        return self.last(self.first(inputs))


def _backward(model: nn.Module, scale: float) -> None:
    """The gradient of a bias of the last layer is `scale`, whatever the weights are."""
    model(torch.ones(1, 64)).sum().mul(scale).backward()


def _finite(tensor: Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise WrongResult(f"{what}: {tensor.flatten()[:4].tolist()}")


def _train(seat: FaultSeat, model: _Model, optimizer: Gossip | ElasticAveraging) -> None:
    for _ in seat.loop():
        optimizer.zero_grad()
        _backward(model, 1.0)
        optimizer.step()
        _finite(model.last.weight, type(optimizer).__name__)
    optimizer.close()


def tree(seat: FaultSeat) -> None:
    """Synchronous SGD: the last bias goes down by the mean of all ranks' scales."""
    with seat.communicator() as comm:
        model = _Model()
        inner = torch.optim.SGD(model.parameters(), lr=_RATE * 2**-10)
        optimizer = NotifiedTree(inner, model, comm, network=seat.network)
        bias = model.last.bias
        for step in seat.loop():
            before = bias.detach().clone()
            optimizer.zero_grad()
            _backward(model, float(comm.rank + step % 3))
            optimizer.step()
            optimizer.wait()
            mean = (comm.size - 1) / 2 + step % 3
            moved = (before - bias.detach()) / (_RATE * 2**-10)
            if not torch.allclose(moved, torch.full_like(moved, mean), atol=0.02):
                raise WrongResult(f"NotifiedTree: moved by {moved[:3].tolist()}, not {mean}")
        optimizer.close()


def gossip(seat: FaultSeat) -> None:
    """Averages in pairs in every step, or NoLoCo's outer steps in pairs."""
    from hsgd.optim import FixedPeriod

    outer: Literal["noloco"] | None = "noloco" if seat.luck.random() < 0.5 else None
    with seat.communicator() as comm:
        model = _Model()
        inner = torch.optim.SGD(model.parameters(), lr=1e-4)
        optimizer = Gossip(inner, model, comm, FixedPeriod(1), outer=outer, network=seat.network)
        _train(seat, model, optimizer)


_PERIOD = 3
_DILOCO: tuple[dict[str, Any], ...] = (
    {},
    {"fragments": 2, "delay": 1, "alpha": 0.5},
    {"eager": True},
    {"compression": "int8"},
    {"compression": "topk", "delay": 2},
    {"group": "node"},
)


def diloco(seat: FaultSeat) -> None:
    """Each rank a worker, or each node: with the mean as outer step, and nothing else, the last
    bias goes down in a period by what the workers' scales are on average.
    """
    options = {"group": None, **seat.luck.choice(_DILOCO)}
    is_exact = options == {"group": None}
    with seat.communicator() as comm:
        model = _Model()
        inner = torch.optim.SGD(model.parameters(), lr=_RATE * 2**-10)
        mean_step = Nesterov(lr=1.0, momentum=0.0)
        optimizer = DiLoCo(inner, model, comm, outer=mean_step, sync_every=_PERIOD, **options)
        bias = model.last.bias
        before, scales = bias.detach().clone(), 0.0
        for step in seat.loop():
            optimizer.zero_grad()
            _backward(model, float(comm.rank + step % 3))
            optimizer.step()
            _finite(model.last.weight, "DiLoCo")
            scales += (comm.size - 1) / 2 + step % 3
            if is_exact and step % _PERIOD == _PERIOD - 1:
                moved = (before - bias.detach()) / (_RATE * 2**-10)
                if not torch.allclose(moved, torch.full_like(moved, scales), atol=0.05):
                    raise WrongResult(f"DiLoCo: moved by {moved[:3].tolist()}, not {scales}")
                before, scales = bias.detach().clone(), 0.0
        optimizer.close()


def elastic(seat: FaultSeat) -> None:
    """Asynchronous elastic averaging over a parameter box."""
    with seat.communicator() as comm:
        model = _Model()
        inner = torch.optim.SGD(model.parameters(), lr=1e-4)
        optimizer = ElasticAveraging(inner, model, comm, update_interval=2)
        _train(seat, model, optimizer)
