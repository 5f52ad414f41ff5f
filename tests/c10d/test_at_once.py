"""Blocking collectives of one plain tensor, which go to the core without a Work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from backend_programs import group, not_in_torch_2_7
from hsgd.c10d.collectives import Collectives
from ranks import Ranks, Seat

__all__: list[str] = []

MOST_RANKS = 2


@contextlib.contextmanager
def submitted() -> Iterator[list[str]]:
    """The names of the collectives that are given a Work meanwhile."""
    names = []
    submit = Collectives._submit

    def note(self: Collectives, what: str, *arguments: Any, **named: Any) -> Any:
        names.append(what)
        return submit(self, what, *arguments, **named)

    with mock.patch.object(Collectives, "_submit", note):
        yield names


def plain_tensors() -> dict[str, torch.Tensor]:
    return {
        "row": torch.ones(5),
        "matrix": torch.ones(3, 4),
        "scalar": torch.ones(()),
        "empty": torch.empty(0),
        "bfloat16": torch.ones(5, dtype=torch.bfloat16),
        "integers": torch.ones(5, dtype=torch.int64),
        "parameter": torch.nn.Parameter(torch.ones(5)),
        "part": torch.ones(4, 4)[1:3],
    }


def do_plain(seat: Seat, path: str) -> dict[str, list[str]]:
    taken = {}
    with group(seat.rank, 2, path):
        for name, tensor in plain_tensors().items():
            with submitted() as names:
                dist.all_reduce(tensor)
                assert bool((tensor == 2).all()), name
                if tensor.dim():
                    joined = torch.empty(
                        (2 * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype
                    )
                    dist.all_gather_into_tensor(joined, tensor.detach() * (seat.rank + 1))
                    assert bool((joined[: len(tensor)] == 2).all()), name
                    assert bool((joined[len(tensor) :] == 4).all()), name
                if tensor.numel() and tensor.dtype != torch.bfloat16:
                    dist.broadcast(tensor.detach().mul_(seat.rank + 1), src=1)
                    assert bool((tensor == 4).all()), name
                    both = torch.cat([tensor.detach().reshape(-1)] * 2) * (seat.rank + 1)
                    own = torch.empty(tensor.numel(), dtype=tensor.dtype)
                    dist.reduce_scatter_tensor(own, both, dist.ReduceOp.MAX)
                    assert bool((own == 8).all()), name
            taken[name] = names
        for op, expected in ((dist.ReduceOp.MAX, 2), (dist.ReduceOp.AVG, 1.5), ("sum", 3)):
            tensor = torch.full((3,), seat.rank + 1.0)
            with submitted() as names:
                dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else op)
            assert tensor.tolist() == [expected] * 3
            taken[str(op)] = names
    return taken


@not_in_torch_2_7
def test_plain_tensors_take_the_short_way(ranks: Ranks, path: str) -> None:
    for taken in ranks.run(do_plain, path):
        assert taken == {name: [] for name in taken}


class Own(torch.Tensor):
    """A subclass, which may stand for anything."""


def other_tensors() -> dict[str, torch.Tensor]:
    return {
        "transposed": torch.ones(3, 4).t(),
        "strided": torch.ones(8)[::2],
        "bool": torch.ones(5, dtype=torch.bool),
        "int16": torch.ones(5, dtype=torch.int16),
        "subclass": torch.ones(5).as_subclass(Own),
        "sparse": torch.ones(5).to_sparse(),
    }


def do_other(seat: Seat, path: str) -> dict[str, int]:
    counts = {}
    with group(seat.rank, 2, path):
        for name, tensor in other_tensors().items():
            with submitted() as names:
                dist.all_reduce(tensor)
            expected = 1 if tensor.dtype == torch.bool else 2
            assert float(tensor.to_dense().flatten()[0]) == expected, name
            counts[name] = len(names)
    return counts


def test_other_tensors_take_the_long_one(ranks: Ranks, path: str) -> None:
    for counts in ranks.run(do_other, path):
        assert counts == dict.fromkeys(other_tensors(), 1)


def do_both(seat: Seat, path: str) -> list[str]:
    """Rank 0 has a plain tensor where rank 1 has one that takes the long way."""
    errors = []
    with group(seat.rank, 2, path):
        for _ in range(3):
            tensor = torch.ones(3, 4) if seat.rank == 0 else torch.ones(4, 3).t()
            dist.all_reduce(tensor)
            assert bool((tensor == 2).all())
            source = torch.ones(4, 3) if seat.rank == 0 else torch.ones(3, 4).t()
            joined = torch.empty(8, 3)
            dist.all_gather_into_tensor(joined, source)
            assert bool((joined == 1).all())
            data = torch.ones(3, 4) * seat.rank if seat.rank == 0 else torch.ones(4, 3).t()
            dist.broadcast(data, src=1)
            assert bool((data == 1).all())
            own = torch.empty(6)
            dist.reduce_scatter_tensor(own, torch.ones(3, 4) if seat.rank else torch.ones(4, 3).t())
            assert bool((own == 2).all())
        for call in (
            lambda: dist.all_reduce(torch.ones(3 + seat.rank)),
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG),
            lambda: dist.all_gather_into_tensor(torch.empty(7), torch.ones(3)),
            lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(7)),
            lambda: dist.all_gather_into_tensor(torch.empty(6, dtype=torch.int32), torch.ones(3)),
        ):
            with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
                call()
            errors.append(str(raised.value))
        dist.all_reduce(tensor)  # the group goes on
    return errors


def test_both_ways_fit_together_and_errors_are_those_of_the_long_one(
    ranks: Ranks, path: str
) -> None:
    for errors in ranks.run(do_both, path):
        mismatch, average, size, shares, dtype = errors
        assert "rank 0 sent 3 float32" in mismatch and "rank 1 sent 4 float32" in mismatch
        assert "AVG of torch.int64 would round" in average
        assert "6" in size and "7" in size
        assert "6" in shares and "7" in shares
        assert dtype


def do_watched(seat: Seat, path: str) -> list[int]:
    with group(seat.rank, 2, path):
        tensor = torch.ones(4)
        with submitted() as names:
            with torch.profiler.profile() as profile:
                dist.all_reduce(tensor)
            assert any(event.key == "hsgd:all_reduce" for event in profile.key_averages())
            counts = [len(names)]
            work = dist.all_reduce(tensor.view(2, 2).t(), async_op=True)
            dist.all_reduce(tensor)  # behind it, in whatever way
            work.wait()
            assert tensor.tolist() == [8.0] * 4
            counts.append(len(names) >= 2)
            tensors = [tensor]
            group_now: Any = dist.group.WORLD
            assert group_now.allreduce(tensors).wait()  # asynchronous by default: a Work
            assert group_now.allreduce(tensor, dist.ReduceOp.SUM).wait()
    return counts


def test_a_profile_and_what_is_under_way_take_the_long_one(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_watched, path) == [[1, True], [1, True]]
