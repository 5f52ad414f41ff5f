"""Updater: applies mean gradients to weights on a root of a NotifiedTree.

Plain SGD uses the kernel of LARS without adaptation, which is the same formula; from a layer's
second update on the engine calls that kernel itself. Other optimizers run as a twin of the user's
optimizer, on a second name of each parameter.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd import _native
from hsgd.optim.large_batch.lars import LARS, native_rule, suits_the_kernel
from hsgd.optim.notified_tree.tree_parts import Stretch

__all__ = ["KernelOperands", "Options", "Updater", "updates_elements"]

Options = list[dict[str, Any]]  # per group, without its parameters
_PLAIN_SGD = {**LARS.OPTIONS, "adapt": "never", "lr_in_momentum": False}


@dataclass
class KernelOperands:
    """Addresses of what the kernel updates."""

    # Per stretch: addresses of weight (0: unknown) and momentum (0: none), and the group.
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    momenta: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # which rows point to


class Updater:
    """Updates some of an optimizer's parameters from given gradients.

    Args:
        parameters: those that this rank updates.
        before_update: see NotifiedTree.
        cut: parameters come in stretches, which needs updates_elements().
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        before_update: Callable[[list[nn.Parameter]], object] | None,
        cut: bool,
    ) -> None:
        self._optimizer, self._before_update, self._cut = optimizer, before_update, cut
        # Shadows share the weights: the program may clear the model's own gradients at any time.
        self._shadows = {p: nn.Parameter(p.detach()) for p in parameters}
        self._group_of = {
            p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._twin = _twin(optimizer)
        self._rules: tuple[Options, list[_native.LarsRule] | None] = ([], None)
        # By part, momenta whose addresses the engine has; parts of a parameter may differ.
        self._kept: dict[int, dict[nn.Parameter, Tensor]] = {}
        self.share_state()

    def share_state(self) -> None:
        """Give each parameter and its shadow one common state dictionary."""
        self._twin.state.clear()
        for parameter, shadow in self._shadows.items():
            self._twin.state[shadow] = self._optimizer.state[parameter]

    def snapshot(self) -> Options:
        """Return a copy of the options, or raise ValueError if stretches cannot use them."""
        if self._cut and not updates_elements(self._optimizer):
            raise ValueError(
                "NotifiedTree: dampening or maximize was set after large layers were cut into "
                "parts, whose update has neither; set it before, or give part_bytes=0"
            )
        return [
            {name: copy.copy(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def rules(self, options: Options) -> list[_native.LarsRule] | None:
        """Return the kernel's rule for each group; None if the kernel cannot do the update."""
        known = self._rules
        if known[0] is not options:
            rules = None if self._before_update is not None else _rules(self._optimizer, options)
            self._rules = known = (options, rules)
        return known[1]

    def keep(self, part: int, places: KernelOperands) -> None:
        """Keep the momenta that these addresses of a part point to alive until forget()."""
        self._kept[part] = places.momenta

    def is_steady(self) -> bool:
        """Return whether all kept momenta are still those of the optimizer."""
        state = self._optimizer.state
        return all(
            state.get(parameter, {}).get("momentum_buffer") is buffer
            for momenta in list(self._kept.values())  # the engine's thread adds some
            for parameter, buffer in momenta.items()
        )

    def forget(self) -> None:
        """Keep no momenta, since no addresses are in use."""
        self._kept.clear()

    def update(
        self, stretches: Sequence[tuple[Stretch, Tensor | None]], options: Options
    ) -> KernelOperands | None:
        """Make one step on these stretches; return addresses if the kernel can do the next one."""
        places = self._update_natively(stretches, options)
        if places is not None:
            return places
        gradients = {stretch.parameter: gradient for stretch, gradient in stretches}
        for parameter, gradient in gradients.items():
            self._shadows[parameter].grad = gradient
        if self._before_update is not None:
            shadows = [self._shadows[p] for p in gradients]
            self._before_update([shadow for shadow in shadows if shadow.grad is not None])
        self._twin.param_groups = [
            {**settings, "params": [self._shadows[p] for p in group["params"] if p in gradients]}
            for settings, group in zip(options, self._optimizer.param_groups, strict=True)
        ]
        self._twin.step()
        return None

    def _update_natively(
        self, stretches: Sequence[tuple[Stretch, Tensor | None]], options: Options
    ) -> KernelOperands | None:
        """Update with the kernel; return None, with nothing done, if it cannot."""
        rules = self.rules(options)
        if rules is None:
            return None
        rows: dict[int, list[tuple[int, int, int, int, float, int]]] = {}
        places = KernelOperands()
        for stretch, gradient in stretches:
            parameter = stretch.parameter
            if gradient is None or parameter not in self._group_of:
                places.rows.append((0, 0, 0))
                continue
            index, shadow = self._group_of[parameter], self._shadows[parameter]
            buffer = self._buffer(parameter) if options[index]["momentum"] else None
            if stretch.is_whole and not suits_the_kernel(shadow, gradient, buffer):
                return None
            skipped = stretch.begin * shadow.element_size()
            address = 0 if buffer is None else buffer.data_ptr() + skipped
            weight, count = shadow.data_ptr() + skipped, gradient.numel()
            row = (weight, gradient.data_ptr(), address, count, 0.0, 0)
            rows.setdefault(index, []).append(row)
            places.rows.append((weight, address, index))
            if buffer is not None:
                places.momenta[parameter] = buffer
        for index, table in rows.items():
            _native.lars_step(table, rules[index], 1)
        return places

    def _buffer(self, parameter: nn.Parameter) -> Tensor:
        """Return the momentum in the parameter's memory order; zeros give SGD's first one."""
        state: dict[str, Tensor | None] = self._optimizer.state[parameter]
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = torch.zeros_like(parameter.detach())
        elif self._cut and not (
            buffer.dtype is parameter.dtype and buffer.stride() == parameter.stride()
        ):
            like = torch.empty_like(parameter.detach())
            buffer = state["momentum_buffer"] = like.copy_(buffer)
        return buffer


def updates_elements(optimizer: Optimizer) -> bool:
    """Return whether the kernel updates any stretch of a parameter as the optimizer does."""
    groups = optimizer.param_groups
    return _rules(optimizer, groups) is not None


def _rules(optimizer: Optimizer, options: Options) -> list[_native.LarsRule] | None:
    """Return the kernel's rule for each group; None if the optimizer's formula differs."""
    if type(optimizer) is not torch.optim.SGD:
        return None
    if any(group["dampening"] or group["maximize"] for group in options):
        return None
    return [native_rule({**_PLAIN_SGD, **group}, excluded=False) for group in options]


def _twin(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class and settings, without groups, state and hooks."""
    twin: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    twin.__dict__.update(own)
    twin.__dict__["param_groups"] = []
    twin.__dict__["state"] = type(optimizer.state)(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = OrderedDict()
    return twin
