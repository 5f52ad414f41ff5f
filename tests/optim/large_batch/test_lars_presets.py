"""The presets of LARS against the implementations that they stand for, over 50 steps.

torch-optimizer is installed and runs itself; the others are transcribed below in float64 NumPy, one
function per implementation, in its own order of operations and with its own names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch_optimizer
from torch import nn

from hsgd.optim import LARS
from hsgd.optim.large_batch.lars_presets import LARS_PRESETS

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("one_thread")

Array = npt.NDArray[np.float64]
STEPS = 50
SHAPES = [(9, 5), (6,), (4, 3, 3, 3), (257, 257), (4, 4), (5, 2)]
NO_WEIGHTS, NO_GRADIENT = 4, 5  # tensors whose norm is 0 at first


def norm(x: Array) -> float:
    return float(np.sqrt((x * x).sum()))


def sgd(w: Array, d: Array, state: dict[str, Array], lr: float, m: float, nesterov: bool) -> None:
    """torch.optim.SGD without decay or dampening."""
    if m:
        state["v"] = m * state["v"] + d if "v" in state else d.copy()
        d = d + m * state["v"] if nesterov else state["v"]
    w -= lr * d


def mlperf(w: Array, g: Array, state: dict[str, Array], lr: float, o: dict[str, Any]) -> None:
    """LARSOptimizer of the MLPerf reference, with Keras's momentum: the buffer is negative."""
    scaled_lr, decay = lr, 0.0
    if w.ndim > 1:  # not in its skip list
        w_norm, g_norm, decay = norm(w), norm(g), o["weight_decay"]
        if w_norm > 0 and g_norm > 0:
            scaled_lr = lr * 0.001 * w_norm / (g_norm + decay * w_norm + 0.0)
    g = g + decay * w
    accum = state.get("v", np.zeros_like(w)) * o["momentum"] - g * scaled_lr
    state["v"] = accum
    w += accum * o["momentum"] - g * scaled_lr if o["nesterov"] else accum


def timm(w: Array, g: Array, state: dict[str, Array], lr: float, o: dict[str, Any]) -> None:
    """timm.optim.Lars."""
    decay = o["weight_decay"]
    if decay != 0 or o.get("adapt") == "always":
        w_norm, g_norm = norm(w), norm(g)
        ratio = 0.001 * w_norm / (g_norm + w_norm * decay + 1e-8)
        ratio = (ratio if g_norm > 0 else 1.0) if w_norm > 0 else 1.0
        if o.get("trust_clip"):
            ratio = min(ratio / lr, 1.0)
        g = (g + decay * w) * ratio
    sgd(w, g, state, lr, o["momentum"], o["nesterov"])


def apex_larc(w: Array, g: Array, state: dict[str, Array], lr: float, o: dict[str, Any]) -> None:
    """apex.parallel.LARC around SGD."""
    param_norm, grad_norm, decay = norm(w), norm(g), o["weight_decay"]
    if param_norm != 0 and grad_norm != 0:
        adaptive_lr = 0.02 * param_norm / (grad_norm + param_norm * decay + 1e-8)
        if o.get("trust_clip", True):
            adaptive_lr = min(adaptive_lr / lr, 1)
        g = (g + decay * w) * adaptive_lr
    sgd(w, g, state, lr, o["momentum"], o["nesterov"])


def lightning_bolts(
    w: Array, g: Array, state: dict[str, Array], lr: float, o: dict[str, Any]
) -> None:
    """pl_bolts.optimizers.LARS."""
    decay = o["weight_decay"]
    if decay != 0:
        p_norm, g_norm = norm(w), norm(g)
        if p_norm * g_norm > 0:
            g = (g + w * decay) * (p_norm / (g_norm + p_norm * decay + 1e-8) * 0.001)
    sgd(w, g, state, lr, o["momentum"], o["nesterov"])


def simclr(w: Array, g: Array, state: dict[str, Array], lr: float, o: dict[str, Any]) -> None:
    """LARSOptimizer of google-research/simclr; its lists name biases and normalization."""
    listed = w.ndim < 2
    if not listed:
        g = g + o["weight_decay"] * w
    v = state.get("v", np.zeros_like(w))
    ratio = 1.0
    if o.get("norm_of") != "update":  # classic momentum
        if not listed and norm(w) > 0 and norm(g) > 0:
            ratio = 0.001 * norm(w) / norm(g)
        scaled_lr = lr * ratio
        v = o["momentum"] * v + scaled_lr * g
        w -= o["momentum"] * v + scaled_lr * g if o["nesterov"] else v
    else:
        v = o["momentum"] * v + g
        update = o["momentum"] * v + g if o["nesterov"] else v
        if not listed and norm(w) > 0 and norm(update) > 0:
            ratio = 0.001 * norm(w) / norm(update)
        w -= lr * ratio * update
    state["v"] = v


TRANSCRIBED: dict[str, Callable[..., None]] = {
    "mlperf": mlperf,
    "timm": timm,
    "apex_larc": apex_larc,
    "lightning_bolts": lightning_bolts,
    "simclr": simclr,
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "timm": [{"trust_clip": True}, {"adapt": "always"}],
    "apex_larc": [{"trust_clip": False}],
    "simclr": [{"norm_of": "update"}],
}
CASES = [
    (preset, {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov, **variant})
    for preset in [*TRANSCRIBED, "torch_optimizer"]
    for variant in [{}, *VARIANTS.get(preset, [])]
    for momentum, nesterov, decay in (
        (0.9, False, 0.01),
        (0.9, True, 0.01),
        (0.0, False, 0.01),
        (0.9, False, 0.0),
    )
    if momentum or preset not in ("mlperf", "simclr")  # these always have momentum
]


def learning_rate(step: int) -> float:
    """Warm up, then decay: never twice the same."""
    return 0.02 * (step + 1) if step < 10 else 0.2 * (1 - (step - 9) / 60) ** 2


def weights() -> list[Array]:
    draw = np.random.default_rng(1)
    arrays = [draw.standard_normal(shape) for shape in SHAPES]
    arrays[NO_WEIGHTS][...] = 0
    return arrays


@functools.cache
def gradients(step: int) -> list[Array]:
    draw = np.random.default_rng(100 + step)
    arrays = [draw.standard_normal(shape) for shape in SHAPES]
    arrays[NO_GRADIENT] *= step % 3 != 0
    for array in arrays:
        array.flags.writeable = False
    return arrays


@functools.cache
def grads(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.tensor(gradient, dtype=dtype) for gradient in gradients(step)]


def train(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter]) -> None:
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        for tensor, gradient in zip(tensors, grads(step, tensors[0].dtype), strict=True):
            tensor.grad = gradient
        optimizer.step()


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(array, dtype=dtype)) for array in weights()]


@functools.cache
def expected_for(case: int) -> list[Array]:
    return expected(*CASES[case])


def expected(preset: str, options: dict[str, Any]) -> list[Array]:
    if preset == "torch_optimizer":
        tensors = parameters(torch.float64)
        train(torch_optimizer.LARS(tensors, lr=1.0, trust_coefficient=0.01, **options), tensors)
        return [tensor.detach().numpy() for tensor in tensors]
    arrays = weights()
    states: list[dict[str, Array]] = [{} for _ in arrays]
    for step in range(STEPS):
        for w, g, state in zip(arrays, gradients(step), states, strict=True):
            TRANSCRIBED[preset](w, g, state, learning_rate(step), options)
    return arrays


# float32 takes the native kernel, float64 torch's operations
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_a_preset_takes_the_steps_of_its_implementation(
    case: int, dtype: torch.dtype, bound: float
) -> None:
    preset, options = CASES[case]
    tensors = parameters(dtype)
    train(LARS(tensors, lr=1.0, preset=preset, **options), tensors)
    for tensor, reference in zip(tensors, expected_for(case), strict=True):
        difference = norm(tensor.detach().double().numpy() - reference)
        assert difference <= bound * norm(reference)


def test_every_preset_is_tested() -> None:
    assert {preset for preset, _ in CASES} | {"default"} == set(LARS_PRESETS)


def test_an_unknown_preset_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ValueError, match="no preset 'larc'; choose one of default, mlperf, timm"):
        LARS(parameters(torch.float32), lr=1.0, preset="larc")


def test_what_is_given_overrides_the_preset() -> None:
    group = LARS(parameters(torch.float32), lr=1.0, preset="apex_larc", eps=0.5).param_groups[0]
    assert group["eps"] == 0.5
    assert group["trust_coefficient"] == 0.02
