"""strategy="notified_tree": from the job's ranks to hsgd.optim.NotifiedTree.

Owns the translation of Horovod's arguments. Never moves data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hsgd.optim.tree import NotifiedTree
from hsgd.optim.tree_strategy import notified_tree
from hsgd.torch import runtime
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.process_sets import ProcessSet, global_process_set
from hsgd.torch.reductions import AVERAGE

__all__ = ["plant_tree"]


def plant_tree(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    op: int,
    *,
    compression: type[Compressor],
    process_set: ProcessSet,
    **others: Any,
) -> NotifiedTree:
    """The optimizer of DistributedOptimizer(strategy="notified_tree"); collective, blocking.

    Raises ValueError naming arguments that have no meaning with this strategy.
    """
    if compression is not Compression.none:
        others["compression"] = compression
    if process_set is not global_process_set:
        others["process_set"] = process_set
    job = runtime.current()
    if model is None:  # before a communicator is made
        return notified_tree(optimizer, job.comm, model=None)
    return notified_tree(
        optimizer,
        job.private_comm(0, "tree"),
        model=model,
        named_parameters=named_parameters,
        op="mean" if op == AVERAGE else str(op),
        **others,
    )
