"""The optimizers of hsgd.optim that train over several ranks, each made in one way: for tests that
hold for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hsgd import Comm
from hsgd.optim import (
    DiLoCo,
    ElasticAveraging,
    Gossip,
    NodeSharedOptimizer,
    NotifiedTree,
    share_parameters,
)

__all__ = ["STRATEGIES", "Maker"]

Maker = Callable[..., Any]
"""Called with the model, the wrapped optimizer and the communicator, and options by keyword."""


def _diloco(model: nn.Module, sgd: Any, comm: Comm, **options: Any) -> Any:
    return DiLoCo(sgd, model, comm, **{"sync_every": 2, "group": None, **options})


def _gossip(model: nn.Module, sgd: Any, comm: Comm, **options: Any) -> Any:
    return Gossip(sgd, model, comm, **{"global_average_every": 1, **options})


def _elastic(model: nn.Module, sgd: Any, comm: Comm, **options: Any) -> Any:
    return ElasticAveraging(sgd, model, comm, **options)


def _tree(model: nn.Module, sgd: Any, comm: Comm, **options: Any) -> Any:
    return NotifiedTree(sgd, model, comm, **options)


def _shared(model: nn.Module, sgd: Any, comm: Comm, **options: Any) -> Any:
    return NodeSharedOptimizer(sgd, share_parameters(model, comm), **options)


STRATEGIES: dict[str, Maker] = {
    "diloco": _diloco,
    "gossip": _gossip,
    "noloco": lambda *given, **options: _gossip(
        *given, **{"outer": "noloco", "global_average_every": None, **options}
    ),
    "elastic": _elastic,
    "elastic in groups": lambda *given, **options: _elastic(
        *given, **{"mode": "hybrid", "group_size": 2, **options}
    ),
    "tree": _tree,
    "node_shared": _shared,
}
