"""LARS: layer-wise adaptive rate scaling for large batches.

Owns the update of one replica from gradients that are already aggregated. Never communicates, and
never waits for a device: norms and trust ratios stay tensors.

Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888
(2017), in the form of the MLPerf reference: learning rate inside the momentum buffer, norm of the
gradient before decay is added.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict, required

__all__ = ["LARS"]


class LARS(Optimizer):
    r"""Stochastic gradient descent with momentum and one trust ratio per parameter tensor.

    With weights w, aggregated gradient g, weight decay b, momentum m and Euclidean norms of whole
    tensors::

        trust = trust_coefficient * |w| / (|g| + b * |w| + eps)     (1 where |w| or |g| is 0)
        v     = m * v + lr * trust * (g + b * w)
        w     = w - v

    Tensors of fewer than two dimensions (biases, normalization) take neither decay nor scaling
    unless `exclude_1d=False`: for them the step is SGD with momentum. 16-bit tensors are computed
    in float32 (norms and momentum buffers too) and rounded once per step.

    `step()` is local and does not synchronize with a device. Every argument but `params` is also a
    key of a parameter group: a group overrides it, a scheduler may change it.

    Args:
        params: tensors, (name, tensor) pairs or dicts of parameter groups.
        lr: learning rate, >= 0. May be left out only where every group has its own.
        momentum: m, >= 0 and < 1. With 0 no buffer is kept.
        weight_decay: b, >= 0.
        trust_coefficient: > 0. Without momentum a step changes w by lr * trust_coefficient * |w|
            at most.
        eps: >= 0, keeps the denominator away from 0.
        exclude_1d: leave tensors of fewer than two dimensions unscaled and without decay.

    Raises:
        ValueError: an option is out of range.
        TypeError: a gradient is sparse; nothing was updated then.

    Source: arXiv:1708.03888 in the form of the MLPerf reference, see docs/lars.md.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        *,
        exclude_1d: bool = True,
    ) -> None:
        # Horovod's DistributedOptimizer makes its copy from the param_groups alone: lr is in them.
        defaults = {
            "lr": required if lr is None else lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "exclude_1d": exclude_1d,
        }
        _check_options({key: value for key, value in defaults.items() if value is not required})
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; its options are checked first."""
        if isinstance(param_group, dict):
            _check_options(param_group)
        super().add_param_group(param_group)
        # State is made now and not in the first step: Horovod's broadcast_optimizer_state takes a
        # step with zero gradients on an optimizer without state, and that would decay the weights.
        group = self.param_groups[-1]
        for weight in group["params"]:
            if weight.requires_grad and group["momentum"] > 0:
                self._momentum_buffer(weight)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load options and momentum buffers. Local.

        torch casts state to the dtype of the parameter, so the float32 buffers of 16-bit parameters
        are taken from `state_dict` itself.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, weight in zip(saved, own, strict=True):
            buffer = state_dict["state"].get(key, {}).get("momentum_buffer")
            if buffer is not None:
                self.state[weight]["momentum_buffer"] = buffer.to(
                    device=weight.device, dtype=_wide_dtype(weight), copy=True
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Local, does not synchronize.

        Args:
            closure: computes the loss and the gradients again, and returns the loss.

        Returns:
            What `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse_gradients()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _refuse_sparse_gradients(self) -> None:
        for number, group in enumerate(self.param_groups):
            for index, weight in enumerate(group["params"]):
                if weight.grad is not None and weight.grad.layout != torch.strided:
                    raise TypeError(
                        f"LARS: parameter {index} of group {number}, shape {tuple(weight.shape)}, "
                        "has a sparse gradient; make it dense, for example Embedding(sparse=False)"
                    )

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        excluded = group["exclude_1d"] and weight.ndim < 2
        decay = 0.0 if excluded else group["weight_decay"]
        w = weight.to(_wide_dtype(weight))
        g = grad.to(w.dtype)
        rate = group["lr"] if excluded else group["lr"] * _trust_ratio(w, g, group)
        change = (g.add(w, alpha=decay) if decay else g) * rate
        if group["momentum"] > 0:
            change = self._momentum_buffer(weight).mul_(group["momentum"]).add_(change)
        w.sub_(change)
        if w is not weight:  # w is a float32 copy of 16-bit weights
            weight.copy_(w)

    def _momentum_buffer(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        buffer: Tensor | None = state.get("momentum_buffer")
        if buffer is None:
            buffer = torch.zeros_like(weight, dtype=_wide_dtype(weight), requires_grad=False)
            state["momentum_buffer"] = buffer
        elif buffer.device != weight.device:  # the model was moved after the optimizer was made
            buffer = state["momentum_buffer"] = buffer.to(weight.device)
        return buffer


def _trust_ratio(w: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
    w_norm = torch.linalg.vector_norm(w)
    g_norm = torch.linalg.vector_norm(g)
    denominator = g_norm + group["weight_decay"] * w_norm + group["eps"]
    ratio = group["trust_coefficient"] * w_norm / denominator
    return torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)


def _wide_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda value: value >= 0, ">= 0"),
    "momentum": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "weight_decay": (lambda value: value >= 0, ">= 0"),
    "trust_coefficient": (lambda value: value > 0, "> 0"),
    "eps": (lambda value: value >= 0, ">= 0"),
}


def _check_options(options: dict[str, Any]) -> None:
    for name, (accepts, wanted) in _RANGES.items():
        if name in options and not accepts(options[name]):
            raise ValueError(f"LARS: {name} is {options[name]}; it must be {wanted}")
