"""strategy="elastic_async" and "elastic_hybrid" of a Horovod-like DistributedOptimizer.

Owns what of Horovod's arguments has a meaning here, and the words for what has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.comm import Comm
from hsgd.optim.elastic import MODES, ElasticAveraging
from hsgd.optim.tree_strategy import refuse_others

__all__ = ["STRATEGIES", "elastic_averaging"]

STRATEGIES = {f"elastic_{mode}": mode for mode in MODES}


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
