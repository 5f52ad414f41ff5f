"""strategy="easgd_async", "easgd_hybrid": from the job's ranks to ElasticAveraging.

Owns the choice of the communicator, and what of Horovod's arguments has a meaning here. Never moves
data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from torch.optim.optimizer import Optimizer

import torch
from hsgd.comm.communicator import Comm
from hsgd.optim.elastic_averaging.easgd_optimizer import ElasticAveraging, Mode
from hsgd.torch.job import runtime
from hsgd.torch.strategies.arguments import refuse_others, translated
from torch import Tensor, nn

__all__ = ["STRATEGIES", "average_elastically"]

STRATEGIES: dict[str, Mode] = {f"easgd_{mode}": mode for mode in get_args(Mode)}


def average_elastically(
    optimizer: torch.optim.Optimizer, strategy: str, *, op: int, **others: Any
) -> ElasticAveraging:
    """The optimizer of DistributedOptimizer(strategy="easgd_..."); collective, blocking.

    Raises ValueError naming arguments that have no meaning with this strategy.
    """
    comm = runtime.current().private_comm(0, "elastic averaging")
    return elastic_averaging(optimizer, comm, strategy, **translated(op, **others))


def elastic_averaging(
    optimizer: Optimizer,
    comm: Comm,
    strategy: str,
    *,
    model: nn.Module | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    op: str = "mean",
    options: dict[str, Any] | None = None,
    **others: Any,
) -> ElasticAveraging:
    """An ElasticAveraging for callers with DistributedOptimizer's arguments; collective.

    model: its floating buffers are averaged too; None: the optimizer's parameters alone.
    named_parameters: not needed. op: "mean", which is all there is. options: other arguments of
    ElasticAveraging. `others`: accepted with values that change nothing.
    Raises ValueError naming what cannot be had with this strategy.
    """
    if op != "mean":
        raise ValueError(f'strategy="{strategy}" averages; op is {op!r}, give "mean"')
    refuse_others(strategy, others)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return ElasticAveraging(
        optimizer, own if model is None else model, comm, STRATEGIES[strategy], **(options or {})
    )
