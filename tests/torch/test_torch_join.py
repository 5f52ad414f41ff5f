"""hvd.join() while an optimizer trains: ranks without data take part in the steps of the others
with zeros, and all go on together afterwards."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 3
LR, LATER = 0.1, 2


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(3, 4, generator=generator)).square().mean()  # type: ignore[no-any-return]


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def made(hvd: Any, model: nn.Module, **options: Any) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    options.setdefault("bucket_cap_mb", 1e-6)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def serially(steps: list[int]) -> list[list[float]]:
    """Weights of the rank with the most steps, and after LATER steps of all."""
    model, size = net(), len(steps)
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(max(steps) + LATER):
        plain.zero_grad()
        for rank in range(size):
            if step < steps[rank] or step >= max(steps):
                (loss_of(model, step, rank) / size).backward()
        plain.step()
    return weights(model)


def uneven(seat: Seat, path: str, steps: list[int], options: dict[str, Any]) -> tuple[int, Any]:
    """Each rank its number of steps; the rank that joined last, and the weights at the end."""
    with job(seat, path, len(steps)) as hvd:
        if "compression" in options:
            options = {"compression": getattr(hvd.Compression, options["compression"])}
        model = net()
        optimizer = made(hvd, model, **options)
        for step in range(steps[seat.rank]):
            optimizer.zero_grad()
            loss = loss_of(model, step, seat.rank)
            loss.backward()
            hvd.allreduce(loss.detach(), name="loss")  # named operations go on as well
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), last)
        for step in range(max(steps), max(steps) + LATER):
            optimizer.zero_grad()
            loss_of(model, step, seat.rank).backward()
            optimizer.step()
        assert hvd.join() in range(len(steps))
        has_tried = optimizer.overlap_choice.during_s is not None
        assert has_tried == (len(set(steps)) == 1)
        return last, weights(model)


OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {"bucket_cap_mb": 25.0},
    "many buckets": {},
    "after backward": {"strategy": "after_backward"},
    "predivided": {"gradient_predivide_factor": 2.0},
    "compressed": {"compression": "fp16"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("steps", [[2, 5], [3, 1, 4]], ids=str)
def test_others_step_on_with_zeros_and_all_go_on_later(
    ranks: Ranks, steps: list[int], options: dict[str, Any]
) -> None:
    answers = ranks.run(uneven, meeting_point(), steps, options, on=range(len(steps)))
    last, found = answers[0]
    assert last == steps.index(max(steps))
    assert answers == [answers[0]] * len(steps)  # bitwise
    tolerance = 1e-2 if "compression" in options else 1e-6
    for ours, theirs in zip(found, serially(steps), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def test_a_rank_may_join_during_a_trial_of_the_overlap(ranks: Ranks) -> None:
    steps = [7, 24]
    answers = ranks.run(uneven, meeting_point(), steps, {}, on=range(2))
    assert answers == [answers[0]] * 2


def test_joining_together_ends_no_trial(ranks: Ranks) -> None:
    answers = ranks.run(uneven, meeting_point(), [18, 18], {}, on=range(2))
    for ours, theirs in zip(answers[0][1], serially([18, 18]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def unused_gradients(seat: Seat, path: str) -> list[list[float]]:
    """Rank 0 joins after a backward pass without a step."""
    with job(seat, path, 2) as hvd:
        model = net()
        optimizer = made(hvd, model)
        for step in range(2 if seat.rank == 0 else 4):
            optimizer.zero_grad()
            loss_of(model, step, seat.rank).backward()
            if (seat.rank, step) != (0, 1):
                optimizer.step()
        assert hvd.join() == 1
        return weights(model)


def test_gradients_that_came_before_a_join_still_count(ranks: Ranks) -> None:
    found = ranks.run(unused_gradients, meeting_point(), on=range(2))[1]
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(4):
        plain.zero_grad()
        for rank in (0, 1) if step < 2 else (1,):
            (loss_of(model, step, rank) / 2).backward()
        plain.step()
    for ours, theirs in zip(found, weights(model), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def two_optimizers(seat: Seat, path: str) -> None:
    """And one that only rank 1 has kept."""
    with job(seat, path, 2) as hvd:
        models = [net(), net(), net()]
        optimizers = [made(hvd, model) for model in models]
        for step in range(2 + 2 * seat.rank):
            for model, optimizer in zip(models[: 3 if step == 0 else 2], optimizers, strict=False):
                optimizer.zero_grad()
                loss_of(model, step, seat.rank).backward()
                optimizer.step()
        if seat.rank == 0:
            del optimizers[2], optimizer
            gc.collect()
        assert hvd.join() == 1
        if seat.rank == 1:
            assert weights(models[0]) == weights(models[1])


def test_several_optimizers_and_one_that_a_rank_has_forgotten(ranks: Ranks) -> None:
    ranks.run(two_optimizers, meeting_point(), on=range(2))


def leave_together(folder: Path, seat: Seat, ranks: int) -> None:
    """Stay in the job until all have come here: nobody may learn from an end what went wrong."""
    (folder / str(seat.rank)).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < ranks:
        assert time.monotonic() < deadline, "another rank still waits"
        time.sleep(0.01)


def new_parameters(seat: Seat, path: str) -> None:
    with job(seat, path, 2) as hvd:
        model, more = net(), nn.Linear(2, 2)
        optimizer = made(hvd, model)
        loss_of(model, 0, seat.rank).backward()
        optimizer.step()
        if seat.rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match="optimizer"):
                hvd.join()
            return
        optimizer.add_param_group({"params": list(more.parameters())})
        optimizer.zero_grad()
        with pytest.raises(hvd.HorovodInternalError):
            loss_of(nn.Sequential(model, more), 1, seat.rank).backward()


def different_models(seat: Seat, path: str, folder: Path) -> None:
    """Rank 1 has parameters more, catches the error and lives on: rank 0 must not wait for it."""
    with job(seat, path, 2) as hvd:
        model, more = net(), nn.Linear(2, 2)
        optimizer = made(hvd, model, bucket_cap_mb=1e-5)
        loss_of(model, 0, seat.rank).backward()
        optimizer.step()
        optimizer.zero_grad()

        def train() -> None:
            if seat.rank == 1:
                optimizer.add_param_group({"params": list(more.parameters())})
                loss_of(nn.Sequential(model, more), 1, seat.rank).backward()
            else:  # which meets the first bucket of the next step
                loss_of(model, 1, seat.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                loss_of(model, 2, seat.rank).backward()

        with pytest.raises(hvd.HorovodInternalError, match="terms of DistributedOptimizer"):
            train()
        leave_together(folder, seat, 2)


def test_parameters_of_one_rank_alone_are_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(different_models, meeting_point(), tmp_path, on=range(2))


def test_new_parameters_while_a_rank_has_joined_are_an_error(ranks: Ranks) -> None:
    ranks.run(new_parameters, meeting_point(), on=range(2))


def unnamed(seat: Seat, path: str) -> list[float]:
    """Ranks that have not joined count an allgather that fails, and one counts more than others."""
    with job(seat, path, 3) as hvd:
        for _ in range(seat.rank):
            with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
                hvd.allgather(torch.ones(2))
        hvd.join()
        gathered = hvd.allgather(torch.full((1,), float(seat.rank)))
        return gathered.tolist() + hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist()  # type: ignore[no-any-return]


def test_unnamed_operations_fail_on_all_that_call_them_and_go_on_after_a_join(ranks: Ranks) -> None:
    assert ranks.run(unnamed, meeting_point()) == [[0.0, 1.0, 2.0, 3.0]] * 3
