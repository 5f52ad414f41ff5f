"""strategy="elastic_async", "elastic_hybrid": from the job's ranks to ElasticAveraging.

Owns the choice of the communicator. Never moves data.
"""

from __future__ import annotations

from typing import Any

import torch

from hsgd.optim.elastic import ElasticAveraging
from hsgd.optim.elastic_strategy import elastic_averaging
from hsgd.torch import runtime
from hsgd.torch.arguments import translated

__all__ = ["average_elastically"]


def average_elastically(
    optimizer: torch.optim.Optimizer, strategy: str, op: int, **others: Any
) -> ElasticAveraging:
    """The optimizer of DistributedOptimizer(strategy="elastic_..."); collective, blocking.

    Raises ValueError naming arguments that have no meaning with this strategy.
    """
    comm = runtime.current().private_comm(0, "elastic averaging")
    return elastic_averaging(optimizer, comm, strategy, **translated(op, **others))
