"""strategy="notified_tree" of a Horovod-like DistributedOptimizer: its arguments as NotifiedTree's.

Owns what of Horovod's arguments has a meaning here, and the words for what has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.comm import Comm
from hsgd.optim.tree import NotifiedTree

__all__ = ["notified_tree", "refuse_others"]

# Arguments of DistributedOptimizer, and the values with which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "backward_passes_per_step": (1, None),
    "gradient_predivide_factor": (1.0, 1, None),
    "num_groups": (0, None),
    "groups": (None,),
    "sparse_as_dense": (False, None),
    "process_set": (None,),
    "node_shared": (False, None),
}


def notified_tree(
    optimizer: Optimizer,
    comm: Comm,
    *,
    model: nn.Module | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    op: str = "mean",
    arity: int | None = None,
    overlap_forward: bool = True,
    roots: str = "first",
    network: str = "mpi",
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


def refuse_others(strategy: str, others: dict[str, Any]) -> None:
    """Raise ValueError for arguments that this strategy cannot follow; neutral values pass."""
    for name, value in others.items():
        if name not in _NEUTRAL or value not in _NEUTRAL[name]:
            remedy = "leave it out"
            if strategy == "notified_tree" and name == "backward_passes_per_step":
                remedy = "use no_sync()"
            raise ValueError(
                f'strategy="{strategy}" does not know {name}={value!r}; {remedy}, or use '
                "another strategy"
            )
