"""node_guard: the replica guard of node-shared parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hsgd.optim.fixed_parameters import FixedParameters
from hsgd.optim.node_shared.shared_parameters import SharedParameters
from hsgd.optim.replicas.replica_guard import ReplicaGuard

__all__ = ["node_guard", "option_terms", "options_of"]

Groups = Sequence[dict[str, Any]]


def node_guard(
    shared: SharedParameters, groups: Groups, fixed: FixedParameters, names: Mapping[Tensor, str]
) -> ReplicaGuard:
    """Return the guard of the nodes' copies; the ranks of a node sum one part each; local.

    On one node there is nothing to compare except the options with which each rank updates.
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
    """Return the groups' options by name, in the form that ranks compare; local."""
    return {
        f"{name} of group {number}": value.tolist() if isinstance(value, Tensor) else value
        for number, options in enumerate(options_of(groups))
        for name, value in options.items()
    }


def options_of(groups: Groups) -> list[dict[str, Any]]:
    """Return the current options of the groups; local."""
    left_out = ("params", "param_names")
    return [{k: v for k, v in group.items() if k not in left_out} for group in groups]
