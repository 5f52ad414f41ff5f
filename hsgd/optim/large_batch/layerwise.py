"""Layerwise: the base of LARS and LAMB, which have one trust ratio per parameter tensor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict, required

__all__ = ["Layerwise", "Range", "wide_dtype", "with_defaults"]

Range = tuple[Callable[[Any], bool], str]  # whether a value is accepted, and which ones are


class Layerwise(Optimizer):
    """An optimizer whose options are all keys of its parameter groups.

    A subclass sets the three tables and defines `_make_state` and `_step_group`.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {}  # defaults, without lr
    RANGES: ClassVar[dict[str, Range]] = {}
    BUFFERS: ClassVar[tuple[str, ...]] = ()  # state of the shape of a parameter, at least float32

    def __init__(self, params: ParamsT, lr: float | None, options: dict[str, Any]) -> None:
        # lr is in param_groups, from which Horovod's DistributedOptimizer makes its copy.
        self._check_options(options if lr is None else {"lr": lr, **options})
        super().__init__(params, {"lr": required if lr is None else lr, **options})

    def _make_state(self, weight: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _step_group(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        raise NotImplementedError

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a saved state may be older than an option
            for name, value in self.OPTIONS.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does, after a check of its options."""
        if isinstance(param_group, dict):
            self._check_options(param_group)
        super().add_param_group(param_group)
        # State is made now, not in the first step: Horovod's broadcast_optimizer_state makes a
        # step with zero gradients on an optimizer without state, which would decay the weights.
        group = self.param_groups[-1]
        for weight in group["params"]:
            if weight.requires_grad:
                self._make_state(weight, group)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load options and state; local.

        torch casts state to the parameter's dtype, so float32 buffers are taken from `state_dict`.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, weight in zip(saved, own, strict=True):
            for name in self.BUFFERS:
                buffer = state_dict["state"].get(key, {}).get(name)
                if buffer is not None:
                    self.state[weight][name] = buffer.to(
                        device=weight.device, dtype=wide_dtype(weight), copy=True
                    )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; local, does not synchronize."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [self._with_gradients(number) for number in range(len(self.param_groups))]
        for group, pairs in zip(self.param_groups, work, strict=True):
            self._step_group(group, pairs)
        return loss

    def _buffer(self, weight: Tensor, name: str) -> Tensor:
        """Return a state tensor; create it with zeros if missing."""
        state = self.state[weight]
        buffer: Tensor | None = state.get(name)
        if buffer is None:
            buffer = torch.zeros_like(weight, dtype=wide_dtype(weight), requires_grad=False)
            state[name] = buffer
        elif not (buffer.is_cpu and weight.is_cpu) and buffer.device != weight.device:
            # the model was moved after the optimizer was made
            buffer = state[name] = buffer.to(weight.device)
        return buffer

    def _with_gradients(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Return a group's parameters with their gradients; raises TypeError for sparse ones."""
        group = self.param_groups[number]
        pairs = []
        for index, weight in enumerate(group["params"]):
            grad = weight.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise TypeError(
                    f"{self._name()}: parameter {index} of group {number}, "
                    f"shape {tuple(weight.shape)}, has a sparse gradient; make it dense, for "
                    "example Embedding(sparse=False)"
                )
            pairs.append((weight, grad))
        return pairs

    def _check_options(self, options: dict[str, Any]) -> None:
        for name, (accepts, wanted) in self.RANGES.items():
            if name in options and not accepts(options[name]):
                raise ValueError(f"{self._name()}: {name} is {options[name]}; it must be {wanted}")

    def _name(self) -> str:
        return type(self).__name__


def with_defaults(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return `defaults`, overridden by values of `given` that are not None."""
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def wide_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype for computing steps: at least float32."""
    return torch.promote_types(weight.dtype, torch.float32)
