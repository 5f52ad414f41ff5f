"""strategy="notified_tree": from the job's ranks to hsgd.optim.NotifiedTree.

Owns the choice of the communicator. Never moves data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hsgd.optim.tree import NotifiedTree
from hsgd.optim.tree_strategy import notified_tree
from hsgd.torch import runtime
from hsgd.torch.arguments import translated

__all__ = ["plant_tree"]


def plant_tree(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    op: int,
    **others: Any,
) -> NotifiedTree:
    """The optimizer of DistributedOptimizer(strategy="notified_tree"); collective, blocking.

    Raises ValueError naming arguments that have no meaning with this strategy.
    """
    job = runtime.current()
    if model is None:  # before a communicator is made
        return notified_tree(optimizer, job.comm, model=None)
    return notified_tree(
        optimizer,
        job.private_comm(0, "tree"),
        model=model,
        named_parameters=named_parameters,
        **translated(op, **others),
    )
