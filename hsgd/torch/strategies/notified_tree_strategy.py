"""strategy="notified_tree": from the job's ranks to hsgd.optim.NotifiedTree.

Owns the choice of the communicator, and what of Horovod's arguments has a meaning here. Never moves
data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.optimizer import Optimizer

import torch
from hsgd.comm.communicator import Comm
from hsgd.onesided.networks import Network
from hsgd.optim.notified_tree.notified_tree_optimizer import NotifiedTree
from hsgd.optim.notified_tree.tree_checks import Roots
from hsgd.torch.job import runtime
from hsgd.torch.strategies.arguments import refuse_options, refuse_others, translated
from torch import Tensor, nn

__all__ = ["notified_tree", "plant_tree"]


def plant_tree(
    optimizer: torch.optim.Optimizer,
    strategy: str,
    *,
    op: int,
    model: torch.nn.Module | None,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    options: Mapping[str, Any] | None,
    **others: Any,
) -> NotifiedTree:
    """The optimizer of DistributedOptimizer(strategy="notified_tree"); collective, blocking.

    Raises ValueError naming arguments that have no meaning with this strategy.
    """
    refuse_options(strategy, options)
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


def notified_tree(
    optimizer: Optimizer,
    comm: Comm,
    *,
    model: nn.Module | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    op: str = "mean",
    arity: int | None = None,
    overlap_forward: bool = True,
    roots: Roots = "first",
    network: Network = "auto",
    part_bytes: int | None = None,
    **others: Any,
) -> NotifiedTree:
    """A NotifiedTree for callers with DistributedOptimizer's arguments; collective.

    model: needed, because modules wait for their weights; `named_parameters` alone do not tell
    which modules they belong to, and are only compared with it.
    op: "mean", which is all there is. `others`: accepted with values that change nothing.
    Raises ValueError naming what cannot be had with this strategy.
    """
    if model is None:
        raise ValueError(
            'strategy="notified_tree" needs model=: modules wait for their weights, and named '
            "parameters do not tell which modules they belong to"
        )
    if op != "mean":
        raise ValueError(f'strategy="notified_tree" averages; op is {op!r}, give "mean"')
    own = set(model.parameters())
    for name, parameter in named_parameters or ():
        if parameter not in own:
            raise ValueError(
                f'strategy="notified_tree": the named parameter "{name}" is not one of model\'s'
            )
    refuse_others("notified_tree", others)
    return NotifiedTree(
        optimizer,
        model,
        comm,
        arity,
        overlap_forward,
        roots=roots,
        network=network,
        part_bytes=part_bytes,
    )
