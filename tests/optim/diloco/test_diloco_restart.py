"""DiLoCo after ranks were lost or have joined."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_jobs import JOB_S, lines, local_training
from hsgd import Comm, HsgdError
from hsgd.optim import DiLoCo
from ranks import Ranks, Seat, meeting_point

__all__: list[str] = []

pytestmark = pytest.mark.long


def train(diloco: DiLoCo, params: list[nn.Parameter], worker: int, steps: range) -> None:
    for step in steps:
        diloco.zero_grad()
        sum(((p - worker - step / 7) ** 2).sum() for p in params).backward()
        diloco.step()


def made(comm: Comm | None, **options: Any) -> tuple[DiLoCo, list[nn.Parameter]]:
    params = [nn.Parameter(torch.full((size,), 0.5)) for size in (5, 30)]
    adam = torch.optim.Adam(params, lr=0.05)
    return DiLoCo(adam, params, comm, sync_every=4, **options), params


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def outer_of(diloco: DiLoCo) -> list[list[float]]:
    own = diloco.state_dict()["diloco"]
    return [one["outer_weights"].tolist() for one in own["fragments"]]


def lose_one_and_win_one(seat: Seat, first: str, second: str, options: dict[str, Any]) -> Any:
    """Ranks 0 to 2 train, rank 2 dies, and rank 3 joins ranks 0 and 1."""
    if seat.rank == 3:
        diloco, params = made(None, **options)
        with pytest.raises(HsgdError, match=r"^DiLoCo: it has no ranks"):
            diloco.step()
        before = None
    else:
        diloco, params = made(Comm.local(first, seat.rank, 3), **options)
        train(diloco, params, seat.rank, range(1, 9))  # nothing is under way then
        if seat.rank == 2:
            signal.raise_signal(signal.SIGKILL)
        with pytest.raises(HsgdError, match="rank 2"):
            train(diloco, params, seat.rank, range(9, 40))
        before = outer_of(diloco)
    place = {0: 0, 1: 1, 3: 2}[seat.rank]
    diloco.restart(Comm.local(second, place, 3))
    at_start = [p.tolist() for p in params]
    steps = diloco.metrics().steps
    train(diloco, params, place, range(20, 20 + 12 - steps % 4))
    diloco.synchronize_weights()
    end = [p.tolist() for p in params]
    diloco.close()
    return before, at_start, steps, end


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}, {"compression": "int8"}])
def test_the_others_go_on_from_the_outer_weights_and_a_new_rank_gets_them(
    options: dict[str, Any],
) -> None:
    points = meeting_point(), meeting_point()
    with Ranks(4) as ranks:
        ranks.start(lose_one_and_win_one, *points, {"group": None, **options})
        rest = ranks.finish(on=[0, 1, 3])
    assert all(outcome.error is None for outcome in rest), [outcome.trace for outcome in rest]
    (before, *zero), (same, *one), (nothing, *new) = (outcome.value for outcome in rest)
    assert nothing is None and before == same
    assert zero == one == new
    at_start, steps, end = zero
    assert flat(at_start) == flat(before) and end != at_start
    assert 9 <= steps <= 13


def go_back(seat: Seat, first: str, second: str) -> Any:
    """Rank 1 was two rounds ahead of what both have saved."""
    diloco, params = made(Comm.local(first, seat.rank, 2), group=None)
    train(diloco, params, seat.rank, range(1, 5))
    saved = copy.deepcopy(diloco.state_dict())
    moments = copy.deepcopy(saved["state"][0])
    train(diloco, params, seat.rank, range(5, 13))
    diloco.restart(Comm.local(second, seat.rank, 2), copy.deepcopy(saved))
    now = diloco.state_dict()
    found = [p.tolist() for p in params], outer_of(diloco), now["diloco"]["steps"]
    assert all((now["state"][0][name] == moments[name]).all() for name in moments)
    kept = [one["outer_weights"].tolist() for one in saved["diloco"]["fragments"]]
    diloco.close()
    return found, kept


def test_it_goes_back_to_a_saved_state_and_the_inner_state_stays_each_ranks() -> None:
    with Ranks(2) as ranks:
        (found, kept), other = ranks.run(go_back, meeting_point(), meeting_point())
    assert other == (found, kept)
    weights, outer, steps = found
    assert outer == kept and flat(weights) == flat(kept) and steps == 4


def workers_of_two(seat: Seat, first: str, second: str) -> Any:
    """Of two workers of two ranks each first one is lost, and two ranks join: who has trained has
    no outer weights.
    """
    os.environ["HSGD_CHECK_REPLICAS"] = "1"  # the ranks of a group stay alike
    if seat.rank < 4:
        diloco, params = made(Comm.local(first, seat.rank, 4), group=2)
        train(diloco, params, seat.rank // 2, range(1, 5))
    else:
        diloco, params = made(None, group=2)
    if seat.rank in (0, 2):
        signal.raise_signal(signal.SIGKILL)
    weights = [p.tolist() for p in params]
    diloco.restart(Comm.local(second, (4, 1, 3, 5).index(seat.rank), 4))
    at_start = [p.tolist() for p in params]
    train(diloco, params, 0, range(5, 9))
    diloco.close()
    return weights, at_start, [p.tolist() for p in params], diloco.metrics().steps


def test_without_outer_weights_they_are_the_weights_of_a_rank_that_has_trained() -> None:
    with Ranks(6) as ranks:
        ranks.start(workers_of_two, meeting_point(), meeting_point())
        rest = ranks.finish(on=[1, 3, 4, 5])
    assert all(outcome.error is None for outcome in rest), [outcome.trace for outcome in rest]
    first, *others = (outcome.value for outcome in rest)
    weights, at_start, end, steps = first
    assert at_start == weights and end != weights and steps == 8
    assert all(other[1:] == (at_start, end, steps) for other in others)


def lose_a_rank_of_a_worker(seat: Seat, path: str, victim: int, eager: bool) -> Any:
    diloco, params = made(Comm.local(path, seat.rank, 4), group=2, eager=eager)
    train(diloco, params, seat.rank, range(1, 5))
    if seat.rank == victim:
        signal.raise_signal(signal.SIGKILL)
    with pytest.raises(HsgdError) as caught:
        train(diloco, params, seat.rank, range(5, 20))
    assert caught.value.rank == -1  # rank 1 of a worker is another one of the job
    diloco.close()


@pytest.mark.parametrize(("victim", "eager"), [(3, False), (3, True), (2, True)])
def test_the_other_workers_hear_of_a_rank_that_one_has_lost(victim: int, eager: bool) -> None:
    with Ranks(4) as ranks:  # with the default deadline, half an hour
        ranks.start(lose_a_rank_of_a_worker, meeting_point(), victim, eager)
        rest = ranks.finish(on=[rank for rank in range(4) if rank != victim])
    assert all(outcome.error is None for outcome in rest), [outcome.trace for outcome in rest]


def join_with_other_values(seat: Seat, path: str) -> Any:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    for p in net[0].parameters():
        p.requires_grad_(False)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data.fill_(seat.rank)
    sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    diloco = DiLoCo(sgd, net, None, group=None)
    diloco.restart(Comm.local(path, seat.rank, 2))
    diloco.close()
    return [float(tensor.float().mean()) for tensor in (*net.parameters(), *net.buffers())]


def test_frozen_weights_and_buffers_are_sent_too() -> None:
    with Ranks(2) as ranks:
        own, other = ranks.run(join_with_other_values, meeting_point())
    assert set(own) == set(other) == {0.0}


def fail_and_try_again(seat: Seat, first: str, second: str) -> Any:
    diloco, params = made(Comm.local(first, seat.rank, 2), group=None)
    train(diloco, params, seat.rank, range(1, 7))
    outer = outer_of(diloco)
    with pytest.raises(TypeError, match="comm is a str"):
        diloco.restart("none")
    with pytest.raises(HsgdError, match="no ranks"):
        diloco.step()
    sent = diloco.metrics().node_bytes
    diloco.restart(Comm.local(second, seat.rank, 2))
    assert diloco.metrics().node_bytes == sent > 0  # each exchange counts once
    weights = [p.tolist() for p in params]
    steps = diloco.metrics().steps
    diloco.close()
    return outer, weights, steps


def test_after_a_restart_that_failed_another_goes_on_from_the_same_weights() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(fail_and_try_again, meeting_point(), meeting_point())
    assert first == second
    outer, weights, steps = first
    assert flat(weights) == flat(outer) and steps == 6


@pytest.mark.timeout(3 * JOB_S)
def test_an_elastic_job_loses_a_round_and_a_new_rank_gets_the_outer_weights(
    tmp_path: Path,
) -> None:
    output = local_training(tmp_path, "diloco", {"sync_every": 5, "group": None})
    entered = lines(output, "enter")
    assert entered.count(["3", "0", "0"]) == 3
    back = [words for words in entered if words[1:] == ["15", "15"]]
    assert len(back) >= 2
    ends = lines(output, "done")
    assert len(ends) == 3 and len({tuple(words[3:]) for words in ends}) == 1
    taken = sorted(int(words[1]) for words in ends)
    assert all(words[0] == "3" and words[2] == "40" for words in ends)
    # The others hear of it in the exchange of step 20: steps 16 to 19 were taken twice.
    assert taken[0] in (15, 20, 25) and taken[1] == taken[2] == 44
