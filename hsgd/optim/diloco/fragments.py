"""Fragments: parts of a model that are exchanged together, and when.

Source: Streaming DiLoCo (arXiv:2501.18512).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hsgd.optim.diloco.outer_optimizer import Nesterov
from hsgd.optim.flat_vectors import views_of
from hsgd.optim.wrapping_optimizer import tensors_of

__all__ = [
    "Fragment",
    "Fragments",
    "check_saved",
    "check_schedule",
    "cut",
    "exchanged_of",
    "phases",
    "scheduled",
]

Fragments = int | Sequence[nn.Module | Iterable[Tensor]]


class Fragment:
    """Some of the weights, and their outer values.

    Args:
        parameters: floating tensors, of any dtype and device.
        phase: the step of each period, from 1, after which the weights take outer weights.
        outer: whether this rank keeps outer weights and velocity.
    """

    def __init__(self, parameters: Sequence[Tensor], phase: int, outer: bool) -> None:
        self.parameters = list(parameters)
        self.phase = phase
        self.count = sum(p.numel() for p in self.parameters)
        self.keeps_outer = outer
        self.outer_weights = self.gathered() if outer else torch.empty(0)
        self.velocity = torch.zeros_like(self.outer_weights)
        self.taken = 0  # the step after which it took outer weights

    def start_from(self, outer_weights: Tensor, velocity: Tensor, step: int) -> None:
        """Set the weights to these outer weights, and keep them if this rank keeps any; local."""
        if self.keeps_outer:
            self.outer_weights, self.velocity = outer_weights, velocity
        self.take(outer_weights, 0.0)
        self.taken = step

    def gathered(self) -> Tensor:
        """Return the weights as a new 1-d float32 vector on the CPU; local."""
        flat = torch.empty(self.count)
        views = views_of(flat, self.parameters)
        for view, parameter in zip(views, self.parameters, strict=True):
            view.copy_(parameter.detach())
        return flat

    def pseudo_gradient(self) -> Tensor:
        """Return outer weights - weights, as a new vector; local.

        For parameters with less precision than float32 the outer weights are rounded first, so that
        rounding does not count as progress.
        """
        flat = torch.empty(self.count)
        places = (flat, self.outer_weights)
        views = (views_of(place, self.parameters) for place in places)
        for parameter, view, outer in zip(self.parameters, *views, strict=True):
            view.copy_(outer.to(parameter.dtype))
            view.sub_(parameter.detach().to(view.device, view.dtype))
        return flat

    def step(self, outer: Nesterov | None, mean: Tensor) -> None:
        """Make the outer step; if `outer` is None, take the mean of the workers' weights; local."""
        if outer is None:
            self.outer_weights.sub_(mean)
        else:
            outer.step(self.outer_weights, self.velocity, mean)

    def take(self, outer_weights: Tensor, alpha: float) -> None:
        """Set weights = alpha * weights + (1 - alpha) * outer weights; local."""
        views = views_of(outer_weights, self.parameters)
        for parameter, view in zip(self.parameters, views, strict=True):
            weight = parameter.detach()
            if alpha == 0:
                weight.copy_(view)
            else:
                weight.copy_(weight.float().lerp(view.to(weight.device), 1 - alpha))


def exchanged_of(params: nn.Module | Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters that train, and a model's floating buffers; local.

    Raises TypeError if one is not floating, ValueError if no parameter trains.
    """
    found, buffers = tensors_of(params, "DiLoCo")
    parameters = [p for p in found if p.requires_grad]
    for index, p in enumerate([*parameters, *buffers]):
        if not p.is_floating_point():
            raise TypeError(f"DiLoCo: parameter {index} is {p.dtype}; give floating ones")
    if not parameters:
        raise ValueError("DiLoCo: there are no parameters that train")
    return parameters, buffers


def cut(parameters: Sequence[Tensor], fragments: Fragments) -> list[list[Tensor]]:
    """Return the parameters of each fragment; local.

    `fragments` is a number of fragments, which have consecutive parameters and similar sizes, or a
    list of modules or parameters. Raises ValueError if the number is too large, or the list does
    not contain each parameter once.
    """
    if isinstance(fragments, int):
        return _even(parameters, fragments)
    parts = [tensors_of(given, "DiLoCo: a fragment")[0] for given in fragments]
    every = [id(p) for part in parts for p in part]
    if len(set(every)) != len(every) or set(every) != {id(p) for p in parameters}:
        raise ValueError(
            f"DiLoCo: the fragments have {len(set(every))} different parameters in "
            f"{len(every)} places, the optimizer has {len(parameters)}; give each of them once"
        )
    if not all(parts):
        raise ValueError("DiLoCo: a fragment has no parameters")
    return parts


def scheduled(
    parameters: Sequence[Tensor], fragments: Fragments, period: int
) -> list[tuple[list[Tensor], int]]:
    """Return the parameters and the phase of each fragment; local. Raises as cut() and phases()."""
    parts = cut(parameters, fragments)
    return list(zip(parts, phases(len(parts), period), strict=True))


def _even(parameters: Sequence[Tensor], number: int) -> list[list[Tensor]]:
    if not 1 <= number <= len(parameters):
        raise ValueError(
            f"DiLoCo: fragments is {number}; give a number from 1 to {len(parameters)}, that of "
            "the parameters"
        )
    left = float(sum(p.numel() for p in parameters))
    parts: list[list[Tensor]] = [[]]
    size = 0
    for index, parameter in enumerate(parameters):
        missing = number - len(parts)
        full = size + parameter.numel() / 2 > left / (missing + 1)
        if parts[-1] and missing and (full or len(parameters) - index == missing):
            left -= size
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel()
    return parts


def phases(number: int, period: int) -> list[int]:
    """Return the steps of a period, from 1, after which fragments take outer weights; local.

    Steps are evenly spaced. Raises ValueError if there are more fragments than steps.
    """
    if number > period:
        raise ValueError(
            f"DiLoCo: {number} fragments do not fit in sync_every={period} steps; give at most one "
            "fragment for each step"
        )
    return [(index + 1) * period // number for index in range(number)]


def check_saved(own: Mapping[str, Any], fragments: Sequence[Fragment], leads: bool) -> None:
    """Raise ValueError for a saved state that does not fit; local.

    Its fragments must have the sizes of `fragments`; if this rank `leads`, outer weights, too.
    """
    saved = [len(one["outer_weights"]) for one in own.get("fragments", [])]
    here = [fragment.count for fragment in fragments]
    if saved and saved != here:
        raise ValueError(
            f"DiLoCo: the state has fragments of {saved} values, this optimizer of {here}; "
            "it is of another model, or fragments= differs"
        )
    if leads and not saved:
        raise ValueError("DiLoCo: the state has no outer weights; load on rank 0 what rank 0 saved")


def check_schedule(sync_every: int, delay: int, alpha: float, eager: bool) -> None:
    """Raise ValueError if steps or alpha are out of range; local."""
    if not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(f"DiLoCo: sync_every is {sync_every!r}; give steps, 1 or more")
    if not isinstance(delay, int) or not 0 <= delay < sync_every:
        raise ValueError(
            f"DiLoCo: delay is {delay!r}; give steps, from 0 to below sync_every={sync_every}"
        )
    if eager and delay:
        raise ValueError(
            f"DiLoCo: eager=True gives each exchange a whole period; leave out delay={delay}"
        )
    if not 0 <= alpha < 1:
        raise ValueError(f"DiLoCo: alpha is {alpha!r}; give a share from 0 to below 1")
