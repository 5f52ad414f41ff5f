"""What is exchanged is fixed when an optimizer is made: who trains more later is told, and does not
train ranks apart in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outcomes import told_by
from ranks import Ranks, Seat, meeting_point
from strategies import STRATEGIES

__all__: list[str] = []

SIZE = 2


def frozen_first() -> nn.Sequential:
    """A model whose first layer does not train."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model


def unfreeze(model: nn.Sequential, _: Any) -> None:
    model[0].weight.requires_grad_()


def replace_bias_by_trained(model: nn.Sequential, _: Any) -> None:
    model[0].bias.requires_grad_()


def add_group(_: nn.Sequential, sgd: Any) -> None:
    sgd.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def lengthen_group(_: nn.Sequential, sgd: Any) -> None:
    sgd.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))


def move(model: nn.Sequential, _: Any) -> None:
    model[1].weight.data = model[1].weight.data.clone()


# What a script does after the first steps, and what it is told.
CHANGES: dict[str, tuple[Callable[[nn.Sequential, Any], None], str]] = {
    "unfrozen": (unfreeze, 'parameter "0.weight", shape (5, 4), was frozen'),
    "unfrozen, another": (replace_bias_by_trained, 'parameter "0.bias", shape (5,), was frozen'),
    "added": (add_group, "has 5 parameters now, 4 when"),
    "added to a group": (lengthen_group, "has 5 parameters now, 4 when"),
    "moved": (move, 'parameter "1.weight", shape (3, 5), no longer lies'),
}
NUMBERED = {"node_shared": ('"1.weight"', "2")}  # it knows no names
# What is served: all weights are found anew in each step, or all are shared from the beginning.
SERVED = {
    *(("diloco", "moved"), ("elastic", "moved"), ("elastic in groups", "moved")),
    *(("node_shared", "unfrozen"), ("node_shared", "unfrozen, another")),
}


def train(model: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
        optimizer.step()


def change(seat: Seat, path: str, name: str, changes: str) -> Any:
    """What step() says after it."""
    torch.set_num_threads(1)
    comm, model = seat.comm(path, SIZE), frozen_first()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = STRATEGIES[name](model, sgd, comm)
    train(model, optimizer, comm.rank, 2)
    comm.barrier()
    before = [p.detach().clone() for p in model.parameters()]
    CHANGES[changes][0](model, sgd)
    said = None
    if (name, changes) in SERVED:
        train(model, optimizer, comm.rank, 2)
        if not name.startswith("elastic"):  # whose workers stay apart
            weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
            every = comm.allgather(weights.view(1, -1))
            assert torch.equal(every[0], every[1]), "ranks train apart"
    else:
        said = told_by(lambda: train(model, optimizer, comm.rank, 1))
        same = zip(before, model.parameters(), strict=True)
        if name != "tree":  # whose layers are updated before step()
            assert all(torch.equal(a, b) for a, b in same), "it stepped before it refused"
    comm.barrier()
    if hasattr(optimizer, "close"):
        optimizer.close()
    return said


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_would_never_be_exchanged_is_refused_by_name(
    pools: Callable[[int], Ranks], name: str, changes: str
) -> None:
    for said in pools(SIZE).run(change, meeting_point(), name, changes):
        if (name, changes) in SERVED:
            assert said is None
            continue
        kind, line = said
        words = CHANGES[changes][1].replace(*NUMBERED.get(name, ("", "")))
        assert kind == "RuntimeError" and words in line
        assert "make a new one" in line or "copy_()" in line
        assert "\n" not in line


def freeze_for_a_while(seat: Seat, path: str, name: str) -> None:
    comm, model = seat.comm(path, SIZE), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = STRATEGIES[name](model, torch.optim.SGD(model.parameters(), lr=0.01), comm)
    for trains in (True, False, True):
        model[0].weight.requires_grad_(trains)
        train(model, optimizer, comm.rank, 2)
    comm.barrier()
    if hasattr(optimizer, "close"):
        optimizer.close()


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_exchanged_may_be_frozen_for_a_while(
    pools: Callable[[int], Ranks], name: str
) -> None:
    pools(SIZE).run(freeze_for_a_while, meeting_point(), name)
