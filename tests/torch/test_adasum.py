"""Adasum without Horovod: the published formula, for any number of ranks. Horovod's own values are
compared in torch_horovods_own.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 5
SHAPES = ((7,), (3, 4), (1,), (1000, 3), (0,), ())


def on(ranks: Ranks, size: int, function: Any, *args: Any) -> list[Any]:
    return ranks.run(function, meeting_point(), size, *args, on=range(size))


def made(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * len(shape) + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def expected(vectors: Sequence[Tensor]) -> Tensor:
    """In double precision, by the tree: neighbours first."""
    parts = [vector.double() for vector in vectors]
    while len(parts) > 1:
        pairs = list(zip(parts[::2], parts[1::2], strict=False))
        parts = [together(a, b) for a, b in pairs] + parts[2 * len(pairs) :]
    return parts[0]


def together(a: Tensor, b: Tensor) -> Tensor:
    dot = (a * b).sum()
    of_a, of_b = (a * a).sum(), (b * b).sum()
    left = 1 - dot / of_a / 2 if of_a > 0 else 1.0
    right = 1 - dot / of_b / 2 if of_b > 0 else 1.0
    return a * left + b * right


def do_combine(seat: Seat, path: str, size: int) -> list[str]:
    wrong = []
    with job(seat, path, size) as hvd:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            near = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 2e-2)
            mine = [made(seat.rank, shape, dtype) for shape in SHAPES]
            found = [hvd.allreduce(each, op=hvd.Adasum) for each in mine]
            grouped = hvd.grouped_allreduce(mine, op=hvd.Adasum)
            placed = [each.clone() for each in mine]
            for each in placed:
                hvd.allreduce_(each, op=hvd.Adasum)
            for shape, *results in zip(SHAPES, found, grouped, placed, strict=True):
                wanted = expected([made(rank, shape, dtype) for rank in range(size)])
                for result in results:
                    close = torch.allclose(result.double(), wanted, rtol=near, atol=near)
                    if not close or result.dtype != dtype or result.shape != shape:
                        wrong.append(f"{dtype} {shape}: {result}, not {wanted}")
                if hvd.allgather_object(results[0].tolist()) != [results[0].tolist()] * size:
                    wrong.append(f"{dtype} {shape}: ranks differ")
        same = torch.arange(5.0)
        assert torch.allclose(hvd.allreduce(same, op=hvd.Adasum), same)  # parallel: as one
        across = torch.eye(size)[seat.rank]
        assert torch.allclose(hvd.allreduce(across, op=hvd.Adasum), torch.ones(size))  # a sum
        zero = torch.zeros(3) if seat.rank else torch.ones(3)
        assert torch.equal(hvd.allreduce(zero, op=hvd.Adasum), torch.ones(3))
        scaled = hvd.allreduce(across, op=hvd.Adasum, prescale_factor=2.0, postscale_factor=3.0)
        assert torch.allclose(scaled, torch.full((size,), 6.0))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_vectors_are_combined_by_the_formula(ranks: Ranks, size: int) -> None:
    assert on(ranks, size, do_combine) == [[]] * size


def do_refuse(seat: Seat, path: str, size: int) -> list[str]:
    found = []
    with job(seat, path, size) as hvd:
        calls = (
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum),
            lambda: hvd.allreduce(torch.ones(2 + seat.rank), op=hvd.Adasum, name="shape"),
            lambda: hvd.allreduce(
                torch.ones(2), op=hvd.Sum if seat.rank else hvd.Adasum, name="op"
            ),
        )
        for call in calls:
            with pytest.raises((ValueError, hvd.HorovodInternalError)) as told:
                call()
            found.append(str(told.value))
        assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Adasum), torch.ones(2))
    return found


def test_what_has_no_meaning_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for integers, shapes, ops in on(ranks, 2, do_refuse):
        assert "Adasum of torch.IntTensor has no meaning" in integers
        assert "Mismatched ADASUM tensor shapes" in shapes
        assert "Mismatched operations" in ops and "ADASUM" in ops


def do_subset(seat: Seat, path: str, size: int) -> bool:
    with job(seat, path, size, process_sets="dynamic") as hvd:
        pair = hvd.add_process_set([0, 2])
        if seat.rank != 1:
            mine = made(seat.rank, (9,), torch.float64)
            found = hvd.allreduce(mine, op=hvd.Adasum, process_set=pair)
            wanted = together(*(made(rank, (9,), torch.float64) for rank in (0, 2)))
            return torch.allclose(found, wanted)
    return True


def test_a_process_set_combines_its_own(ranks: Ranks) -> None:
    assert on(ranks, 3, do_subset) == [True] * 3


def do_train(seat: Seat, path: str, size: int, kind: str, passes: int) -> list[Any]:
    """Three steps beside what the formula says of the ranks' own steps."""
    with job(seat, path, size) as hvd:
        models, optimizers = [], []
        for _ in range(size):  # every rank computes all of them
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
            options = {"momentum": 0.9} if kind == "SGD" else {}
            models.append(model)
            optimizers.append(getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options))
        torch.manual_seed(0)
        mine = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = hvd.DistributedOptimizer(
            getattr(torch.optim, kind)(mine.parameters(), lr=0.1, **options),
            mine.named_parameters(),
            op=hvd.Adasum,
            backward_passes_per_step=passes,
        )
        for step in range(3):
            starts = [each.detach().clone() for each in mine.parameters()]
            deltas = []
            for rank, (model, plain) in enumerate(zip(models, optimizers, strict=True)):
                plain.zero_grad()
                run(model, rank, step, passes)
                plain.step()
                pairs = zip(model.parameters(), starts, strict=True)
                deltas.append([(each - start).detach() for each, start in pairs])
            optimizer.zero_grad()
            run(mine, seat.rank, step, passes)
            optimizer.step()
            for number, (each, start) in enumerate(zip(mine.parameters(), starts, strict=True)):
                wanted = start + expected([delta[number] for delta in deltas]).float()
                assert torch.allclose(each, wanted, atol=1e-6), (step, number)
                for model in models:
                    list(model.parameters())[number].data.copy_(each)
        with pytest.raises(AssertionError, match="not supported"):
            optimizer.skip_synchronize()
        return [each.tolist() for each in mine.parameters()]


def run(model: nn.Module, rank: int, step: int, passes: int) -> None:
    for number in range(passes):
        generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()


@pytest.mark.parametrize(("kind", "passes"), [("SGD", 1), ("Adam", 2)])
def test_an_optimizer_combines_the_steps_of_ranks(ranks: Ranks, kind: str, passes: int) -> None:
    first, *others = on(ranks, 3, do_train, kind, passes)
    assert others == [first] * 2
