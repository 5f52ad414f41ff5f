"""Whether gradients travel during backward or after it: found out by a trial, or said; and the same
results, bit for bit, either way."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from torch import nn

from hsgd import Comm
from hsgd.torch.gradients.overlap import Overlap, OverlapChoice
from ranks import PATIENT, Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 3
LAYERS = 4
STEPS = 22  # one makes the buckets, two warm up, 16 are compared, and some go on


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tried(seat: Seat, path: str, seconds: list[tuple[float, float]], hiccups: int) -> OverlapChoice:
    """A trial in which steps take this rank so long during and after backward, and some of those
    during backward very long.
    """
    during_s, after_s = seconds[seat.rank]
    clock = Clock()
    overlap = Overlap("auto", clock)
    overlap.begin(buckets=2)
    with Comm.local(path, seat.rank, len(seconds), PATIENT) as comm:
        while overlap.choice.steps_left > 0:
            overlap.ready()
            clock.now_s += during_s if overlap.active else after_s
            overlap.ready()  # of further buckets: counts for nothing
            if overlap.active and overlap.choice.steps_left <= 16 and hiccups > 0:
                hiccups -= 1
                clock.now_s += 100.0
            overlap.end_step(comm)
            clock.now_s += 50.0  # what the script does between two steps
    return overlap.choice


@pytest.mark.parametrize(
    ("seconds", "overlaps", "found_s"),
    [
        ([(2.0, 3.0), (2.0, 3.0)], True, (2.0, 3.0)),
        ([(3.0, 2.0), (3.0, 2.0)], False, (3.0, 2.0)),
        ([(2.0, 4.0), (6.0, 5.0)], False, (6.0, 5.0)),  # the slowest rank counts
        ([(3.0, 2.0), (3.0, 2.0), (1.0, 9.0)], True, (3.0, 9.0)),
        ([(2.0, 1.97)] * 2, True, (2.0, 1.97)),  # not worth leaving the usual way
    ],
)
def test_all_ranks_choose_what_was_faster_for_the_slowest(
    ranks: Ranks, seconds: list[tuple[float, float]], overlaps: bool, found_s: tuple[float, float]
) -> None:
    size = len(seconds)
    choices = ranks.run(tried, meeting_point(), seconds, 0, on=range(size))
    assert choices == [choices[0]] * size
    assert (choices[0].overlaps, choices[0].steps_left) == (overlaps, 0)
    assert (choices[0].during_s, choices[0].after_s) == pytest.approx(found_s)


def test_some_very_long_steps_do_not_decide(ranks: Ranks) -> None:
    choices = ranks.run(tried, meeting_point(), [(2.0, 3.0)] * 2, 3, on=range(2))
    assert [choice.overlaps for choice in choices] == [True] * 2


class NoComm:
    """Fails when a collective is called."""


def plan(overlap: Overlap, steps: int) -> list[bool]:
    """Which of the next steps overlap."""
    ways = []
    for _ in range(steps):
        ways.append(overlap.active)
        overlap.ready()
        overlap.end_step(NoComm())  # type: ignore[arg-type]
    return ways


def test_both_ways_get_as_many_steps_in_an_order_without_a_rhythm() -> None:
    overlap = Overlap("auto", Clock())
    overlap.begin(buckets=2)
    ways = plan(overlap, 17)
    assert ways[:2] == [True, True]
    compared = [*ways[2:], overlap.active]
    assert compared.count(True) == compared.count(False) == 8
    places = [n for n, overlaps in enumerate(compared) if overlaps]
    assert sum(places) == sum(range(16)) - sum(places)  # a steady drift hits both alike
    for period in (2, 3, 4, 5):
        for phase in range(period):
            assert len(set(compared[phase::period])) == 2


@pytest.mark.parametrize(("wanted", "overlaps"), [("always", True), ("never", False)])
def test_what_is_said_is_not_tried(wanted: str, overlaps: bool) -> None:
    overlap = Overlap(wanted)
    overlap.begin(buckets=3)
    assert plan(overlap, 30) == [overlaps] * 30
    assert overlap.choice == OverlapChoice(overlaps, 0)


def test_one_bucket_is_no_reason_for_a_trial_but_a_second_one_is() -> None:
    overlap = Overlap("auto", Clock())
    overlap.begin(buckets=1)
    assert plan(overlap, 30) == [True] * 30
    overlap.begin(buckets=2)
    assert overlap.choice.steps_left == 18
    plan(overlap, 7)
    overlap.ready()
    overlap.begin(buckets=3)  # during a trial: anew, without the step in which they are made
    overlap.end_step(NoComm())  # type: ignore[arg-type]
    assert overlap.choice == OverlapChoice(True, 18)


# --- in the optimizer ---


def train(hvd: Any, rank: int, **options: Any) -> tuple[list[Any], list[int], OverlapChoice]:
    """Weights, buckets under way when the last gradient of each step comes, and what was chosen."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        bucket_cap_mb=1e-6,
        **options,
    )
    launched: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(
        lambda _: launched.append(optimizer._reducer._next)
    )
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
    return [p.detach().tolist() for p in model.parameters()], launched, optimizer.overlap_choice


def train_each_way(seat: Seat, path: str, size: int) -> dict[str, Any]:
    with job(seat, path, size) as hvd:
        return {
            strategy: train(hvd, seat.rank, strategy=strategy)
            for strategy in ("auto", "overlap", "after_backward")
        }


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_the_same_bit_for_bit_whenever_they_travel(ranks: Ranks, size: int) -> None:
    answers = ranks.run(train_each_way, meeting_point(), size, on=range(size))
    for answer in answers:
        weights = {strategy: row[0] for strategy, row in answer.items()}
        assert weights["auto"] == weights["overlap"] == weights["after_backward"]
        assert weights == {strategy: row[0] for strategy, row in answers[0].items()}
        _, launched, choice = answer["auto"]
        assert choice == answers[0]["auto"][2]
        assert choice.steps_left == 0 and choice.during_s > 0 and choice.after_s > 0
        assert launched[:3] == [0, LAYERS - 1, LAYERS - 1]  # buckets are made in the first step
        assert sorted(launched[3:19]) == [0] * 8 + [LAYERS - 1] * 8
        assert launched[19:] == [LAYERS - 1 if choice.overlaps else 0] * 3
        assert answer["overlap"][1] == [0] + [LAYERS - 1] * (STEPS - 1)
        assert answer["overlap"][2] == OverlapChoice(True, 0)
        assert answer["after_backward"][1] == [0] * STEPS
        assert answer["after_backward"][2] == OverlapChoice(False, 0)


def train_as_told(seat: Seat, path: str, size: int, values: list[str]) -> OverlapChoice:
    os.environ["HSGD_OVERLAP"] = values[seat.rank]
    try:
        with job(seat, path, size) as hvd:
            return train(hvd, seat.rank)[2]
    finally:
        del os.environ["HSGD_OVERLAP"]


@pytest.mark.parametrize("values", [["never", "never"], ["never", "auto"], ["always", "never"]])
def test_the_environment_of_rank_0_says_which(ranks: Ranks, values: list[str]) -> None:
    choices = ranks.run(train_as_told, meeting_point(), 2, values, on=range(2))
    assert choices == [OverlapChoice(values[0] == "always", 0)] * 2


def train_alone(seat: Seat, path: str) -> OverlapChoice:
    with job(seat, path, 1) as hvd:
        return train(hvd, seat.rank)[2]


def test_one_rank_tries_nothing(ranks: Ranks) -> None:
    assert ranks.run(train_alone, meeting_point(), on=range(1)) == [OverlapChoice(True, 0)]


def misspelt(seat: Seat, path: str) -> None:
    os.environ["HSGD_OVERLAP"] = "late"
    try:
        expected = "^HSGD_OVERLAP=late: expected auto, always or never$"
        with pytest.raises(ValueError, match=expected), job(seat, path, 1):
            pass
    finally:
        del os.environ["HSGD_OVERLAP"]


def test_a_misspelt_variable_is_told_in_one_line(ranks: Ranks) -> None:
    ranks.run(misspelt, meeting_point(), on=range(1))


def resumed(seat: Seat, paths: list[str], size: int) -> list[int]:
    """Steps that are left, of an optimizer that outlives a job, after each."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
    optimizer: Any = None
    left = []
    for path, steps in zip(paths, (STEPS, 5), strict=True):
        with job(seat, path, size) as hvd:
            optimizer = optimizer or hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=1e-6
            )
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
            left.append(optimizer.overlap_choice.steps_left)
    return left


def test_a_new_job_tries_anew_because_new_ranks_have_to(ranks: Ranks) -> None:
    paths = [meeting_point(), meeting_point()]
    assert ranks.run(resumed, paths, 2, on=range(2)) == [[0, 14]] * 2


def told_of(seat: Seat, path: str, size: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hsgd.torch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with job(seat, path, size) as hvd:
            train(hvd, seat.rank)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return lines


def test_rank_0_logs_what_was_chosen(ranks: Ranks) -> None:
    first, second = ranks.run(told_of, meeting_point(), 2, on=range(2))
    assert second == []
    (line,) = first
    assert line.startswith("DistributedOptimizer: buckets travel ") and " ms after it" in line
