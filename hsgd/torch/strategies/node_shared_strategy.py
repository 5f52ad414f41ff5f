"""One copy of the parameters per node, for scripts with Horovod's API.

Owns the way from the job's ranks to hsgd.optim.node_shared. Never moves data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from hsgd.optim.node_shared.node_shared_optimizer import (
    NodeSharedOptimizer,
    SharedParameters,
)
from hsgd.torch.compression import Compression
from hsgd.torch.core_errors import core_errors_as_horovods
from hsgd.torch.job import runtime
from hsgd.torch.job.process_sets import global_process_set
from hsgd.torch.operations.reductions import AVERAGE
from hsgd.torch.strategies.arguments import refuse_options

__all__ = ["share_optimizer", "share_parameters"]


def share_parameters(model: torch.nn.Module, root_rank: int = 0) -> SharedParameters:
    """Make the parameters of a model views of memory that all ranks of a node share; collective
    over all ranks, blocking. All get the root's values.

    DistributedOptimizer(node_shared=True) does it for the parameters of its optimizer. See
    hsgd.optim.share_parameters for what it means to write to them, and for errors.
    """
    return _share(model.parameters(), root_rank)


class _SharedOptimizer(NodeSharedOptimizer):
    """A NodeSharedOptimizer whose collectives fail as Horovod's do: with HorovodInternalError, of
    which what the core raised is the __cause__. ReplicasDiffer stays: nothing can be restored.
    """

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        return core_errors_as_horovods()


def share_optimizer(
    optimizer: torch.optim.Optimizer,
    strategy: str,
    *,
    options: Mapping[str, Any] | None,
    sparse_as_dense: bool,
    **others: Any,
) -> NodeSharedOptimizer:
    """The optimizer of DistributedOptimizer(node_shared=True); collective, blocking.

    strategy: "auto" or "after_backward", which change nothing here. others: what else was given;
    backward_passes_per_step changes nothing, model and named_parameters give names for errors.
    Raises ValueError for optimizers and options that cannot be sharded.
    """
    refuse_options(strategy, options)
    neutral = {
        "compression": Compression.none,
        "op": AVERAGE,
        "process_set": global_process_set,
        "gradient_predivide_factor": 1.0,
        "groups": None,
    }
    refused = [name for name, value in neutral.items() if others[name] != value]
    refused += ["bucket_cap_mb"] if "bucket_cap_mb" in others else []
    refused += ["strategy"] if strategy == "overlap" else []
    if refused:
        raise ValueError(
            f"node_shared: {', '.join(refused)} cannot be given; gradients are averaged over all "
            "ranks as they are, after the backward pass, and there are no buckets"
        )
    NodeSharedOptimizer.check_kind(optimizer)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    model, named = others["model"], others["named_parameters"] or ()
    names = {p: name for name, p in (named if model is None else model.named_parameters())}
    return _SharedOptimizer(
        optimizer, _share(parameters, 0), sparse_as_dense=sparse_as_dense, names=names
    )


def _share(parameters: Iterable[torch.nn.Parameter], root: int) -> SharedParameters:
    comm = runtime.current().private_comm(0, "shared parameters")
    return SharedParameters(parameters, comm, root)
