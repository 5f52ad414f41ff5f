"""LARS: layer-wise adaptive rate scaling for large batches."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from hsgd import _native
from hsgd.optim.large_batch.lars_presets import LARS_PRESETS
from hsgd.optim.large_batch.layerwise import Layerwise, Range, wide_dtype, with_defaults

__all__ = ["LARS", "native_rule", "suits_the_kernel"]

# Addresses of weight, gradient and buffer, number of elements, and the _Found of the weights.
_Row = tuple[int, int, int, int, float, int]
_Found = tuple[float, int]  # the squared norm of the weights, and the sum of a few of them
_NORMS = ("gradient", "decayed", "update")  # LarsNorm of csrc/core/kernels/lars.hpp
_PLAIN = (Tensor, torch.nn.Parameter)
_ADAPT = ("always", "decayed", "never")


class _Kept(NamedTuple):
    """The norm of a large tensor, which a step sums while it updates the tensor."""

    weight: Tensor
    address: int
    version: int  # torch counts its writes to a tensor
    square: float
    sample: int  # sum of a few elements: detects writes that torch does not see


class LARS(Layerwise):
    """Stochastic gradient descent with momentum and one trust ratio per parameter tensor.

    With weights w, aggregated gradient g, weight decay b, momentum m and Euclidean norms of whole
    tensors::

        trust = trust_coefficient * |w| / (|g| + b * |w| + eps)     (1 if |w| or |g| is 0)
        v     = m * v + lr * trust * (g + b * w)
        w     = w - v

    Tensors of fewer than two dimensions (biases, normalization) have neither decay nor scaling
    unless `exclude_1d=False`: their step is SGD with momentum. 16-bit tensors are computed in
    float32 (including norms and momentum buffers) and rounded once per step.

    Implementations in use differ; the options below cover them, and `preset` selects the options of
    one by name. The default is the form of the MLPerf reference. `step()` is local and does not
    synchronize with a device. float32 tensors in host memory use a native kernel with
    torch.get_num_threads() threads; the result does not depend on their number. Every argument
    except `params` and `preset` is also a key of a parameter group: a group overrides it, a
    scheduler may change it. Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional
    Networks", arXiv:1708.03888; for the presets see docs/lars.md.

    Args:
        params: tensors, (name, tensor) pairs or dicts of parameter groups.
        lr: learning rate, >= 0. Optional only if every group has its own.
        momentum: m, >= 0 and < 1. With 0 no buffer is kept. Default 0.9.
        weight_decay: b, >= 0. Default 0.
        trust_coefficient: > 0. Without momentum a step changes w by at most lr * trust_coefficient
            * |w|. Default 0.001.
        eps: >= 0, keeps the denominator away from 0. Default 1e-8.
        exclude_1d: no scaling and decay for tensors of fewer than two dimensions. Default True.
        adapt: "always" (default), "decayed" (only if weight_decay is not 0) or "never".
        norm_of: the denominator. "gradient": |g| + b * |w| + eps (default); "decayed": |g + b * w|
            + eps; "update": the norm of the momentum step + eps, with the ratio applied to that
            step instead of the buffer.
        lr_in_momentum: lr inside the buffer, as above (default), or v = m * v + trust * (g + b * w)
            and w = w - lr * v.
        trust_clip: the ratio becomes min(trust / lr, 1). Default False.
        zero_norm: if |w| or the other norm is 0, "unit": the ratio is 1 (default), "plain": there
            is no decay either and nothing is clipped.
        nesterov: the step is m * v + d instead of v; d is what was added to v. Default False.
        preset: "mlperf", "timm", "apex_larc", "lightning_bolts", "torch_optimizer", "simclr" or
            "default": other defaults for the options above.

    Raises:
        ValueError: an option is out of range, or a preset unknown.
        TypeError: a gradient is sparse; nothing was updated then.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {
        "momentum": 0.9,
        "weight_decay": 0.0,
        "trust_coefficient": 0.001,
        "eps": 1e-8,
        "exclude_1d": True,
        "adapt": "always",
        "norm_of": "gradient",
        "lr_in_momentum": True,
        "trust_clip": False,
        "zero_norm": "unit",
        "nesterov": False,
    }
    RANGES: ClassVar[dict[str, Range]] = {
        "lr": (lambda value: value >= 0, ">= 0"),
        "momentum": (lambda value: 0 <= value < 1, "in [0, 1)"),
        "weight_decay": (lambda value: value >= 0, ">= 0"),
        "trust_coefficient": (lambda value: value > 0, "> 0"),
        "eps": (lambda value: value >= 0, ">= 0"),
        "adapt": (lambda value: value in _ADAPT, "always, decayed or never"),
        "norm_of": (lambda value: value in _NORMS, "gradient, decayed or update"),
        "zero_norm": (lambda value: value in ("unit", "plain"), "unit or plain"),
    }
    BUFFERS = ("momentum_buffer",)

    keeps_norms: bool = True
    """Whether norms of large weights are kept from their last update instead of recomputed.

    A write that torch does not count (through .data, NumPy, or by another process) is detected, and
    its effect on the step is corrected, to within rounding if few elements changed.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        trust_coefficient: float | None = None,
        eps: float | None = None,
        *,
        exclude_1d: bool | None = None,
        adapt: str | None = None,
        norm_of: str | None = None,
        lr_in_momentum: bool | None = None,
        trust_clip: bool | None = None,
        zero_norm: str | None = None,
        nesterov: bool | None = None,
        preset: str = "default",
    ) -> None:
        if preset not in LARS_PRESETS:
            known = ", ".join(LARS_PRESETS)
            raise ValueError(f"LARS: no preset {preset!r}; choose one of {known}")
        given = {
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "exclude_1d": exclude_1d,
            "adapt": adapt,
            "norm_of": norm_of,
            "lr_in_momentum": lr_in_momentum,
            "trust_clip": trust_clip,
            "zero_norm": zero_norm,
            "nesterov": nesterov,
        }
        defaults = {**self.OPTIONS, **LARS_PRESETS[preset]}
        super().__init__(params, lr, with_defaults(defaults, given))
        self._kept: dict[int, _Kept] = {}  # by id(): tensors take long to hash

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "keeps_norms": self.keeps_norms}

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._kept = {}  # not saved

    def _make_state(self, weight: Tensor, group: dict[str, Any]) -> None:
        if group["momentum"] > 0:
            self._buffer(weight, "momentum_buffer")

    def _step_group(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        tables: dict[bool, tuple[list[Tensor], list[_Row]]] = {False: ([], []), True: ([], [])}
        has_momentum, exclude_1d = group["momentum"] > 0, group["exclude_1d"]
        for weight, grad in pairs:
            excluded = exclude_1d and weight.ndim < 2
            buffer = self._buffer(weight, "momentum_buffer") if has_momentum else None
            if not suits_the_kernel(weight, grad, buffer):
                _update(weight, grad, buffer, group, excluded)
                continue
            address, count = weight.data_ptr(), weight.numel()
            room = 0 if buffer is None else buffer.data_ptr()
            weights, rows = tables[excluded]
            weights.append(weight)
            rows.append((address, grad.data_ptr(), room, count, *self._known(weight, address)))
        for excluded, (weights, rows) in tables.items():
            if weights:
                rule = native_rule(group, excluded)
                found = _native.lars_step(rows, rule, torch.get_num_threads())
                for weight in weights:
                    torch.autograd.graph.increment_version(weight)
                self._keep(weights, rows, found)

    def _known(self, weight: Tensor, address: int) -> _Found:
        """Return the kept norm of a tensor, if torch has counted no write since."""
        kept = self._kept.get(id(weight))
        if kept is None or kept.weight is not weight:
            return 0.0, 0
        if kept.address != address or kept.version != weight._version:
            return 0.0, 0
        return kept.square, kept.sample

    def _keep(self, weights: list[Tensor], rows: list[_Row], found: list[_Found]) -> None:
        if not self.keeps_norms:
            return
        for weight, row, (square, sample) in zip(weights, rows, found, strict=True):
            if square and not weight.is_inference():  # inference tensors have no version
                self._kept[id(weight)] = _Kept(weight, row[0], weight._version, square, sample)


def suits_the_kernel(weight: Tensor, grad: Tensor, buffer: Tensor | None) -> bool:
    """Return whether all tensors are float32 in host memory, dense and in the same order."""
    other = weight if buffer is None else buffer
    if not (weight.dtype is grad.dtype is other.dtype is torch.float32):
        return False
    if not (weight.is_cpu and grad.is_cpu and other.is_cpu):
        return False
    if not (type(weight) in _PLAIN and type(grad) in _PLAIN):  # subclasses may differ
        return False
    if weight.is_contiguous():
        return grad.is_contiguous() and other.is_contiguous()
    return weight.stride() == grad.stride() == other.stride() and _is_dense(weight)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory in some order of the dimensions."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _adapts(group: dict[str, Any], excluded: bool) -> bool:
    if excluded or group["adapt"] == "never":
        return False
    return bool(group["adapt"] == "always" or group["weight_decay"] != 0)


def native_rule(group: dict[str, Any], excluded: bool) -> _native.LarsRule:
    """Return a group's options for the kernel; local. `excluded`: no decay and no scaling."""
    return _native.LarsRule(
        lr=float(group["lr"]),
        momentum=group["momentum"],
        weight_decay=0.0 if excluded else group["weight_decay"],
        trust_coefficient=group["trust_coefficient"],
        eps=group["eps"],
        adapt=_adapts(group, excluded),
        norm_of=_NORMS.index(group["norm_of"]),
        lr_in_momentum=group["lr_in_momentum"],
        clip=group["trust_clip"],
        plain_at_zero=group["zero_norm"] == "plain",
        nesterov=group["nesterov"],
    )


def _update(
    weight: Tensor, grad: Tensor, buffer: Tensor | None, group: dict[str, Any], excluded: bool
) -> None:
    """Do what the kernel does, on any device and for any dtype."""
    w = weight.to(wide_dtype(weight))
    d = grad.to(w.dtype)
    decay = 0.0 if excluded else group["weight_decay"]
    ratio: Tensor | float = 1.0
    on_update = group["norm_of"] == "update"
    if _adapts(group, excluded):
        decayed = d.add(w, alpha=decay)
        other = {"gradient": d, "decayed": decayed}.get(group["norm_of"])
        if other is None:
            other, _ = _momentum_step(buffer, decayed, group)
        ratio, zero = _trust_ratio(w, other, group)
        d = torch.where(zero, d, decayed) if group["zero_norm"] == "plain" else decayed
    elif decay:
        d = d.add(w, alpha=decay)
    rate = group["lr"]
    if group["lr_in_momentum"]:
        ratio, rate = ratio * rate, 1.0
    step, after = _momentum_step(buffer, d if on_update else d * ratio, group)
    if buffer is not None:
        buffer.copy_(after)
    w.sub_(step * (rate * ratio) if on_update else step * rate)
    if w is not weight:  # w is a float32 copy of 16-bit weights
        weight.copy_(w)


def _momentum_step(
    buffer: Tensor | None, d: Tensor, group: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if buffer is None:
        return d, d
    after = buffer * group["momentum"] + d
    return (after * group["momentum"] + d if group["nesterov"] else after), after


def _trust_ratio(w: Tensor, other: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the ratio, and whether a norm is 0."""
    w_norm = torch.linalg.vector_norm(w)
    other_norm = torch.linalg.vector_norm(other)
    decay = group["weight_decay"] if group["norm_of"] == "gradient" else 0.0
    ratio = group["trust_coefficient"] * w_norm / (other_norm + decay * w_norm + group["eps"])
    zero = ~((w_norm > 0) & (other_norm > 0))
    ratio = torch.where(zero, 1.0, ratio)
    if group["trust_clip"]:
        clipped = torch.clamp(ratio / group["lr"], max=1.0)
        ratio = torch.where(zero, 1.0, clipped) if group["zero_norm"] == "plain" else clipped
    return ratio, zero
