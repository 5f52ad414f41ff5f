"""LAMB against a float64 NumPy transcription of its algorithm, and against Adam."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from hsgd.optim import LAMB

__all__: list[str] = []

SHAPES = [(7, 5), (5,), (3, 2, 3, 3), (4, 4)]
STEPS = 30


def arrays(seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in SHAPES]


def tensors_of(seed: int, dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(array, dtype=dtype)) for array in arrays(seed)]


def set_gradients(tensors: list[nn.Parameter], seed: int) -> None:
    for tensor, gradient in zip(tensors, arrays(seed), strict=True):
        tensor.grad = torch.tensor(gradient, dtype=tensor.dtype)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_thirty_steps_match_the_algorithm(
    dtype: torch.dtype, bound: float, bias_correction: bool
) -> None:
    tensors = tensors_of(0, dtype)
    optimizer = LAMB(tensors, lr=0.01, weight_decay=0.1, bias_correction=bias_correction)
    ws = arrays(0)
    ms, vs = ([np.zeros_like(w) for w in ws] for _ in range(2))
    for step in range(1, STEPS + 1):
        lr = optimizer.param_groups[0]["lr"] = 0.01 * step / STEPS
        set_gradients(tensors, step)
        optimizer.step()
        for w, m, v, g in zip(ws, ms, vs, arrays(step), strict=True):
            m[...] = 0.9 * m + 0.1 * g
            v[...] = 0.999 * v + 0.001 * g * g
            first, second = (1 - 0.9**step, 1 - 0.999**step) if bias_correction else (1, 1)
            r = (m / first) / (np.sqrt(v / second) + 1e-6)
            ratio = 1.0
            if w.ndim > 1:
                r = r + 0.1 * w
                ratio = float(np.linalg.norm(w) / np.linalg.norm(r))
            w -= lr * ratio * r
    for tensor, w in zip(tensors, ws, strict=True):
        difference = np.linalg.norm(tensor.detach().double().numpy() - w)
        assert difference < bound * np.linalg.norm(w)


def test_excluded_tensors_take_the_steps_of_adam() -> None:
    (bias,), (twin,) = ([nn.Parameter(torch.ones(9, dtype=torch.float64))] for _ in range(2))
    lamb = LAMB([bias], lr=0.1, eps=1e-8, weight_decay=0.5)
    adam = torch.optim.Adam([twin], lr=0.1, eps=1e-8, foreach=False)
    for step in range(STEPS):
        gradient = torch.tensor(np.random.default_rng(step).standard_normal(9))
        for tensor, optimizer in ((bias, lamb), (twin, adam)):
            tensor.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(bias, twin, rtol=1e-12, atol=1e-12)


def test_a_tensor_of_zeros_starts_with_a_ratio_of_one() -> None:
    tensor = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
    tensor.grad = torch.ones(3, 3, dtype=torch.float64)
    LAMB([tensor], lr=0.5, eps=0.0).step()
    torch.testing.assert_close(tensor.detach(), torch.full((3, 3), -0.5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_continues_bitwise(dtype: torch.dtype) -> None:
    tensors, resumed_tensors = tensors_of(0, dtype), tensors_of(0, dtype)
    optimizer, resumed = LAMB(tensors, lr=0.01), LAMB(resumed_tensors, lr=9.0)
    for step in range(6):
        if step == 3:
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            with torch.no_grad():
                for old, new in zip(tensors, resumed_tensors, strict=True):
                    new.copy_(old)
        for these, target in ((tensors, optimizer), (resumed_tensors, resumed)):
            set_gradients(these, step)
            target.step()
    for old, new in zip(tensors, resumed_tensors, strict=True):
        assert torch.equal(old, new)
        assert resumed.state[new]["exp_avg"].dtype == torch.float32


def test_a_copy_takes_the_same_steps() -> None:
    tensors = tensors_of(0, torch.float32)
    optimizer = LAMB(tensors, lr=0.01, weight_decay=0.1)
    set_gradients(tensors, 0)
    optimizer.step()
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for step in range(1, 4):
        for each in (optimizer, *twins):
            set_gradients(each.param_groups[0]["params"], step)
            each.step()
    for twin in twins:
        for mine, other in zip(tensors, twin.param_groups[0]["params"], strict=True):
            assert mine is not other and torch.equal(mine, other)


def test_options_out_of_range_are_refused_with_their_value() -> None:
    tensors = tensors_of(0, torch.float32)
    with pytest.raises(ValueError, match=r"^LAMB: betas is \(0.9, 1.0\); it must be in \[0, 1\)"):
        LAMB(tensors, lr=0.1, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"^LAMB: lr is -1; it must be >= 0$"):
        LAMB(tensors, lr=-1)


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = LAMB(embedding.parameters(), lr=1.0)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(TypeError, match=r"^LAMB: parameter 0 of group 0"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)
    assert optimizer.state[embedding.weight]["step"] == 0
