"""What scripts do with gradients between backward() and step(): ranks that share a batch end with
equal parameters, and with those of one process that has the whole batch."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_

from gradient_idioms import IDIOMS, WRAP_THEMSELVES, Net, Script, bits_of, largest_difference
from hsgd.torch.exceptions import HorovodInternalError
from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 3


def run(idiom: Callable[[Script], None], hvd: Any, rank: int, size: int, overlap: str) -> Net:
    torch.manual_seed(5)
    model = Net()
    script = Script(model, None, lambda **_: None, lambda rows: rows, model)
    script.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd is not None:
        plain = script.optimizer

        def wrap(*, named: bool = True, **options: Any) -> None:
            inner = plain if hasattr(script.optimizer, "_reducer") else script.optimizer
            script.optimizer = hvd.DistributedOptimizer(
                inner,
                model.named_parameters() if named else None,
                bucket_cap_mb=1e-3,
                **({} if overlap == "auto" else {"strategy": overlap}),
                **options,
            )

        if idiom not in WRAP_THEMSELVES:
            wrap()
        script.wrap = wrap
        script.take_part(rank, size)
    idiom(script)
    return model


def compare(seat: Seat, path: str, size: int, overlap: str, names: list[str]) -> list[Any]:
    failures, finals = [], []
    with job(seat, path, size) as hvd:
        for idiom in IDIOMS:
            if idiom.__name__ not in names:
                continue
            model = run(idiom, hvd, seat.rank, size, overlap)
            reference = run(idiom, None, 0, 1, overlap)
            finals.append(bits_of(model))
            difference = largest_difference(model, reference)
            if not difference < 1e-9:
                failures.append((idiom.__name__, difference))
    return [failures, finals]


@pytest.mark.parametrize("overlap", ["overlap", "after_backward", "auto"])
@pytest.mark.parametrize("size", [2, 3])
def test_it_trains_like_one_process(ranks: Ranks, size: int, overlap: str) -> None:
    names = [idiom.__name__ for idiom in IDIOMS]
    found = ranks.run(compare, meeting_point(), size, overlap, names, on=range(size))
    assert [failures for failures, _ in found] == [[]] * size
    assert all(finals == found[0][1] for _, finals in found)


def in_another_format(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten())
        if seat.rank == 1:
            model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        with pytest.raises(HorovodInternalError, match=r"parameter .* strides .* on rank 1"):
            model(torch.ones(2, 2, 4, 4)).sum().backward()


def test_another_memory_format_on_one_rank_is_refused(ranks: Ranks) -> None:
    ranks.run(in_another_format, meeting_point(), 2, on=range(2))


def another_number_of_passes(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        model = copy.deepcopy(nn.Linear(3, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def train() -> None:
            for _ in range(2):
                for _ in range(1 + seat.rank):
                    model(torch.ones(1, 3)).sum().backward()
                optimizer.step()

        with pytest.raises(HorovodInternalError, match="backward pass 2 of a step"):
            train()


def test_ranks_with_more_passes_in_a_step_are_told(ranks: Ranks) -> None:
    ranks.run(another_number_of_passes, meeting_point(), 2, on=range(2))


def two_optimizers(seat: Seat, path: str, size: int, overlap: str) -> list[list[float]]:
    """Whose gradients come in another order on each rank, in one backward pass."""
    with job(seat, path, size) as hvd:
        torch.manual_seed(3)
        heads = [nn.Linear(3, 1), nn.Linear(3, 1)]
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(head.parameters(), lr=0.1),
                [(f"{number}.{name}", each) for name, each in head.named_parameters()],
                strategy=overlap,
            )
            for number, head in enumerate(heads)
        ]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            rows = torch.full((2, 3), float(step + seat.rank))
            losses = [head(rows).square().mean() for head in heads[:: 1 if seat.rank else -1]]
            sum(losses[1:], losses[0]).backward()
            clip_grad_norm_([p for head in heads for p in head.parameters()], 0.05)
            for optimizer in optimizers:
                optimizer.step()
        return [p.flatten().tolist() for head in heads for p in head.parameters()]


@pytest.mark.parametrize("overlap", ["overlap", "after_backward"])
def test_optimizers_that_share_a_backward_pass_meet_in_one_order(
    ranks: Ranks, overlap: str
) -> None:
    found = ranks.run(two_optimizers, meeting_point(), 2, overlap, on=range(2))
    assert found[0] == found[1]


def sum_twice(seat: Seat, path: str, size: int, bias: bool) -> None:
    with job(seat, path, size) as hvd:
        model = nn.Linear(2, 1, bias=bias)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
        for _ in range(2):  # gradients that became zero are no sums
            model(torch.ones(1, 2) + seat.rank).sum().backward()
            model.zero_grad(set_to_none=not bias)
        model(torch.ones(1, 2) + seat.rank).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[3, 3]]
        with pytest.raises(AssertionError, match="would be combined once more"):
            model(torch.ones(1, 2) + seat.rank).sum().backward()


@pytest.mark.parametrize("bias", [False, True])
def test_sums_are_not_summed_again(ranks: Ranks, bias: bool) -> None:
    ranks.run(sum_twice, meeting_point(), 2, bias, on=range(2))


# Random sequences of them, one after the other on one model and one optimizer.


def scale(script: Script) -> None:
    for parameter in script.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def replace(script: Script) -> None:
    for parameter in script.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * 0.5


def clip(script: Script) -> None:
    clip_grad_norm_(script.model.parameters(), 0.05)


def forget_one(script: Script) -> None:
    script.model.last.bias.grad = None


def synchronize(script: Script) -> None:
    getattr(script.optimizer, "synchronize", lambda: None)()


def freeze(script: Script) -> None:
    script.model.middle.requires_grad_(False)


def thaw(script: Script) -> None:
    script.model.middle.requires_grad_(True)


def another_pass(script: Script) -> None:
    script.loss(100).backward()


def other_loss(script: Script) -> None:
    script.model.last.weight.square().sum().backward()


BETWEEN = (scale, replace, clip, forget_one, synchronize, freeze, thaw, another_pass, other_loss)
STEP = st.tuples(
    st.sampled_from(["to none", "to zero", "of the model", "not"]),
    st.booleans(),
    st.lists(st.integers(0, len(BETWEEN) - 1), max_size=4),
)


def take_steps(steps: list[tuple[str, bool, list[int]]], script: Script) -> None:
    for number, (zero, as_closure, between) in enumerate(steps):
        if zero == "of the model":
            script.model.zero_grad()
        elif zero != "not":
            script.optimizer.zero_grad(set_to_none=zero == "to none")

        def evaluate(number: int = number, between: list[int] = between) -> torch.Tensor:
            loss = script.loss(number)
            loss.backward()
            # A gradient that is missing in a further pass counts as zeros, as in Horovod.
            last = (forget_one, thaw)
            for action in sorted(between, key=lambda action: BETWEEN[action] in last):
                BETWEEN[action](script)
            return loss

        if as_closure:
            script.optimizer.step(evaluate)
        else:
            evaluate()
            script.optimizer.step()


def compare_sequence(
    seat: Seat, path: str, size: int, overlap: str, steps: list[tuple[str, bool, list[int]]]
) -> tuple[float, list[bytes]]:
    idiom = functools.partial(take_steps, steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer.step.. called without")
        with job(seat, path, size) as hvd:
            model = run(idiom, hvd, seat.rank, size, overlap)
        reference = run(idiom, None, 0, 1, overlap)
    return largest_difference(model, reference), bits_of(model)


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_any_sequence_of_them_trains_like_one_process(ranks: Ranks, examples: int) -> None:
    @settings(max_examples=examples, database=None)
    @given(
        st.lists(STEP, min_size=1, max_size=5),
        st.sampled_from(["overlap", "after_backward", "auto"]),
        st.sampled_from([2, 3]),
    )
    def check(steps: list[tuple[str, bool, list[int]]], overlap: str, size: int) -> None:
        found = ranks.run(compare_sequence, meeting_point(), size, overlap, steps, on=range(size))
        assert max(difference for difference, _ in found) < 1e-9
        assert all(final == found[0][1] for _, final in found)

    check()
