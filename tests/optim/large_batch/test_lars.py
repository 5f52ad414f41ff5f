"""LARS against a float64 NumPy transcription of its formula, and the torch optimizer contract."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from hsgd.optim import LARS

Array = npt.NDArray[np.float64]
SHAPES = [(7, 5), (5,), (3, 2, 3, 3), (1,), (11, 1)]
STEPS = 50


def learning_rate(step: int) -> float:
    """Warm up, then decay: never twice the same."""
    return 3.0 * (step + 1) / 10 if step < 10 else 3.0 * float(np.cos(0.03 * (step - 10)))


def random_arrays(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Array]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in shapes]


def reference_step(
    w: Array, v: Array, g: Array, lr: float, m: float, b: float, e: float, eps: float, scaled: bool
) -> tuple[Array, Array]:
    """One step of the formula in the docstring of LARS, in float64."""
    trust = 1.0
    if scaled:
        w_norm, g_norm = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
        if w_norm > 0 and g_norm > 0:
            trust = e * w_norm / (g_norm + b * w_norm + eps)
    v = m * v + lr * trust * (g + (b if scaled else 0.0) * w)
    return w - v, v


def set_gradients(tensors: Sequence[Tensor], gradients: Sequence[Array]) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = torch.tensor(gradient, dtype=tensor.dtype)


def parameters(arrays: Sequence[Array], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(array, dtype=dtype)) for array in arrays]


def relative_error(actual: Tensor, expected: Array) -> float:
    difference = actual.detach().double().numpy() - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def test_fifty_steps_with_a_changing_learning_rate_match_numpy() -> None:
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        for exclude_1d in (True, False):
            options = {
                "momentum": 0.9,
                "weight_decay": 0.01,
                "trust_coefficient": 0.02,
                "eps": 1e-6,
            }
            m, b, e, eps = options.values()
            ws = random_arrays(0)
            vs = [np.zeros_like(w) for w in ws]
            tensors = parameters(ws, dtype)
            optimizer = LARS(tensors, lr=1.0, **options, exclude_1d=exclude_1d)
            for step in range(STEPS):
                gradients = random_arrays(step + 1)
                lr = optimizer.param_groups[0]["lr"] = learning_rate(step) / 10
                set_gradients(tensors, gradients)
                optimizer.step()
                for i, g in enumerate(gradients):
                    scaled = ws[i].ndim >= 2 or not exclude_1d
                    ws[i], vs[i] = reference_step(ws[i], vs[i], g, lr, m, b, e, eps, scaled)
            for tensor, w, v in zip(tensors, ws, vs, strict=True):
                assert relative_error(tensor, w) < bound
                assert relative_error(optimizer.state[tensor]["momentum_buffer"], v) < bound


def test_the_default_options_are_those_of_the_documentation() -> None:
    group = LARS(parameters(random_arrays(0)), lr=0.5).param_groups[0]
    del group["params"]
    assert group == {
        "lr": 0.5,
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


def test_excluded_tensors_take_steps_of_sgd_with_momentum() -> None:
    bias, twin = parameters(random_arrays(0, [(13,), (13,)]), torch.float64)
    with torch.no_grad():
        twin.copy_(bias)
    lars = LARS([bias], lr=0.1, momentum=0.8, weight_decay=0.5)
    sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.8, foreach=False)
    for step in range(STEPS):
        for tensor in (bias, twin):
            set_gradients([tensor], random_arrays(step, [(13,)]))
        lars.step()
        sgd.step()
    torch.testing.assert_close(bias, twin, rtol=1e-13, atol=1e-13)


def test_a_group_can_override_the_exclusion_and_every_other_option() -> None:
    ws, g = random_arrays(0, [(4,), (4,)]), random_arrays(1, [(4,)])[0]
    first, second = parameters(ws, torch.float64)
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": [second], "exclude_1d": False, "lr": 2.0, "weight_decay": 0.1, "momentum": 0.0},
    ]
    optimizer = LARS(groups, lr=1.0, momentum=0.9, weight_decay=0.3)
    set_gradients([first, second], [g, g])
    optimizer.step()
    zero = np.zeros(4)
    expected = reference_step(ws[0], zero, g, 1.0, 0.9, 0.3, 0.001, 1e-8, scaled=False)[0]
    assert relative_error(first, expected) < 1e-14
    expected = reference_step(ws[1], zero, g, 2.0, 0.0, 0.1, 0.001, 1e-8, scaled=True)[0]
    assert relative_error(second, expected) < 1e-14
    assert second not in optimizer.state


def test_zero_weights_or_zero_gradients_have_a_trust_ratio_of_one() -> None:
    w, g = random_arrays(3, [(3, 4), (3, 4)])
    zero = np.zeros((3, 4))
    for start, gradient in ((zero, g), (w, zero), (zero, zero)):
        (tensor,) = parameters([start], torch.float64)
        optimizer = LARS([tensor], lr=0.1, weight_decay=0.2, eps=0.0)
        set_gradients([tensor], [gradient])
        optimizer.step()
        expected = start - 0.1 * (gradient + 0.2 * start)
        np.testing.assert_allclose(tensor.detach().numpy(), expected, rtol=1e-14)


def test_an_empty_tensor_stays_empty() -> None:
    (tensor,) = parameters([np.zeros((0, 3))])
    optimizer = LARS([tensor], lr=1.0)
    tensor.grad = torch.zeros(0, 3)
    optimizer.step()
    assert tensor.shape == (0, 3)


def test_sixteen_bit_tensors_are_computed_in_float32_and_rounded_once() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        # Norms above 65504, the largest float16; and steps far below the resolution of 16 bits.
        w = np.full((64, 64), 2048.0)
        g = np.full((64, 64), 1024.0)
        (tensor,) = parameters([w], dtype)
        optimizer = LARS([tensor], lr=1.0, trust_coefficient=1e-3)
        buffer = optimizer.state[tensor]["momentum_buffer"]
        assert buffer.dtype == torch.float32
        v = np.zeros_like(w)
        for _ in range(3):
            set_gradients([tensor], [g])
            before = tensor.detach().double().numpy()
            optimizer.step()
            expected, v = reference_step(before, v, g, 1.0, 0.9, 0.0, 1e-3, 1e-8, scaled=True)
            assert torch.equal(tensor.detach(), torch.tensor(expected).to(dtype))
        assert relative_error(buffer, v) < 1e-6


def test_a_loaded_state_continues_bitwise_as_if_nothing_had_happened() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensors = parameters(random_arrays(0), dtype)
        optimizer = LARS(tensors, lr=1.0, weight_decay=0.01, trust_coefficient=0.02)
        resumed_tensors = parameters(random_arrays(5), dtype)
        resumed = LARS(resumed_tensors, lr=9.0)
        for step in range(6):
            if step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                resumed.load_state_dict(saved)
                with torch.no_grad():
                    for old, new in zip(tensors, resumed_tensors, strict=True):
                        new.copy_(old)
            for these, target in ((tensors, optimizer), (resumed_tensors, resumed)):
                set_gradients(these, random_arrays(step + 1))
                target.param_groups[0]["lr"] = learning_rate(step)
                target.step()
        for old, new in zip(tensors, resumed_tensors, strict=True):
            assert torch.equal(old, new)
            expected = optimizer.state[old]["momentum_buffer"]
            assert torch.equal(resumed.state[new]["momentum_buffer"], expected)
        assert resumed.param_groups[0]["weight_decay"] == 0.01


def test_a_loaded_state_shares_no_memory_with_its_source() -> None:
    tensors = parameters(random_arrays(0))
    optimizer = LARS(tensors, lr=1.0)
    saved = optimizer.state_dict()
    other = LARS(parameters(random_arrays(0)), lr=1.0)
    other.load_state_dict(saved)
    other.state[other.param_groups[0]["params"][0]]["momentum_buffer"].fill_(7)
    assert not optimizer.state[tensors[0]]["momentum_buffer"].any()


def test_a_copy_made_from_the_param_groups_alone_takes_the_same_steps() -> None:
    """Horovod's DistributedOptimizer is such a copy: a subclass, given only param_groups."""
    tensors = parameters(random_arrays(0))
    source = LARS(tensors, lr=0.7, weight_decay=0.1, exclude_1d=False)
    wrapper = type("LARS", (LARS,), {})(source.param_groups)
    for name in ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "exclude_1d"):
        assert wrapper.param_groups[0][name] == source.param_groups[0][name]
    before = [tensor.detach().clone() for tensor in tensors]
    set_gradients(tensors, random_arrays(1))
    wrapper.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, tensors, strict=True))


def test_state_exists_before_the_first_step() -> None:
    """So that Horovod's broadcast_optimizer_state takes no step with zero gradients of its own."""
    tensors = parameters(random_arrays(0))
    tensors[1].requires_grad_(False)
    optimizer = LARS(tensors, lr=1.0)
    assert sorted(optimizer.state_dict()["state"]) == [0, 2, 3, 4]
    tensors[1].requires_grad_(True)
    set_gradients(tensors, random_arrays(1))
    optimizer.step()
    assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2, 3, 4]


def test_parameters_without_gradient_are_left_alone() -> None:
    tensors = parameters(random_arrays(0))
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer = LARS(tensors, lr=1.0, weight_decay=0.1)
    set_gradients(tensors[:1], random_arrays(1)[:1])
    optimizer.step()
    changed = [not torch.equal(old, new) for old, new in zip(before, tensors, strict=True)]
    assert changed == [True, False, False, False, False]


def test_a_scheduler_changes_the_learning_rate_of_each_group() -> None:
    tensors = parameters(random_arrays(0))
    groups: list[dict[str, Any]] = [{"params": tensors[:2]}, {"params": tensors[2:], "lr": 1.0}]
    optimizer = LARS(groups, lr=2.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[4.0, 8.0], total_steps=20, base_momentum=0.5, max_momentum=0.9
    )
    rates = []
    for step in range(10):
        set_gradients(tensors, random_arrays(step))
        optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert all(second == pytest.approx(2 * first) for first, second in rates)
    assert any(later != earlier for earlier, later in pairwise(rates))


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    (tensor,) = parameters(random_arrays(0, [(3, 3)]))
    optimizer = LARS([tensor], lr=1.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (tensor**2).sum()
        loss.backward()
        return loss.item()

    expected = float((tensor.detach() ** 2).sum())
    before = tensor.detach().clone()
    assert optimizer.step(closure) == expected
    assert not torch.equal(before, tensor)
    assert optimizer.step() is None


def test_named_parameters_and_strided_views_are_accepted() -> None:
    model = nn.Linear(4, 3)
    weight = model.weight.detach().clone()
    model.weight = nn.Parameter(weight.t().contiguous().t())
    assert not model.weight.is_contiguous()
    optimizer = LARS(model.named_parameters(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    gradient = model.weight.grad.double().numpy()
    w, zero = weight.double().numpy(), np.zeros((3, 4))
    optimizer.step()
    expected = reference_step(w, zero, gradient, 1.0, 0.9, 0.0, 0.001, 1e-8, scaled=True)[0]
    assert relative_error(model.weight, expected) < 1e-6


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    dense, embedding = nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)
    optimizer = LARS([*dense.parameters(), *embedding.parameters()], lr=1.0)
    before = dense.weight.detach().clone()
    dense(embedding(torch.tensor([1, 3]))).sum().backward()
    message = r"^LARS: parameter 2 of group 0, shape \(5, 2\), has a sparse gradient; make it dense"
    with pytest.raises(TypeError, match=message):
        optimizer.step()
    assert torch.equal(dense.weight, before)


def test_options_out_of_range_are_refused_with_their_value() -> None:
    tensors = parameters(random_arrays(0))
    bad = [
        ("lr", -0.1, ">= 0"),
        ("lr", float("nan"), ">= 0"),
        ("momentum", 1.0, r"in \[0, 1\)"),
        ("momentum", -0.5, r"in \[0, 1\)"),
        ("weight_decay", -1e-4, ">= 0"),
        ("trust_coefficient", 0.0, "> 0"),
        ("eps", -1e-8, ">= 0"),
    ]
    for name, value, wanted in bad:
        message = f"^LARS: {name} is {value}; it must be {wanted}$"
        with pytest.raises(ValueError, match=message):
            LARS(tensors, **{"lr": 1.0, name: value})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            LARS([{"params": tensors, name: value}], lr=1.0)
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        LARS(tensors)


LARGE = (300, 300)  # enough for the norm of the weights to be kept from step to step


def write_by_torch(weight: Tensor) -> None:
    with torch.no_grad():
        weight[7] = 3.0


def write_all_through_data(weight: Tensor) -> None:
    weight.data.mul_(0.5)


def write_a_row_through_data(weight: Tensor) -> None:
    weight.data[7] = 3.0


def write_a_row_through_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[7] = 3.0


def swap_data_and_back(weight: Tensor) -> None:
    kept = weight.data
    weight.data = torch.zeros_like(kept)
    weight.data = kept


def assign_data(weight: Tensor) -> None:
    weight.data = 2 * weight.data


@pytest.mark.parametrize(
    ("write", "bound"),
    [
        (lambda weight: None, 0.0),
        (write_by_torch, 0.0),
        (write_all_through_data, 0.0),
        (swap_data_and_back, 0.0),
        (assign_data, 0.0),
        (write_a_row_through_data, 1e-6),
        (write_a_row_through_numpy, 1e-6),
    ],
)
@pytest.mark.parametrize("preset", ["default", "timm", "apex_larc"])
def test_a_write_between_two_steps_counts(
    write: Callable[[Tensor], None], bound: float, preset: str
) -> None:
    """Against an optimizer that reads all norms anew: a copy, which has the state alone."""
    options = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02}
    (tensor,) = parameters(random_arrays(0, [LARGE]))
    optimizer = LARS([tensor], preset=preset, **options)
    for step in range(4):
        (twin,) = parameters([tensor.detach().double().numpy()])
        write(twin)
        fresh = LARS([twin], preset=preset, **options)
        fresh.load_state_dict(optimizer.state_dict())
        write(tensor)
        for parameter, source in ((tensor, optimizer), (twin, fresh)):
            set_gradients([parameter], random_arrays(step, [LARGE]))
            source.step()
        error = (tensor.detach() - twin.detach()).norm() / twin.detach().norm()
        assert float(error) <= bound


def test_norms_that_are_kept_are_no_part_of_a_copy() -> None:
    (tensor,) = parameters(random_arrays(0, [LARGE]))
    optimizer = LARS([tensor], lr=0.5)
    set_gradients([tensor], random_arrays(1, [LARGE]))
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    other.data[7] = tensor.data[7] = 3.0
    set_gradients([tensor, other], random_arrays(2, [LARGE]) * 2)
    optimizer.step()
    twin.step()
    torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-7)
    assert pickle.loads(pickle.dumps(optimizer)).state_dict().keys() == {"state", "param_groups"}


def pickled(optimizer: LARS) -> LARS:
    return pickle.loads(pickle.dumps(optimizer))  # type: ignore[no-any-return]


@pytest.mark.parametrize("keeps_norms", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_takes_the_same_steps_and_keeps_its_settings(
    copied: Callable[[LARS], LARS], keeps_norms: bool
) -> None:
    shapes = [*SHAPES, LARGE]
    tensors = parameters(random_arrays(0, shapes))
    optimizer = LARS(tensors, lr=0.5, weight_decay=0.1, preset="timm")
    optimizer.keeps_norms = keeps_norms
    for step in range(6):
        if step == 3:
            twin = copied(optimizer)
            others = twin.param_groups[0]["params"]
        set_gradients(tensors, random_arrays(step, shapes))
        optimizer.step()
        if step >= 3:
            set_gradients(others, random_arrays(step, shapes))
            twin.step()
    assert twin.keeps_norms is keeps_norms
    for mine, other in zip(tensors, others, strict=True):
        assert mine is not other and torch.equal(mine, other)
