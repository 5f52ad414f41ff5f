"""node_guard(): what the ranks of node-shared parameters should hold alike.

Owns what that is. Never compares: ReplicaGuard does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hsgd.optim.fixed_parameters import FixedParameters
from hsgd.optim.node_shared.shared_parameters import SharedParameters
from hsgd.optim.replicas.replica_guard import ReplicaGuard
from torch import Tensor

__all__ = ["node_guard", "option_terms", "options_of"]

Groups = Sequence[dict[str, Any]]


def node_guard(
    shared: SharedParameters, groups: Groups, fixed: FixedParameters, names: Mapping[Tensor, str]
) -> ReplicaGuard:
    """Return the guard of the nodes' copies, of which the ranks of a node sum a part each; local.
    One node has nothing to be compared with, but each of its ranks updates by options of its own.
    """
    comm = shared.comm
    several = comm.cross_size > 1
    named = [(names.get(p, name), p) for name, p in fixed.named()] if several else []
    parts = min(Counter(comm.nodes).values()) if several else 1
    return ReplicaGuard(
        lambda: named,
        terms=lambda: option_terms(groups),
        part=(comm.local_rank if several else 0, parts),
    )


def option_terms(groups: Groups) -> dict[str, object]:
    """Return options by name, as ranks compare them; local."""
    return {
        f"{name} of group {number}": value.tolist() if isinstance(value, Tensor) else value
        for number, options in enumerate(options_of(groups))
        for name, value in options.items()
    }


def options_of(groups: Groups) -> list[dict[str, Any]]:
    """Return the options of the groups, as they are now; local."""
    left_out = ("params", "param_names")
    return [{k: v for k, v in group.items() if k not in left_out} for group in groups]
