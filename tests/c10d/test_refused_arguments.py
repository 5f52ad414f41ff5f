"""Tensors that do not go together are refused by every collective, before anything is sent, and a
root that refuses its own arguments keeps nobody waiting."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GatherOptions, ScatterOptions

from backend_programs import group
from ranks import Ranks, Seat

__all__: list[str] = []

SIZE, COUNT = 2, 4
MOST_RANKS = SIZE
Tensor = torch.Tensor
Calls = dict[str, Callable[[Any, Tensor, list[Tensor]], Any]]


def rooted(options: Any, rank: int) -> Any:
    options.rootRank = rank
    return options


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


CALLS: Calls = {
    "allgather": lambda pg, one, parts: pg.allgather([parts], [one]),
    "allgather_coalesced": lambda pg, one, parts: pg.allgather_coalesced(
        [[part] for part in parts], [one]
    ),
    "all_gather_single": lambda pg, one, parts: pg.all_gather_single(joined(parts), one),
    "all_gather_single_coalesced": lambda pg, one, parts: pg.all_gather_single_coalesced(
        [joined(parts)], [one]
    ),
    "reduce_scatter": lambda pg, one, parts: pg.reduce_scatter([one], [parts]),
    "reduce_scatter_single": lambda pg, one, parts: pg.reduce_scatter_single(one, joined(parts)),
    "gather": lambda pg, one, parts: pg.gather([parts], [one], rooted(GatherOptions(), pg.rank())),
    "gather_single": lambda pg, one, parts: pg.gather_single(
        joined(parts), one, rooted(GatherOptions(), pg.rank())
    ),
    "scatter": lambda pg, one, parts: pg.scatter(
        [one], [parts], rooted(ScatterOptions(), pg.rank())
    ),
    "all_to_all_single": lambda pg, one, parts: pg.all_to_all_single(
        joined(parts), torch.cat([one, one]), [], []
    ),
    "alltoall": lambda pg, one, parts: pg.alltoall(parts, [one] * SIZE),
}
OUTPUT_LISTS = ("allgather", "allgather_coalesced", "gather", "alltoall")
KINDS: dict[str, Callable[[], list[Tensor]]] = {
    "dtype": lambda: [torch.zeros(COUNT, dtype=torch.int64) for _ in range(SIZE)],
    "size": lambda: [torch.zeros(COUNT + 1) for _ in range(SIZE)],
    "device": lambda: [torch.zeros(COUNT, device="meta") for _ in range(SIZE)],
}


def refused(pg: Any, name: str, parts: list[Tensor]) -> str:
    try:
        work = CALLS[name](pg, torch.ones(COUNT) * 0.5, parts)
        if work is not None:
            work.wait()
    except (TypeError, ValueError) as error:
        return str(error)
    return "taken"


def try_all(seat: Seat, path: str) -> dict[str, str]:
    answers: dict[str, str] = {}
    with group(seat.rank, SIZE, path, limit=timedelta(seconds=20)) as pg:
        for name in CALLS:
            for kind, make in KINDS.items():
                if (name, kind) != ("alltoall", "size"):  # sizes are those of the other ranks
                    answers[f"{name} {kind}"] = refused(pg, name, make())
            if name in OUTPUT_LISTS:
                one = torch.zeros(COUNT * SIZE)
                answers[f"{name} same"] = refused(pg, name, [one[:COUNT]] * SIZE)
                answers[f"{name} overlap"] = refused(pg, name, [one[:COUNT], one[1 : COUNT + 1]])
        total = torch.ones(1)
        dist.all_reduce(total)  # the group goes on
        answers["sum"] = str(total.item())
    return answers


def test_what_does_not_go_together_is_refused_on_every_path(ranks: Ranks, path: str) -> None:
    for answers in ranks.run(try_all, path):
        assert answers.pop("sum") == str(float(SIZE))
        taken = [case for case, text in answers.items() if text == "taken"]
        assert not taken
        assert all(len(text.splitlines()) == 1 for text in answers.values()), answers


def root_refuses(seat: Seat, path: str, name: str) -> tuple[str, float]:
    with group(seat.rank, SIZE, path, limit=timedelta(seconds=25)):
        parts = [torch.zeros(COUNT + 1) for _ in range(SIZE)] if seat.rank == 0 else None
        one = torch.ones(COUNT)
        call = dist.scatter if name == "scatter" else dist.gather
        with pytest.raises(ValueError, match=name) as raised:
            call(one, parts)
        total = torch.ones(1)
        dist.all_reduce(total)
        return str(raised.value), total.item()


@pytest.mark.parametrize("name", ["scatter", "gather"])
def test_a_root_that_refuses_its_arguments_keeps_nobody_waiting(
    ranks: Ranks, path: str, name: str
) -> None:
    (own, first), (others, second) = ranks.run(root_refuses, path, name)
    assert f"{name}: the list has tensors of" in own
    assert others == f"{name}: the root, rank 0, refused its own arguments; see what it says"
    assert first == second == SIZE
