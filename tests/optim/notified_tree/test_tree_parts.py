"""What a NotifiedTree sends as one: every element of every layer once, in the order of memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hsgd import Comm, NotifiedWindow
from hsgd.optim.notified_tree.tree_parts import in_order_of, layers_of, parts_of
from ranks import meeting_point
from test_tree import Folded

__all__: list[str] = []


@pytest.mark.parametrize("part_bytes", [0, 1, 64, 100, 4096, None])
def test_parts_are_all_of_a_layer_in_the_order_of_its_memory(part_bytes: int | None) -> None:
    net = nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 1), nn.Linear(4, 4).double(), Folded())
    layers = layers_of(net)
    parts = parts_of(layers, part_bytes)
    assert [part.index for part in parts] == list(range(len(parts)))
    assert [part.layer for part in parts] == sorted(part.layer for part in parts)
    assert {part.layer for part in parts} == set(range(len(layers)))
    for layer in layers:
        own = [part for part in parts if part.layer == layer.index]
        assert len(own) == 1 or (part_bytes and layer.parameters[0].dtype is torch.float32)
        stretches = [stretch for part in own for stretch in part.stretches]
        for index, parameter in enumerate(layer.parameters):
            bounds = [(s.begin, s.end) for s in stretches if s.index == index]
            assert bounds[0][0] == 0 and bounds[-1][1] == parameter.numel()
            assert all(one[1] == two[0] for one, two in itertools.pairwise(bounds))
            assert all(begin % 16 == 0 for begin, _ in bounds)
        if part_bytes and len(own) > 1:
            sizes = [sum(stretch.bytes for stretch in part.stretches) for part in own]
            assert max(sizes) <= max(part_bytes + 63, 64)


def test_a_stretch_finds_its_elements_in_tensors_of_other_strides() -> None:
    parameter = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    (layer,) = layers_of(nn.ParameterList([parameter]))
    for part in parts_of([layer], 64):
        (stretch,) = part.stretches
        mine = stretch.of(parameter.detach())
        other = stretch.of(in_order_of(parameter.detach().contiguous(), parameter))
        assert torch.equal(mine, other) and mine.numel() == stretch.bytes // 4 == 16


def test_parts_of_large_models_grow_with_them() -> None:
    wide = nn.Linear(1 << 14, 1 << 14, bias=False, device="meta")  # 1 GB
    parts = parts_of(layers_of(wide), None)
    assert 500 < len(parts) < 1000
    small = parts_of(layers_of(nn.Linear(256, 250, bias=False)), None)
    assert len(small) == 1  # a layer below the usual size is not cut


@pytest.mark.parametrize(
    ("numbers", "message"),
    [([(0, 1, 99)], "layer 0: dtype 99 is unknown"), (None, "there are no layers")],
)
def test_layers_that_cannot_be_are_refused_before_a_thread_meets_them(
    numbers: list[tuple[int, int, int]] | None, message: str
) -> None:
    from hsgd import _native

    options = _native.TreeOptions(
        divisor=1.0, whole_step=False, stop_slot=0, given_up=1 << 62, reason_bytes=0
    )
    here = (1, 0, 0)  # slot, memory, offset
    layers = []
    if numbers is not None:
        layers.append(
            _native.TreeLayer(
                numbers=numbers, flags=1, gradients=[here], up=[], weights=here, down=[]
            )
        )
    with (
        Comm.local(meeting_point(), 0, 1) as comm,
        NotifiedWindow(comm, 64, 2) as window,
        pytest.raises(ValueError, match=message),
    ):
        window.make_tree(layers, options)
