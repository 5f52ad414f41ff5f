"""LAMB: Adam with one trust ratio per parameter tensor, for large batches."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hsgd.optim.large_batch.layerwise import Layerwise, Range, wide_dtype, with_defaults

__all__ = ["LAMB"]


class LAMB(Layerwise):
    """Adam whose step is scaled, per parameter tensor, to the norm of the weights.

    With weights w, aggregated gradient g, weight decay b and Euclidean norms of whole tensors::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + b * w
        w = w - lr * |w| / |r| * r                  (lr * r if |w| or |r| is 0)

    Tensors of fewer than two dimensions (biases, normalization) have neither decay nor scaling
    unless `exclude_1d=False`: their step is Adam's. 16-bit tensors are computed in float32 and
    rounded once per step. `step()` is local and does not synchronize with a device. Every argument
    except `params` is also a key of a parameter group. Source: You et al., "Large Batch
    Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962, algorithm 2,
    with phi the identity.

    Args:
        params: tensors, (name, tensor) pairs or dicts of parameter groups.
        lr: learning rate, >= 0. Optional only if every group has its own.
        betas: beta1 and beta2, each >= 0 and < 1. Default (0.9, 0.999).
        eps: >= 0. Default 1e-6.
        weight_decay: b, >= 0. Default 0.
        bias_correction: divide by 1 - beta^t, as above. Default True.
        exclude_1d: no scaling and decay for tensors of fewer than two dimensions. Default True.

    Raises:
        ValueError: an option is out of range.
        TypeError: a gradient is sparse; nothing was updated then.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "bias_correction": True,
        "exclude_1d": True,
    }
    RANGES: ClassVar[dict[str, Range]] = {
        "lr": (lambda value: value >= 0, ">= 0"),
        "betas": (lambda value: all(0 <= beta < 1 for beta in value), "in [0, 1), both"),
        "eps": (lambda value: value >= 0, ">= 0"),
        "weight_decay": (lambda value: value >= 0, ">= 0"),
    }
    BUFFERS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        *,
        bias_correction: bool | None = None,
        exclude_1d: bool | None = None,
    ) -> None:
        given = {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, lr, with_defaults(self.OPTIONS, given))

    def _make_state(self, weight: Tensor, group: dict[str, Any]) -> None:
        for name in self.BUFFERS:
            self._buffer(weight, name)
        self.state[weight].setdefault("step", 0)

    def _step_group(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        beta1, beta2 = group["betas"]
        for weight, grad in pairs:
            self._make_state(weight, group)
            state = self.state[weight]
            state["step"] += 1
            w = weight.to(wide_dtype(weight))
            g = grad.to(w.dtype)
            m = state["exp_avg"].lerp_(g, 1 - beta1)
            v = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            if group["bias_correction"]:
                m = m / (1 - beta1 ** state["step"])
                v = v / (1 - beta2 ** state["step"])
            r = m / v.sqrt().add_(group["eps"])
            if not (group["exclude_1d"] and weight.ndim < 2):
                r.add_(w, alpha=group["weight_decay"])
                r.mul_(_trust_ratio(w, r))
            w.sub_(r, alpha=group["lr"])
            if w is not weight:  # w is a float32 copy of 16-bit weights
                weight.copy_(w)


def _trust_ratio(w: Tensor, r: Tensor) -> Tensor:
    w_norm = torch.linalg.vector_norm(w)
    r_norm = torch.linalg.vector_norm(r)
    return torch.where((w_norm > 0) & (r_norm > 0), w_norm / r_norm, 1.0)
