"""The strategies of DistributedOptimizer that are algorithms of their own, by name.

Owns the table, and nothing of what stands in it. Each takes the same arguments: the optimizer, the
name it was asked for by, and by keyword op, model, named_parameters, options (strategy_options) and
what else DistributedOptimizer was given. Each is collective and blocking, and refuses with
ValueError what has no meaning for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hsgd.torch.strategies.diloco_strategy import start_diloco
from hsgd.torch.strategies.easgd_strategy import STRATEGIES as EASGD
from hsgd.torch.strategies.easgd_strategy import average_elastically
from hsgd.torch.strategies.gossip_strategy import start_gossip
from hsgd.torch.strategies.node_shared_strategy import share_optimizer
from hsgd.torch.strategies.notified_tree_strategy import plant_tree

__all__ = ["NODE_SHARED", "STRATEGIES"]

NODE_SHARED: Callable[..., Any] = share_optimizer  # asked for by node_shared=True
STRATEGIES: dict[str, Callable[..., Any]] = {
    "notified_tree": plant_tree,
    "gossip": start_gossip,
    "diloco": start_diloco,
    **dict.fromkeys(EASGD, average_elastically),
}
