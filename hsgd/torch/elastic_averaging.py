"""strategy="elastic_async", "elastic_hybrid": from the job's ranks to ElasticAveraging.

Owns the translation of Horovod's arguments. Never moves data.
"""

from __future__ import annotations

from typing import Any

import torch

from hsgd.optim.elastic import ElasticAveraging
from hsgd.optim.elastic_strategy import elastic_averaging
from hsgd.torch import runtime
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.process_sets import ProcessSet, global_process_set
from hsgd.torch.reductions import AVERAGE

__all__ = ["average_elastically"]


def average_elastically(
    optimizer: torch.optim.Optimizer,
    strategy: str,
    op: int,
    *,
    compression: type[Compressor],
    process_set: ProcessSet,
    **others: Any,
) -> ElasticAveraging:
    """The optimizer of DistributedOptimizer(strategy="elastic_..."); collective, blocking.

    Raises ValueError naming arguments that have no meaning with this strategy.
    """
    if compression is not Compression.none:
        others["compression"] = compression
    if process_set is not global_process_set:
        others["process_set"] = process_set
    return elastic_averaging(
        optimizer,
        runtime.current().private_comm(0, "elastic averaging"),
        strategy,
        op="mean" if op == AVERAGE else str(op),
        **others,
    )
