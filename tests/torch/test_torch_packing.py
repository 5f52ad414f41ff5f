"""Gradients of any form lie in one flat array after packing, and are views of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hsgd.torch.gradients.packing import HOT_COUNT, Packing

__all__: list[str] = []


def parameters() -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(3,), (2, 2), (), (5,), (HOT_COUNT,), (1,), (0,)]
    created = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    wide = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    return [*created, wide.requires_grad_(), torch.zeros(4, 2).t().detach().requires_grad_()]


def packed() -> tuple[list[Tensor], Tensor, Packing]:
    ours = parameters()
    flat = torch.full((sum(p.numel() for p in ours),), -1.0)
    return ours, flat, Packing(ours, flat)


def gradients(ours: list[Tensor]) -> list[Tensor]:
    return [torch.randn(p.shape) for p in ours]


def check(ours: list[Tensor], expected: list[Tensor], flat: Tensor, packing: Packing) -> None:
    for parameter, value, view in zip(ours, expected, packing.views, strict=True):
        assert parameter.grad is view and torch.equal(view, value)
        assert view.stride() == parameter.stride()
    together = torch.cat([value.reshape(-1) for value in expected])
    assert torch.equal(flat.sort().values, together.sort().values)


def test_new_gradients_become_views_with_their_values() -> None:
    ours, flat, packing = packed()
    for _ in range(2):
        expected = gradients(ours)
        for parameter, value in zip(ours, expected, strict=True):
            parameter.grad = value
        packing.pack()
        check(ours, expected, flat, packing)
        packing.pack()  # views already
        check(ours, expected, flat, packing)


@pytest.mark.parametrize("number", [0, 3, 5])
@pytest.mark.parametrize("what", ["a view", "none", "sparse", "with a history"])
def test_an_unlike_gradient_among_vectors_is_no_exception(number: int, what: str) -> None:
    ours, flat, packing = packed()
    expected = gradients(ours)
    for parameter, value in zip(ours, expected, strict=True):
        parameter.grad = value
    if what == "a view":
        packing.adopt(number)
    elif what == "none":
        ours[number].grad = None
        expected[number] = torch.zeros_like(ours[number])
    elif what == "sparse":
        ours[number].grad = expected[number].to_sparse()
    else:
        ours[number].grad = expected[number].clone().requires_grad_() * 1.0
    packing.pack()
    check(ours, [value.detach() for value in expected], flat, packing)
    assert [p is ours[number] for p in packing.sparse] == [True] * (what == "sparse")


def test_a_frozen_parameter_adds_zeros_and_stays_without() -> None:
    ours, _flat, packing = packed()
    ours[3].requires_grad_(False)
    for parameter, value in zip(ours, gradients(ours), strict=True):
        parameter.grad = value if parameter.requires_grad else None
    packing.pack()
    assert ours[3].grad is None and not packing.views[3].any()


def test_released_gradients_keep_their_values_in_memory_of_their_own() -> None:
    ours, flat, packing = packed()
    expected = gradients(ours)
    for parameter, value in zip(ours, expected, strict=True):
        parameter.grad = value
    packing.pack()
    packing.release(keep=True)
    flat.zero_()
    for parameter, value in zip(ours, expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, value)


def test_forgotten_gradients_leave_only_the_array() -> None:
    ours, _flat, packing = packed()
    for parameter, value in zip(ours, gradients(ours), strict=True):
        parameter.grad = value
    packing.pack()
    own = torch.ones_like(ours[0])
    ours[0].grad = own
    packing.release(keep=False)
    assert ours[0].grad is own and [p.grad for p in ours[1:]] == [None] * len(ours[1:])
