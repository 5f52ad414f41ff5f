"""What the ranks of other strategies hold alike is compared, too: copies of nodes, DiLoCo's outer
model, and the models of ranks that train as one worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hsgd import Comm, HsgdError
from hsgd.optim import DiLoCo, ElasticAveraging, Gossip, NodeSharedOptimizer, share_parameters
from hsgd.optim.triggers.communication_triggers import FixedPeriod
from pretended_nodes import meet
from ranks import Ranks, Seat

__all__: list[str] = []

MOST_RANKS = 4
PROMISED = 520
FAULT_AT = 5


class Net(nn.Module):
    """With a frozen layer, one that is never used, sparse gradients, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6, sparse=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.norm(self.frozen(self.embedding(words))))
        return found


def node_shared(net: Net, sgd: Any, comm: Comm, **options: Any) -> Any:
    shared = share_parameters(net, comm)
    names = {parameter: name for name, parameter in net.named_parameters()}
    return NodeSharedOptimizer(sgd, shared, sparse_as_dense=True, names=names)


def diloco(net: Net, sgd: Any, comm: Comm, **options: Any) -> Any:
    return DiLoCo(sgd, net, comm, **{"sync_every": 2, "group": None, **options})


def hybrid(net: Net, sgd: Any, comm: Comm, **options: Any) -> Any:
    return ElasticAveraging(sgd, net, comm, "hybrid", group_size=2, **options)


def gossip(net: Net, sgd: Any, comm: Comm, **options: Any) -> Any:
    return Gossip(sgd, net, comm, hierarchical=True, **options)


def flip_bit(net: Net, optimizer: Any) -> None:
    net.out.weight.detach().view(torch.int32)[1, 2] ^= 1


def update_locally(net: Net, optimizer: Any) -> None:
    net.out.bias.detach().add_(1e-3)


def load_checkpoint(net: Net, optimizer: Any) -> None:
    for parameter in net.parameters():
        parameter.detach().add_(1)


def thaw(net: Net, optimizer: Any) -> None:
    net.frozen.weight.detach().mul_(1.5)


def change_rate(net: Net, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.02


def flip_outer_bit(net: Net, optimizer: Any) -> None:
    optimizer._fragments[-1].outer_weights.view(torch.int32)[3] ^= 1 << 30


def change_momentum(net: Net, optimizer: Any) -> None:
    optimizer._fragments[-1].velocity[0] += 1


def change_outer_rate(net: Net, optimizer: Any) -> None:
    optimizer.outer.lr = 0.5


@dataclass(frozen=True)
class Case:
    make: Callable[..., Any]
    nodes: list[int]
    fault: Callable[[Net, Any], None]
    line: str
    """Of the error, on the ranks `told`, which says that `differ` do."""
    differ: tuple[int, ...]
    told: tuple[int, ...]
    options: dict[str, Any]


def case(
    make: Callable[..., Any],
    nodes: list[int],
    fault: Callable[[Net, Any], None],
    line: str,
    differ: tuple[int, ...] = (),
    told: tuple[int, ...] = (),
    **options: Any,
) -> Case:
    everybody = tuple(range(len(nodes)))
    return Case(make, nodes, fault, line, differ or everybody[-1:], told or everybody, options)


UNEVEN = [0, 0, 1]
APART = [0, 1, 2]
PAIRS = [0, 0, 1, 1]
OUTER = "values of the outer model's parameter \""
MOMENTUM = 'values of the outer momentum of parameter "'
CASES = {
    "nodes, bit": case(node_shared, UNEVEN, flip_bit, "values of out.weight"),
    "nodes, local update": case(node_shared, APART, update_locally, "values of out.bias"),
    "nodes, checkpoint": case(node_shared, UNEVEN, load_checkpoint, "values of embedding.weight"),
    "nodes, two of a node": case(node_shared, PAIRS, flip_bit, "values of out.weight", (2, 3)),
    "nodes, frozen": case(node_shared, UNEVEN, thaw, "values of frozen.weight"),
    "nodes, options": case(node_shared, UNEVEN, change_rate, "lr of group 0 is 0.02 on rank 2"),
    "a node, options": case(node_shared, [0, 0], change_rate, "lr of group 0 is 0.02 on rank 1"),
    "outer model": case(diloco, APART, flip_outer_bit, OUTER),
    "outer momentum": case(diloco, APART, change_momentum, MOMENTUM),
    "outer rate": case(diloco, [0, 0, 0], change_outer_rate, OUTER),
    "outer model, late": case(diloco, APART, flip_outer_bit, OUTER, delay=1, fragments=2),
    "outer model, groups": case(
        diloco, PAIRS, change_momentum, MOMENTUM, (2,), (0, 2), group="node"
    ),
    "worker of DiLoCo": case(
        *(diloco, PAIRS, flip_bit, 'values of parameter "out.weight"', (3,), (2, 3)),
        group="node",
        sync_every=PROMISED + FAULT_AT,  # which ends the difference
    ),
    "worker of EASGD": case(
        hybrid, [0, 0, 0, 0], flip_bit, 'values of parameter "out.weight"', (3,), (2, 3)
    ),
    "group of Gossip": case(
        *(gossip, PAIRS, flip_bit, 'values of parameter "out.weight"', (3,), (2, 3)),
        max_interval=10 * PROMISED,
        trigger=FixedPeriod(5 * PROMISED),  # an average would end the difference
    ),
}


def found(seat: Seat, folder: str, name: str, wanted: str, faulty: bool) -> tuple[Any, ...]:
    case = CASES[name]
    torch.set_num_threads(1)
    os.environ["HSGD_CHECK_REPLICAS"] = wanted
    torch.manual_seed(7)
    net = Net()
    if case.make is not node_shared:  # that alone takes sparse gradients, and makes them dense
        net.embedding.sparse = False
    given = [p for p in net.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(given, lr=0.01, momentum=0.9)
    comm = meet(seat, folder, case.nodes)
    try:
        optimizer = case.make(net, sgd, comm, **case.options)
        for step in range(FAULT_AT + PROMISED if faulty else 12):
            differs = seat.rank in case.differ[:1] or case.make is diloco
            if faulty and step == FAULT_AT and seat.rank == case.differ[-1]:
                case.fault(net, optimizer)
            if case.make is diloco and "group" not in case.options:
                net.frozen.bias.data.add_(0.01 * seat.rank)  # as a teacher that follows its worker
            optimizer.zero_grad()
            torch.manual_seed(100 * step + seat.rank * differs)
            net(torch.randint(9, (8,))).square().mean().backward()
            try:
                optimizer.step()
            except HsgdError as error:
                return step, type(error).__name__, getattr(error, "ranks", ()), str(error)
        return -1, "", (), ""
    finally:
        del os.environ["HSGD_CHECK_REPLICAS"]
        comm.abort() if faulty else comm.close()


@pytest.mark.parametrize("wanted", ["share", "1"])
@pytest.mark.parametrize("name", CASES)
def test_what_should_be_alike_and_is_not_is_named(
    ranks: Ranks, tmp_path: Path, name: str, wanted: str
) -> None:
    case = CASES[name]
    answers = ranks.run(found, str(tmp_path), name, wanted, True, on=range(len(case.nodes)))
    told = [answers[rank] for rank in case.told]
    assert len(set(told)) == 1, answers
    step, kind, differ, line = told[0]
    assert kind == "ReplicasDiffer" and differ == case.differ and "\n" not in line, line
    assert case.line in line and line.startswith("replica guard, step "), line
    in_each_step = case.make is not diloco or "sync_every" in case.options
    late = PROMISED if in_each_step and wanted == "share" else 3  # else in each exchange
    assert FAULT_AT <= step < FAULT_AT + late
    if case.make not in (hybrid, gossip):  # whose workers need nobody
        others = [answer for rank, answer in enumerate(answers) if rank not in case.told]
        assert all(kind for _, kind, _, _ in others), "a rank went on alone"


@pytest.mark.parametrize("name", CASES)
def test_what_is_alike_is_left_alone(ranks: Ranks, tmp_path: Path, name: str) -> None:
    size = len(CASES[name].nodes)
    answers = ranks.run(found, str(tmp_path), name, "1", False, on=range(size))
    assert answers == [(-1, "", (), "")] * size
