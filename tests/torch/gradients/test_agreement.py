"""What ranks agree on before a DistributedOptimizer's buckets are made: rank 0's order and overlap,
and the same parameters. It takes some bytes for each parameter, not for each parameter and rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hsgd.metrics import Counters
from hsgd.torch.gradients.agreement import agree
from outcomes import told_by
from ranks import Ranks, Seat, meeting_point

__all__: list[str] = []

SIZE = 3
MOST_RANKS = SIZE
ORDERS = [["b", "a", "c"], ["a", "b", "c"], ["c", "b", "a"]]


def agreed(seat: Seat, path: str, sparse_on: int, as_dense: bool) -> Any:
    names = {torch.ones(2, requires_grad=True): name for name in ORDERS[seat.rank]}
    for parameter, name in names.items():
        if name == "a" and seat.rank == sparse_on:
            parameter.grad = torch.ones(2).to_sparse()
    overlap = ("never", "auto", "always")[seat.rank]
    comm = seat.comm(path, SIZE)
    dense, sparse, chosen = agree(comm, names, overlap, {}, sparse_as_dense=as_dense)
    return [names[each] for each in dense], [names[each] for each in sparse], chosen


@pytest.mark.parametrize(
    ("sparse_on", "as_dense", "expected"),
    [
        (-1, False, (["b", "a", "c"], [], "never")),
        (0, False, (["b", "c"], ["a"], "never")),
        (2, False, (["b", "c"], ["a"], "never")),
        (2, True, (["b", "a", "c"], [], "never")),
    ],
)
def test_the_order_and_overlap_of_rank_0_hold_and_what_is_sparse_on_one_rank_is_on_all(
    ranks: Ranks, sparse_on: int, as_dense: bool, expected: Any
) -> None:
    assert ranks.run(agreed, meeting_point(), sparse_on, as_dense) == [expected] * SIZE


USUAL = {"first": torch.ones(2, 3), "second": torch.ones(4)}
OTHERS = {
    "shape": ({**USUAL, "second": torch.ones(5)}, ["second", "(5,)", "(4,)"]),
    "dtype": ({**USUAL, "second": torch.ones(4).double()}, ["second", "float64", "float32"]),
    "strides": ({**USUAL, "first": torch.ones(3, 2).t()}, ["first", "(1, 2)", "(3, 1)"]),
    "one more": ({**USUAL, "third": torch.ones(1)}, ["third", "(1,)", "absent"]),
    "one less": ({"first": torch.ones(2, 3)}, ["second", "absent", "(4,)"]),
    "another name": ({"first": torch.ones(2, 3), "2nd": torch.ones(4)}, ["2nd", "(4,)", "absent"]),
}


def refused(seat: Seat, path: str, kind: str) -> Any:
    model = OTHERS[kind][0] if seat.rank == 2 else USUAL
    names = {tensor.requires_grad_(): name for name, tensor in model.items()}
    comm = seat.comm(path, SIZE)
    told = told_by(lambda: agree(comm, names, "auto", {}, sparse_as_dense=False))
    comm.barrier()
    return told


@pytest.mark.parametrize("kind", OTHERS)
def test_models_that_differ_are_told_by_parameter_with_both_values(ranks: Ranks, kind: str) -> None:
    told = ranks.run(refused, meeting_point(), kind)
    name, odd, usual = OTHERS[kind][1]
    assert told == [told[0]] * SIZE
    line = str(told[0])
    assert f"parameter {name} is " in line
    assert "on rank 2, " in line and "on rank 0; build the same model" in line
    assert odd in line.split("on rank 2")[0] and usual in line.split("on rank 2")[1]


def cost(seat: Seat, path: str, size: int, count: int) -> Counters:
    names = {torch.ones(1): f"layers.{number}.weight" for number in range(count)}
    comm = seat.comm(path, size)
    before = comm.metrics()
    agree(comm, names, "auto", {}, sparse_as_dense=False)
    return comm.metrics() - before


@pytest.mark.parametrize("size", [2, SIZE])
def test_it_takes_bytes_by_parameter_however_many_ranks_there_are(ranks: Ranks, size: int) -> None:
    for count in (100, 10_000):
        used = ranks.run(cost, meeting_point(), size, count, on=range(size))
        assert [each.payload_bytes for each in used] == [5 * count + 4 + 2 * 24] * size
