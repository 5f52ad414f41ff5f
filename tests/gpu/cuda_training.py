"""A small network, what ranks train it on, and what one rank with all of it comes to, on the CPU.

Owns the data. Never communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Optimizers", "batch", "difference", "new_model", "sgd", "train", "trained_alone"]

ROWS, STEPS = 16, 6
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def new_model() -> nn.Sequential:
    """Alike wherever it is made."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 50), nn.Linear(50, 10))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """What a rank has in one step."""
    draw = torch.Generator().manual_seed(step * 100 + rank)
    rows = torch.randn(ROWS, 200, generator=draw)
    return rows, torch.randint(10, (ROWS,), generator=draw)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual optimizer."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int = STEPS,
) -> None:
    """Steps of one rank, where the model is."""
    device = next(model.parameters()).device
    for step in range(steps):
        rows, labels = (each.to(device) for each in batch(rank, step))
        optimizer.zero_grad()
        functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()


def trained_alone(size: int, optimizers: Optimizers = sgd) -> list[Tensor]:
    """The parameters after steps with the batches of all ranks."""
    model = new_model()
    optimizer = optimizers(model.parameters())
    for step in range(STEPS):
        parts = [batch(rank, step) for rank in range(size)]
        rows, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        optimizer.zero_grad()
        functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest one between tensors of any device."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.detach().cpu() - other.cpu()).abs().max()) for one, other in pairs)
