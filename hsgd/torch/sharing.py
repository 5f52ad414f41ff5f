"""One copy of the parameters per node, for scripts with Horovod's API.

Owns the way from the job's ranks to hsgd.optim.node_shared. Never moves data.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hsgd.optim.node_shared import NodeSharedOptimizer, SharedParameters
from hsgd.torch import runtime
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.process_sets import ProcessSet, global_process_set
from hsgd.torch.reductions import AVERAGE

__all__ = ["share_optimizer", "share_parameters"]


def share_parameters(model: torch.nn.Module, root_rank: int = 0) -> SharedParameters:
    """Make the parameters of a model views of memory that all ranks of a node share; collective
    over all ranks, blocking. All get the root's values.

    DistributedOptimizer(node_shared=True) does it for the parameters of its optimizer. See
    hsgd.optim.node_shared.share_parameters for what it means to write to them, and for errors.
    """
    return _share(model.parameters(), root_rank)


def share_optimizer(
    optimizer: torch.optim.Optimizer,
    compression: type[Compressor],
    op: int,
    process_set: ProcessSet,
    gradient_predivide_factor: float,
    *,
    groups: int | list[list[torch.Tensor]] | None,
    sparse_as_dense: bool,
) -> NodeSharedOptimizer:
    """The optimizer of DistributedOptimizer(node_shared=True); collective, blocking.

    Raises ValueError for optimizers and options that cannot be sharded.
    """
    refused = [
        name
        for name, wrong in {
            "compression": compression is not Compression.none,
            "op": op != AVERAGE,
            "process_set": process_set is not global_process_set,
            "gradient_predivide_factor": gradient_predivide_factor != 1.0,
            "groups": groups is not None,
        }.items()
        if wrong
    ]
    if refused:
        raise ValueError(
            f"node_shared: {', '.join(refused)} cannot be given; gradients are averaged over all "
            "ranks as they are, and there are no buckets"
        )
    NodeSharedOptimizer.check_kind(optimizer)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return NodeSharedOptimizer(optimizer, _share(parameters, 0), sparse_as_dense=sparse_as_dense)


def _share(parameters: Iterable[torch.nn.Parameter], root: int) -> SharedParameters:
    comm = runtime.current().private_comm(0, "shared parameters")
    return SharedParameters(parameters, comm, root)
