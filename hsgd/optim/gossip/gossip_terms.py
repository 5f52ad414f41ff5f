"""What ranks that gossip agree on, and what a Gossip cannot be asked for.

Owns the refusals of its options. Never changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from hsgd.optim.gossip.first_moments import Momentum
from hsgd.optim.gossip.gossip_turns import check_schedule
from hsgd.optim.gossip.noloco import NoLoCo, read_outer
from hsgd.optim.gossip.topology import Topology, described
from hsgd.optim.layouts import layout_terms
from hsgd.optim.triggers.communication_triggers import Trigger
from hsgd.optim.wrapping_optimizer import check_choice
from torch import Tensor, nn

__all__ = ["WIRE", "checked_rule", "terms_of"]

WIRE = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}


def checked_rule(trigger: Trigger, options: Mapping[str, Any]) -> NoLoCo | None:
    """Return what `outer` means; local. options: Gossip's, by name. Raises ValueError and TypeError
    for those that cannot be.
    """
    check_schedule(trigger, options["max_interval"], options["global_average_every"])
    check_choice("Gossip: momentum", options["momentum"], get_args(Momentum))
    check_choice("Gossip: compression", options["compression"], WIRE)
    if isinstance(options["topology"], str):
        Topology(options["topology"], 1)  # or a wrong name would show on many ranks only
    if options["group_size"] is not None and not options["hierarchical"]:
        raise ValueError("Gossip: group_size is for hierarchical=True")
    names = ("outer", "topology", "compression", "network")
    return read_outer(*(options[name] for name in names))


def terms_of(
    trigger: Trigger,
    rule: NoLoCo | None,
    options: Mapping[str, Any],
    params: nn.Module | Sequence[Tensor],
    buffers: Sequence[Tensor],
) -> dict[str, object]:
    """Return what must be equal on all ranks; local. The trigger, which may be another on each
    rank, only where partners meet in the same steps.
    """
    terms = {**options, "topology": described(options["topology"]), "outer": rule}
    if rule is not None:
        terms["trigger"] = trigger
    others = [(f"buffer {number}", tuple(b.shape)) for number, b in enumerate(buffers)]
    return {**terms, **layout_terms(params), **dict(others)}
