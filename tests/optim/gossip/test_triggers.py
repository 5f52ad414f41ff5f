"""Triggers and topologies of gossip: arithmetic, without ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hsgd.optim import (
    Budget,
    FixedPeriod,
    JitteredPeriod,
    RelativeChange,
    Topology,
    Trigger,
)
from hsgd.optim.gossip.gossip_turns import Turns
from hsgd.optim.gossip.pair_averaging import Averaged
from hsgd.optim.triggers.weight_change import Change

__all__: list[str] = []

SIZES = (1, 2, 3, 4, 5, 8, 12)


def walk(trigger: Trigger, steps: int, lr: Callable[[int], float] = lambda _: 0.1) -> list[int]:
    """The steps at which it fires, for weights that move by `lr` in each."""
    weights = [torch.ones(1000), torch.ones(10, 10)]
    trigger.reset(weights)
    fired = []
    for step in range(1, steps + 1):
        for tensor in weights:
            tensor += lr(step)
        if trigger.step(step, weights, lr(step)):
            fired.append(step)
            trigger.reset(weights)
    return fired


def test_a_fixed_period_fires_at_its_multiples() -> None:
    assert walk(FixedPeriod(4), 13) == [4, 8, 12]


def test_jitter_keeps_the_period_on_average_and_depends_on_the_seed() -> None:
    first, second = walk(JitteredPeriod(5, 1), 5000), walk(JitteredPeriod(5, 2), 5000)
    assert first != second and first == walk(JitteredPeriod(5, 1), 5000)
    gaps = [after - before for before, after in pairwise([0, *first])]
    assert min(gaps) == 1 and max(gaps) == 9 and math.isclose(np.mean(gaps), 5, rel_tol=0.05)


def test_relative_change_is_the_norm_of_the_difference() -> None:
    old, new = torch.randn(70_001), torch.randn(70_001)
    change = Change()
    change.remember([old])
    wanted = float((new - old).norm() / old.norm())
    assert math.isclose(change.measure([new]), wanted, rel_tol=1e-5)
    assert change.measure([old]) == 0.0
    flipped = -old  # the same norm, and yet far away
    assert math.isclose(change.measure([flipped]), 2.0, rel_tol=1e-5)


def test_a_sample_of_blocks_estimates_the_change() -> None:
    old = torch.randn(2_000_000)
    new = old + 0.1 * torch.randn(2_000_000)
    change = Change(sample=0.1)
    change.remember([old])
    assert math.isclose(change.measure([new]), 0.1, rel_tol=0.02)
    assert sum(block.numel() for block in change.state_dict()["last"]) < 300_000


def test_a_sample_of_a_large_layer_does_not_hide_a_small_one() -> None:
    flat = torch.randn(600_000 + 5 + 640)
    large, bias, last = flat.split([600_000, 5, 640])
    change = Change(sample=0.1)
    change.remember([large, bias, last])
    before = flat.clone()
    last.mul_(3)
    wanted = float((flat - before).norm() / before.norm())
    assert math.isclose(change.measure([large, bias, last]), wanted, rel_tol=0.02)


def test_layers_that_follow_one_another_are_measured_as_one_and_others_as_they_are() -> None:
    flat, other = torch.randn(100), torch.randn(50)
    layers = [*flat.view(4, 25), other, torch.randn(3, dtype=torch.float64)]
    change = Change()
    change.remember(layers)
    assert [block.numel() for block in change.state_dict()["last"]] == [100, 50, 3]
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer += 0.1
    moved = sum(float((a - b).square().sum()) for a, b in zip(layers, before, strict=True))
    wanted = math.sqrt(moved / sum(float(b.square().sum()) for b in before))
    assert math.isclose(change.measure(layers), wanted, rel_tol=1e-5)


def test_a_change_of_a_copy_is_that_of_its_own_weights() -> None:
    weights = [torch.ones(100)]
    one = RelativeChange(0.5)
    one.reset(weights)
    assert not one.step(1, weights, 0.1)
    other = copy.deepcopy(one)
    moved = [torch.full((100,), 2.0)]
    assert other.step(2, moved, 0.1) and not one.step(2, weights, 0.1)
    other.reset(moved)
    assert not other.step(3, moved, 0.1) and one.step(3, moved, 0.1)


def test_a_change_since_other_weights_is_refused() -> None:
    one, other = Change(), Change()
    one.remember([torch.ones(10)])
    other.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="of other weights, or of another sample; load one"):
        other.measure([torch.ones(11)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_whose_squares_would_not_fit_are_measured(dtype: torch.dtype) -> None:
    old, new = torch.full((100,), 1024.0, dtype=dtype), torch.full((100,), 1280.0, dtype=dtype)
    change = Change()
    change.remember([old])
    assert change.measure([new]) == 0.25


def test_threshold_0_fires_in_every_step_and_infinity_never() -> None:
    assert walk(RelativeChange(0.0), 20) == list(range(1, 21))
    assert walk(RelativeChange(0.0), 20, lambda _: 0.0) == list(range(1, 21))
    assert walk(RelativeChange(math.inf), 50) == []


def test_a_scaled_threshold_follows_the_learning_rate() -> None:
    def falling(step: int) -> float:
        return 0.1 if step <= 20 else 0.01

    scaled, fixed = (walk(RelativeChange(0.25, s), 60, falling) for s in (True, False))
    assert scaled[:3] == fixed[:3] and len([s for s in fixed if s > 20]) < 3
    assert len([s for s in scaled if s > 20]) >= 5


def test_weights_that_are_not_finite_do_not_fire() -> None:
    trigger = RelativeChange(0.1)
    trigger.reset([torch.ones(4)])
    assert not trigger.step(1, [torch.full((4,), math.nan)], 0.1)


def test_an_infinite_threshold_never_fires_where_weights_were_zero_either() -> None:
    trigger = RelativeChange(math.inf)
    trigger.reset([torch.zeros(4)])
    assert not trigger.step(1, [torch.ones(4)], 0.1)


def test_a_reserve_is_not_more_than_the_rate_allows() -> None:
    assert len(walk(Budget(0.08, 50), 50)) == 4


@pytest.mark.parametrize("spend", ["evenly", "change"])
def test_a_budget_keeps_its_rate_and_spends_the_reserve_at_the_end(spend: str) -> None:
    fired = walk(Budget(0.05, 1000, reserve=6, spend=spend), 1000)
    assert fired[-6:] == list(range(995, 1001))
    assert math.isclose(len(fired), 50, rel_tol=0.1)
    halves = sum(step <= 500 for step in fired), sum(500 < step <= 994 for step in fired)
    assert abs(halves[0] - halves[1]) < (3 if spend == "evenly" else 12)


def test_a_budget_goes_on_at_its_rate_after_the_planned_end() -> None:
    fired = walk(Budget(0.1, 100, reserve=4), 300)
    assert len([step for step in fired if step > 100]) == 20


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedPeriod(7),
        lambda: JitteredPeriod(7, 3),
        lambda: RelativeChange(0.3),
        lambda: Budget(0.1, 100),
        lambda: Budget(0.1, 100, spend="change"),
    ],
)
def test_a_resumed_trigger_goes_on_where_it_was(make: Callable[[], Trigger], tmp_path: Any) -> None:
    weights = [torch.ones(5)]
    generator = torch.Generator().manual_seed(1)
    one, other = make(), make()
    one.reset(weights)

    def go_on(trigger: Trigger, moves: list[Tensor], begin: int) -> list[bool]:
        reports = []
        for step, move in enumerate(moves, begin):
            weights[0] += move
            reports.append(trigger.step(step, weights, 0.1))
            if reports[-1]:
                trigger.reset(weights)
        return reports

    moves = [0.1 * torch.randn(5, generator=generator) for _ in range(100)]
    go_on(one, moves[:50], 1)
    torch.save({"trigger": one.state_dict(), "weights": weights}, tmp_path / "state")
    wanted = go_on(one, moves[50:], 51)
    kept = torch.load(tmp_path / "state")
    other.load_state_dict(kept["trigger"])
    weights = kept["weights"]
    assert go_on(other, moves[50:], 51) == wanted and any(wanted)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedPeriod(0), "period is 0"),
        (lambda: JitteredPeriod(1.5), "period is 1.5"),
        (lambda: RelativeChange(-1), "threshold is -1"),
        (lambda: RelativeChange(math.nan), "threshold is nan"),
        (lambda: RelativeChange(0.1, sample=0), "sample is 0"),
        (lambda: Budget(0, 10), "rate is 0"),
        (lambda: Budget(0.1, 10, reserve=11), "reserve is 11 of 10"),
        (lambda: Budget(0.1, 10, spend="all"), "spend is 'all'"),
    ],
)
def test_triggers_that_cannot_work_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "give" in str(caught.value) or "use" in str(caught.value)


# --- topologies ---


@pytest.mark.parametrize("name", ["random", "ring", "exponential2"])
@pytest.mark.parametrize("size", SIZES)
def test_named_graphs_have_no_direction_and_reach_everybody(name: str, size: int) -> None:
    graph = Topology(name, size)
    lists = [graph.neighbours(rank) for rank in range(size)]
    Topology(lists, size)  # accepted: symmetric, connected, no self loops
    if name == "exponential2" and size > 1:
        assert max(map(len, lists)) <= 2 * math.ceil(math.log2(size))
    for rank in range(size):
        met = {graph.choose(rank, turn) for turn in range(40)} - {None}
        assert met == set(lists[rank]) or name == "random"


@pytest.mark.parametrize(
    ("name", "size"), [("ring", 4), ("ring", 6), ("exponential2", 4), ("exponential2", 8)]
)
def test_ranks_that_choose_together_choose_one_another(name: str, size: int) -> None:
    graph = Topology(name, size)
    for turn in range(7):
        chosen = [graph.choose(rank, turn) for rank in range(size)]
        assert all(chosen[peer] == rank for rank, peer in enumerate(chosen) if peer is not None)


def test_a_hypercube_averages_all_in_log2_rounds() -> None:
    graph, values = Topology("exponential2", 8), [float(k) for k in range(8)]
    for turn in range(3):
        values = [(values[r] + values[graph.choose(r, turn) or 0]) / 2 for r in range(8)]
    assert values == [3.5] * 8


def test_random_choices_are_even_repeatable_and_differ_between_ranks() -> None:
    graph = Topology("random", 4, seed=3)
    chosen = [[graph.choose(rank, turn) for turn in range(3000)] for rank in range(4)]
    assert chosen[0] == [Topology("random", 4, seed=3).choose(0, turn) for turn in range(3000)]
    for rank in range(4):
        counts = np.bincount(np.array(chosen[rank]), minlength=4)
        assert counts[rank] == 0 and np.delete(counts, rank).min() > 850


def test_ranks_that_cannot_be_had_are_passed_over() -> None:
    for name in ("random", "ring", "exponential2"):
        graph = Topology(name, 4)
        peers = graph.neighbours(1)
        assert graph.choose(1, 0, peers) is None
        assert graph.choose(1, 0, peers[1:]) == peers[0]
    assert Topology("random", 1).choose(0, 0) is None


@pytest.mark.parametrize(
    ("graph", "size", "words"),
    [
        ("star", 4, '"star" is not known'),
        ([[1], [0]], 3, "a graph of 2 ranks for 3"),
        ([[1], [0], [3], [2]], 4, "no path from rank 0 to rank 2, 3"),
        ([[0, 1], [0]], 2, "rank 0 is its own neighbour"),
        ([[1], []], 2, "not the other way round"),
        ([[1], [0, 7]], 2, "rank 1 has a neighbour 7"),
        (np.ones((2, 3)), 2, "shape \\(2, 3\\)"),
        (np.ones((3, 3)), 3, "rank 0 is its own neighbour"),
        (np.zeros((2, 2)), 2, "no path from rank 0"),
        ([[1], [0]], 0, "size is 0"),
    ],
)
def test_graphs_that_cannot_work_are_refused(graph: Any, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Topology(graph, size)
    assert "\n" not in str(caught.value)


def test_a_matrix_and_lists_say_the_same() -> None:
    matrix = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    lists = [[1], [0, 2], [1]]
    one, other = Topology(matrix, 3), Topology(lists, 3)
    assert [one.neighbours(r) for r in range(3)] == [other.neighbours(r) for r in range(3)] == lists
    with pytest.raises(TypeError, match="expected random, ring"):
        Topology(7, 3)


# --- turns ---


def turns(place: int, period: int = 2, **options: Any) -> Turns:
    created = Turns(FixedPeriod(period), Topology("exponential2", 4), place, options.get("longest"))
    created.reset([])
    return created


def averaged(peer: int, *, asked: bool = False, committed: bool = True) -> Averaged:
    return Averaged(peer, asked, committed, 1.0)


def test_the_higher_rank_looks_for_a_request_before_it_asks() -> None:
    lower, higher = turns(0), turns(1)
    assert [lower.next(step, [], 0.1, ()) for step in (1, 2)] == [[], [1]]
    assert [higher.next(step, [], 0.1, ()) for step in (1, 2)] == [[], []] and higher.yields
    assert higher.next(3, [], 0.1, ()) == [0]  # nothing came
    higher.next(4, [], 0.1, ())
    other = turns(1)
    other.next(2, [], 0.1, ())
    other.note([averaged(0)])
    assert other.next(3, [], 0.1, ()) == []


def test_nobody_yields_to_a_rank_of_another_node() -> None:
    rank = Turns(FixedPeriod(2), Topology("exponential2", 4), 1, None, remote={0})
    rank.reset([])
    assert [rank.next(step, [], 0.1, ()) for step in (1, 2, 3)] == [[], [0], []]
    assert not rank.yields
    rank.note([averaged(0, asked=True)])  # its request has crossed the other's
    assert rank.next(4, [], 0.1, ()) == [3]


def test_a_peer_that_came_first_had_its_turn() -> None:
    rank = turns(0)
    rank.next(1, [], 0.1, ())
    rank.note([averaged(1)])
    rank.reset([])
    assert rank.next(2, [], 0.1, ()) == [] and rank.triggers == 1
    rank.next(3, [], 0.1, ())
    assert rank.next(4, [], 0.1, ()) == [2]


def test_a_refusal_is_made_good_in_the_next_step() -> None:
    rank = turns(0)
    assert rank.next(2, [], 0.1, ()) == [1]
    rank.note([averaged(1, asked=True, committed=False)])
    assert rank.next(3, [], 0.1, ()) == [2] and rank.triggers == 1


def test_a_call_with_nobody_to_ask_is_counted() -> None:
    rank = turns(0)
    assert rank.next(2, [], 0.1, (1, 2)) == [] and rank.skipped == 1


def test_turns_go_on_where_they_were() -> None:
    one, other = turns(1, 1, longest=3), turns(1, 1, longest=3)
    one.next(1, [], 0.1, ())
    other.load_state_dict(one.state_dict())
    assert [one.next(s, [], 0.1, ()) for s in range(2, 9)] == [
        other.next(s, [], 0.1, ()) for s in range(2, 9)
    ]
