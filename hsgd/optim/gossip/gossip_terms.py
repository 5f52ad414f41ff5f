"""Checks of Gossip's options, and what its ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from hsgd.optim.gossip.first_moments import Momentum
from hsgd.optim.gossip.noloco import NoLoCo
from hsgd.optim.gossip.topology import Topology, described
from hsgd.optim.layouts import layout_terms
from hsgd.optim.triggers.communication_triggers import FixedPeriod, RelativeChange, Trigger
from hsgd.optim.wrapping_optimizer import check_choice

__all__ = ["WIRE", "checked_rule", "terms_of", "usual_trigger"]

WIRE = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}


def usual_trigger(outer: object) -> Trigger:
    """Return the default trigger; local. Partners of NoLoCo must meet in the same steps."""
    return RelativeChange(0.05) if outer is None else FixedPeriod(50)


def checked_rule(trigger: Any, options: Mapping[str, Any]) -> NoLoCo | None:
    """Check Gossip's options, and return the rule that `outer` names; local.

    Raises ValueError and TypeError for invalid options.
    """
    if not isinstance(trigger, Trigger):
        raise TypeError(
            f"Gossip: trigger is a {type(trigger).__name__}; give one of hsgd.optim.triggers, or "
            "an object with step, reset, state_dict and load_state_dict"
        )
    for name in ("max_interval", "global_average_every"):
        value = options[name]
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"Gossip: {name} is {value!r}; give steps, 1 or more, or None")
    check_choice("Gossip: momentum", options["momentum"], get_args(Momentum))
    check_choice("Gossip: compression", options["compression"], WIRE)
    if isinstance(options["topology"], str):
        Topology(options["topology"], 1)  # so that a wrong name fails on a single rank too
    if options["group_size"] is not None and not options["hierarchical"]:
        raise ValueError("Gossip: group_size is for hierarchical=True")
    outer = options["outer"]
    if outer is None:
        return None
    if outer != "noloco" and not isinstance(outer, NoLoCo):
        raise ValueError(f'Gossip: outer is {outer!r}; use "noloco", a NoLoCo(lr=...) or None')
    for name, only in (("topology", "random"), ("compression", None), ("network", "sockets")):
        given = options[name]
        if given is not only and given != only:
            raise ValueError(f"Gossip: outer needs {name}={only!r}, not {given!r}")
    return outer if isinstance(outer, NoLoCo) else NoLoCo()


def terms_of(
    trigger: Trigger,
    rule: NoLoCo | None,
    options: Mapping[str, Any],
    params: nn.Module | Sequence[Tensor],
    buffers: Sequence[Tensor],
) -> dict[str, object]:
    """Return what must be equal on all ranks; the trigger only if partners meet; local."""
    terms = {**options, "topology": described(options["topology"]), "outer": rule}
    if rule is not None:
        terms["trigger"] = trigger
    others = [(f"buffer {number}", tuple(b.shape)) for number, b in enumerate(buffers)]
    return {**terms, **layout_terms(params), **dict(others)}
