"""Ranks that give an optimizer other options, or another model, are told so before anything is
exchanged: all of them, in one line that names the option, two ranks and both values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hsgd import Comm
from hsgd.optim import FixedPeriod, Nesterov, NoLoCo, Topology
from outcomes import told_by
from ranks import Ranks, Seat, meeting_point
from strategies import STRATEGIES

__all__: list[str] = []

SIZE = 3
PATH = [[1], [0, 2], [1]]  # graphs of three ranks
RING = [[1, 2], [0, 2], [0, 1]]

# Of each strategy what the last rank gives, and the others, where that is not the default.
OPTIONS: dict[str, list[tuple[str, Any, Any]]] = {
    "diloco": [
        ("sync_every", 3, 2),
        ("outer", Nesterov(lr=0.5), Nesterov(lr=0.7)),
        ("fragments", 2, 1),
        ("delay", 1, 0),
        ("alpha", 0.5, 0.0),
        ("eager", True, False),
        ("compression", "bfloat16", None),
        ("group", "node", None),
    ],
    "gossip": [
        ("topology", "ring", "random"),
        ("topology", PATH, RING),
        ("topology", Topology("random", SIZE, 1), Topology("random", SIZE, 2)),
        ("max_interval", 7, None),
        ("global_average_every", 5, 1),
        ("momentum", "reset", "keep"),
        ("compression", "float16", None),
        ("hierarchical", True, False),
        ("outer", "noloco", None),
        ("network", "auto", "sockets"),
        ("seed", 1, 0),
    ],
    "noloco": [
        ("outer", NoLoCo(lr=0.5), "noloco"),
        ("trigger", FixedPeriod(3), FixedPeriod(2)),
        ("seed", 1, 0),
    ],
    "elastic": [
        ("mode", "hybrid", "async"),
        ("moving_rate", 0.1, None),
        ("update_interval", 2, 1),
        ("order", "easgd", "shmcaffe"),
        ("stop_rule", "mean", "master"),
        ("compression", "bfloat16", None),
        ("pull_rate", 0.5, None),
        ("max_steps", 9, None),
        ("network", "auto", "sockets"),
    ],
    "elastic in groups": [("group_size", 1, 3)],
    "tree": [
        ("arity", 2, None),
        ("roots", "shared", "first"),
        ("network", "sockets", "auto"),
        ("part_bytes", 4096, None),
    ],
    "node_shared": [("sparse_as_dense", True, False)],
}
ROWS = [(name, *row) for name, rows in OPTIONS.items() for row in rows]

# What a rank cannot give, and a word of the line.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "diloco": ({"delay": 7}, "delay is 7"),
    "gossip": ({"max_interval": 0}, "max_interval is 0"),
    "noloco": ({"topology": "ring"}, "outer needs topology"),
    "elastic": ({"stop_rule": "never"}, "stop_rule is 'never'"),
    "elastic in groups": ({"order": "sgd"}, "order is 'sgd'"),
    "tree": ({"arity": 0}, "arity is 0"),
}


def model_of(*, wide: int = 3, frozen: bool = False, more: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, wide)]
    model = nn.Sequential(*layers, *([nn.Linear(wide, 2)] if more else []))
    model[0].requires_grad_(not frozen)
    return model


def start(comm: Comm, name: str, model: nn.Module, **options: Any) -> Any:
    kind = options.pop("kind", torch.optim.SGD)
    optimizer = kind(model.parameters(), lr=options.pop("lr", 0.1))
    return STRATEGIES[name](model, optimizer, comm, **options)


def end_well(comm: Comm, name: str) -> None:
    """The ranks can make one afterwards, and train."""
    groups = {"group_size": SIZE} if name == "elastic in groups" else {}
    model = model_of()
    optimizer = start(comm, name, model, **groups)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    comm.barrier()
    if hasattr(optimizer, "close"):
        optimizer.close()


def differ(seat: Seat, path: str, name: str, option: str, odd: Any, usual: Any) -> Any:
    torch.set_num_threads(1)
    comm = seat.comm(path, SIZE)
    value = odd if comm.rank == SIZE - 1 else usual
    told = told_by(lambda: start(comm, name, model_of(), **{option: value}))
    end_well(comm, name)
    return told


@pytest.mark.parametrize(("name", "option", "odd", "usual"), ROWS)
def test_options_that_differ_are_named_on_all_ranks(
    pools: Callable[[int], Ranks], name: str, option: str, odd: Any, usual: Any
) -> None:
    for kind, line in pools(SIZE).run(differ, meeting_point(), name, option, odd, usual):
        assert kind == "SignatureMismatch" and "\n" not in line
        assert f": {option} is " in line and f"on rank {SIZE - 1}, " in line
        assert line.endswith("on rank 0; give the same on every rank")
        if isinstance(odd, str | int | float) and option != "outer":
            assert f"{option} is {odd} on rank" in line and f", {usual} on rank 0" in line


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "wider": ({"wide": 7}, "float32 of shape (7, 5)"),
    "frozen": ({"frozen": True}, ", frozen on rank 2"),
    "of more layers": ({"more": True}, "float32 of shape (2, 3) on rank 2, absent"),
}


def differ_in_model(seat: Seat, path: str, name: str, which: str) -> Any:
    comm = seat.comm(path, SIZE)
    odd = MODELS[which][0] if comm.rank == SIZE - 1 else {}
    groups = {"group_size": SIZE} if name == "elastic in groups" else {}
    told = told_by(lambda: start(comm, name, model_of(**odd), **groups))
    end_well(comm, name)
    return told


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_models_that_differ_are_told_on_all_ranks(
    pools: Callable[[int], Ranks], name: str, which: str
) -> None:
    for kind, line in pools(SIZE).run(differ_in_model, meeting_point(), name, which):
        assert kind == "SignatureMismatch" and "\n" not in line
        assert MODELS[which][1] in line and "on rank 0; give the same on every rank" in line


def refuse(seat: Seat, path: str, name: str) -> Any:
    comm = seat.comm(path, SIZE)
    groups = {"group_size": SIZE} if name == "elastic in groups" else {}
    odd = REFUSED[name][0] if comm.rank == 1 else {}
    told = told_by(lambda: start(comm, name, model_of(), **{**groups, **odd}))
    end_well(comm, name)
    return told


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_all_ranks_hear_of(pools: Callable[[int], Ranks], name: str) -> None:
    told = pools(SIZE).run(refuse, meeting_point(), name)
    assert told[1][0] == "ValueError" and REFUSED[name][1] in told[1][1]
    for kind, line in (told[0], told[2]):
        assert kind == "HsgdError" and "rank 1 refused its arguments: " in line
        assert REFUSED[name][1] in line


def differ_in_groups(seat: Seat, path: str) -> Any:
    comm = seat.comm(path, SIZE)
    kind = torch.optim.Adam if comm.rank == 1 else torch.optim.SGD
    return [
        told_by(lambda: start(comm, "node_shared", model_of(), lr=0.1 + (comm.rank == 1))),
        told_by(lambda: start(comm, "node_shared", model_of(), kind=kind)),
    ]


def test_groups_of_node_shared_that_differ_are_told_on_all_ranks(
    pools: Callable[[int], Ranks],
) -> None:
    for told in pools(SIZE).run(differ_in_groups, meeting_point()):
        assert [kind for kind, _ in told] == ["SignatureMismatch"] * 2
        assert "lr of group 0 is 1.1 on rank 1, 0.1 on rank 0" in told[0][1]
        assert "optimizer is Adam on rank 1, SGD on rank 0" in told[1][1]
