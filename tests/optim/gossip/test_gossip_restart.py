"""Gossip after ranks were lost or have joined, and over a process group."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_jobs import HSGD, JOB_S, lines, local_training
from hsgd import ClosedError, Comm, HsgdError
from hsgd.optim import FixedPeriod, Gossip, JitteredPeriod
from ranks import Ranks, Seat, meeting_point
from toolkit.processes import launch_environ, run_marked
from torch_job import job

__all__: list[str] = []

pytestmark = pytest.mark.long

PERIOD = 4


def train(gossip: Gossip, params: list[nn.Parameter], worker: int, steps: range) -> None:
    for step in steps:
        gossip.zero_grad()
        sum(((p - worker - step / 7) ** 2).sum() for p in params).backward()
        gossip.step()


def made(
    comm: Any, start: float = 0.5, trigger: Any = None, **options: Any
) -> tuple[Gossip, list[nn.Parameter]]:
    params = [nn.Parameter(torch.full((size,), start)) for size in (5, 30)]
    adam = torch.optim.Adam(params, lr=0.05)
    return Gossip(adam, params, comm, trigger or FixedPeriod(PERIOD), **options), params


def flat(params: list[nn.Parameter]) -> np.ndarray:
    return torch.cat([p.detach() for p in params]).numpy().copy()


def velocity(gossip: Gossip) -> np.ndarray:
    outer = gossip.state_dict()["gossip"].get("outer")
    return np.zeros(0) if outer is None else torch.cat(outer["velocity"]).numpy()


def saved_by_another_job(trigger: Any, options: dict[str, Any]) -> dict[str, Any]:
    gossip, params = made(Comm.local(meeting_point(), 0, 1), 9.0, copy.copy(trigger), **options)
    with gossip:
        train(gossip, params, 5, range(1, 31))
        return copy.deepcopy(gossip.state_dict())


def lose_one_and_win_one(
    seat: Seat, paths: list[str], trigger: Any, loads: bool, options: dict[str, Any]
) -> Any:
    """Ranks 0 to 2 train, rank 2 dies, and rank 3 joins ranks 0 and 1. loads: it has loaded a state
    of an older job before.
    """
    if seat.rank == 3:
        gossip, params = made(None, 9.0, trigger, **options)
        for call in (gossip.step, gossip.global_average, gossip.consensus_distance):
            with pytest.raises(ClosedError, match=r"^Gossip: it has no ranks.*restart\(comm\)"):
                call()
        if loads:
            gossip.load_state_dict(saved_by_another_job(trigger, options))
    else:
        comm = Comm.local(paths[0], seat.rank, 3)
        gossip, params = made(comm, 0.5, trigger, **options)
        train(gossip, params, seat.rank, range(1, 11))
        gossip.settle()
        if seat.rank == 2:
            signal.raise_signal(signal.SIGKILL)
    before, speed = flat(params), velocity(gossip)
    earlier = gossip.metrics()
    place = {0: 0, 1: 1, 3: 2}[seat.rank]
    gossip.restart(Comm.local(paths[1], place, 3))
    at_start = flat(params), velocity(gossip), gossip.metrics().steps
    gossip.settle()  # or who is fast would change the others
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody is lost
        train(gossip, params, place, range(11, 11 + 10 * PERIOD))
        gossip.settle()
    now = gossip.metrics()
    assert now.lost == () and now.messages >= earlier.messages
    met = now.averaged - earlier.averaged, now.triggers - earlier.triggers
    alone = now.skipped - earlier.skipped
    gossip.close()
    return before, speed, *at_start, met, alone


@pytest.mark.parametrize(
    ("trigger", "loads", "options"),
    [
        (None, False, {"outer": "noloco"}),
        (JitteredPeriod(3), False, {"outer": "noloco"}),
        (JitteredPeriod(3), True, {"outer": "noloco"}),
        (None, True, {"patience_s": 20.0}),
        (None, False, {"momentum": "average", "patience_s": 20.0}),
    ],
)
def test_ranks_go_on_from_the_mean_of_those_that_have_trained(
    trigger: Any, loads: bool, options: dict[str, Any]
) -> None:
    points = [meeting_point(), meeting_point()]
    with Ranks(4) as ranks:
        ranks.start(lose_one_and_win_one, points, trigger, loads, options)
        rest = ranks.finish(on=[0, 1, 3])
    assert all(outcome.error is None for outcome in rest), [outcome.trace for outcome in rest]
    zero, one, new = (outcome.value for outcome in rest)
    assert not np.array_equal(zero[0], one[0])
    for _, _, weights, speed, steps, (averaged, _), alone in (zero, one, new):
        np.testing.assert_allclose(weights, (zero[0] + one[0]) / 2, rtol=1e-6)
        np.testing.assert_allclose(speed, (zero[1] + one[1]) / 2, rtol=1e-6)
        assert steps == 10 and averaged > 0 and alone < 14
    if "outer" in options:
        rounds = zero[5][1]
        assert rounds >= 10 and one[5][1] == new[5][1] == rounds
        # Of three ranks two meet in each round, and none waits in vain.
        assert sum(each[5][0] for each in (zero, one, new)) == 2 * rounds


def go_back(seat: Seat, first: str, second: str) -> Any:
    gossip, params = made(Comm.local(first, seat.rank, 2), outer="noloco")
    train(gossip, params, seat.rank, range(1, 6))
    saved, weights = copy.deepcopy(gossip.state_dict()), flat(params)
    train(gossip, params, seat.rank, range(6, 15))
    load(params, weights)
    gossip.restart(Comm.local(second, seat.rank, 2), copy.deepcopy(saved))
    now = gossip.state_dict()
    moments = saved["state"][0]
    assert all((now["state"][0][name] == moments[name]).all() for name in moments)
    found = flat(params), now["gossip"]["steps"], now["gossip"]["outer"]["rounds"]
    speed = velocity(gossip), torch.cat(saved["gossip"]["outer"]["velocity"]).numpy()
    gossip.close()
    return weights, found, speed


def test_it_goes_back_to_a_saved_state_and_the_inner_state_stays_each_ranks() -> None:
    with Ranks(2) as ranks:
        every = ranks.run(go_back, meeting_point(), meeting_point())
    mean = (every[0][0] + every[1][0]) / 2
    for _, (weights, steps, rounds), (speed, own) in every:
        np.testing.assert_allclose(weights, mean, rtol=1e-6)
        assert (steps, rounds) == (5, 1)
        np.testing.assert_allclose(speed, own, rtol=1e-6)  # in a pair velocities are alike


def fail_and_try_again(seat: Seat, first: str, second: str) -> Any:
    gossip, params = made(Comm.local(first, seat.rank, 2), outer="noloco")
    train(gossip, params, seat.rank, range(1, 7))
    sent, weights, speed = gossip.metrics().messages, flat(params), velocity(gossip)
    with pytest.raises(TypeError, match="comm is a str"):
        gossip.restart("none")
    with pytest.raises(HsgdError, match="no ranks"):
        gossip.step()
    with pytest.raises(ValueError, match="a whole state"):
        gossip.restart(None, {"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        gossip.restart(None, {"state": {}, "param_groups": [], "gossip": {}})
    gossip.restart(Comm.local(second, seat.rank, 2))
    assert gossip.metrics().messages == sent > 0
    after = flat(params), velocity(gossip)
    gossip.close()
    return weights, speed, after


def test_after_a_restart_that_failed_another_goes_on() -> None:
    with Ranks(2) as ranks:
        every = ranks.run(fail_and_try_again, meeting_point(), meeting_point())
    for index in (0, 1):
        mean = (every[0][index] + every[1][index]) / 2
        assert np.abs(mean).max() > 0
        for _, _, after in every:
            np.testing.assert_allclose(after[index], mean, rtol=1e-6)


def load(params: list[nn.Parameter], values: np.ndarray) -> None:
    with torch.no_grad():
        for p, own in zip(params, np.split(values, [5]), strict=True):
            p.copy_(torch.from_numpy(own))


def fail_after_the_restart(seat: Seat, paths: list[str], newcomers: set[int]) -> Any:
    """All go back to what they had before a restart that succeeded, as where a rank is lost before
    the rest of the state is sent.
    """
    is_new = seat.rank in newcomers
    comm = None if is_new else Comm.local(paths[0], seat.rank, 3 - len(newcomers))
    gossip, params = made(comm, 10.0 * seat.rank if is_new else 0.5, outer="noloco")
    if not is_new:
        train(gossip, params, seat.rank, range(1, 2 * PERIOD))
    saved, own, found = copy.deepcopy(gossip.state_dict()), flat(params), []
    for path in paths[1:]:
        load(params, own)
        gossip.restart(Comm.local(path, seat.rank, 3), copy.deepcopy(saved))
        found.append(flat(params))
    gossip.close()
    return found


@pytest.mark.parametrize("newcomers", [{2}, {0, 1, 2}])
def test_what_a_restart_made_of_a_new_rank_does_not_count_where_it_goes_back(
    newcomers: set[int],
) -> None:
    with Ranks(3) as ranks:
        every = ranks.run(fail_after_the_restart, [meeting_point() for _ in range(3)], newcomers)
    for first, second in every:
        assert np.array_equal(first, every[0][0]) and np.array_equal(second, first)


def diverge(seat: Seat, first: str, second: str, diverged: set[int]) -> Any:
    gossip, params = made(Comm.local(first, seat.rank, 3), patience_s=20.0)
    train(gossip, params, seat.rank, range(1, 4))
    if seat.rank in diverged:
        params[0].data[2] = float("nan")
    before = flat(params)
    gossip.restart(Comm.local(second, seat.rank, 3))
    after = flat(params)
    gossip.close()
    return before, after


@pytest.mark.parametrize("diverged", [{1}, {0, 1, 2}])
def test_models_that_are_not_finite_do_not_count(diverged: set[int]) -> None:
    with Ranks(3) as ranks:
        every = ranks.run(diverge, meeting_point(), meeting_point(), diverged)
    good = [before for rank, (before, _) in enumerate(every) if rank not in diverged]
    wanted = np.mean(good, axis=0) if good else every[0][0]
    for _, after in every:
        np.testing.assert_allclose(after, wanted, rtol=1e-6)


def groups_of_two(seat: Seat, first: str, second: str, order: list[int], trigger: Any) -> Any:
    """Four ranks in two groups train; those that `order` leaves out are lost, and others join."""
    os.environ["HSGD_CHECK_REPLICAS"] = "1"  # the ranks of a group stay alike
    options = {"outer": "noloco", "hierarchical": True, "group_size": 2, "trigger": trigger}
    comm = Comm.local(first, seat.rank, 4) if seat.rank < 4 else None
    gossip, params = made(comm, 0.5 if seat.rank < 4 else 9.0, **options)
    if seat.rank < 4:
        train(gossip, params, seat.rank, range(1, 2 * PERIOD + 1))
    if seat.rank not in order:
        signal.raise_signal(signal.SIGKILL)
    before, earlier = flat(params), gossip.metrics()
    gossip.restart(Comm.local(second, order.index(seat.rank), 4))
    after = flat(params)
    train(gossip, params, seat.rank, range(2 * PERIOD + 1, 6 * PERIOD + 1))
    end = flat(params)
    gossip.close()
    now = gossip.metrics()
    met = now.triggers - earlier.triggers, now.averaged - earlier.averaged
    return before, after, end, now.steps, met


@pytest.mark.parametrize("order", [[4, 1, 3, 5], [0, 1, 3, 5], [4, 1, 2, 3]])
@pytest.mark.parametrize("trigger", [FixedPeriod(PERIOD), JitteredPeriod(3)])
def test_groups_that_lost_their_first_ranks_go_on(order: list[int], trigger: Any) -> None:
    with Ranks(6) as ranks:
        ranks.start(groups_of_two, meeting_point(), meeting_point(), order, trigger)
        rest = ranks.finish(on=order)
    assert all(outcome.error is None for outcome in rest), [outcome.trace for outcome in rest]
    found = dict(zip(order, (outcome.value for outcome in rest), strict=True))
    mean = np.mean([found[rank][0] for rank in order if rank < 4], axis=0)
    for _, after, end, steps, _ in found.values():
        np.testing.assert_allclose(after, mean, rtol=1e-6)
        assert steps == 6 * PERIOD and not np.array_equal(after, end)
    first, second = (found[rank][4] for rank in order[::2])
    assert first == second and first[0] == first[1] >= 4  # they call together, and meet


def other_steps(seat: Seat, first: str, second: str) -> Any:
    """Rank 1 goes back further than rank 0."""
    gossip, params = made(
        Comm.local(first, seat.rank, 2), trigger=JitteredPeriod(3, seed=seat.rank)
    )
    saved = []
    for step in range(1, 11):
        train(gossip, params, seat.rank, range(step, step + 1))
        saved.append(copy.deepcopy(gossip.state_dict()))
    gossip.restart(Comm.local(second, seat.rank, 2), saved[9 if seat.rank == 0 else 3])
    own = gossip.state_dict()["gossip"]
    gossip.close()
    return own["steps"], own["turns"]["trigger"], saved[9]["gossip"]["turns"]["trigger"]


def test_ranks_that_have_taken_other_steps_take_the_trigger_of_the_furthest() -> None:
    with Ranks(2) as ranks:
        (steps, trigger, saved), other = ranks.run(other_steps, meeting_point(), meeting_point())
    assert steps == 10 and trigger == saved and other[:2] == (steps, trigger)


def abort_in_a_round(seat: Seat, path: str) -> bool:
    comm = Comm.local(path, seat.rank, 2)
    gossip, params = made(comm, outer="noloco")  # waits for half an hour
    if seat.rank == 0:
        ending = threading.Timer(0.5, gossip.abort)
        ending.start()
        train(gossip, params, 0, range(1, 2 * PERIOD + 1))
        ending.join()
    comm.barrier()
    gossip.close()
    return gossip.metrics().averaged == 0


def test_a_rank_that_waits_for_its_partner_goes_on_after_abort() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(abort_in_a_round, meeting_point()) == [True, True]


def close_after_abort(seat: Seat, path: str) -> None:
    comm = Comm.local(path, seat.rank, 2)
    gossip, params = made(comm, trigger=FixedPeriod(1))
    if seat.rank == 0:
        train(gossip, params, 0, range(1, 4))  # asks, and nobody answers
        gossip.abort()
        gossip.close()
        with pytest.raises(ClosedError, match="this Gossip is closed"):
            gossip.step()
    comm.barrier()
    gossip.close()


def test_close_after_abort_waits_for_no_answer() -> None:
    with Ranks(2) as ranks:
        ranks.run(close_after_abort, meeting_point())


def sync_a_state(seat: Seat, path: str) -> Any:
    with job(seat, path, 2) as hvd:
        net = nn.Linear(2, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=0.0)
        options = {"trigger": FixedPeriod(100)}
        gossip = hvd.DistributedOptimizer(sgd, strategy="gossip", strategy_options=options)
        net.weight.data.fill_(seat.rank + 1.0)
        net(torch.ones(1, 2)).sum().backward()
        gossip.step()
        state = hvd.elastic.TorchState(net, gossip, step=seat.rank)
        state.sync()
        gossip.close()
        return net.weight.tolist(), state.step


def test_a_state_keeps_the_mean_and_not_the_model_of_rank_0() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(sync_a_state, meeting_point()) == [([[1.5, 1.5]], 0)] * 2


def over_two_jobs(seat: Seat, first: str, second: str) -> Any:
    params = [nn.Parameter(torch.full((5,), float(seat.rank)))]
    sgd = torch.optim.SGD(params, lr=0.05)
    with job(seat, first, 2) as hvd:
        options = {"outer": "noloco", "trigger": FixedPeriod(2)}
        gossip = hvd.DistributedOptimizer(sgd, strategy="gossip", strategy_options=options)
        train(gossip, params, seat.rank, range(1, 4))
    with pytest.raises(HsgdError, match=r"its communicator was closed.*restart\(comm\)"):
        gossip.step()
    saved = gossip.state_dict()["gossip"]["outer"]["rounds"]
    gossip.load_state_dict(copy.deepcopy(gossip.state_dict()))
    assert gossip.state_dict()["gossip"]["outer"]["rounds"] == saved
    gossip.load_state_dict(sgd.state_dict())
    assert "outer" not in gossip.state_dict()["gossip"]
    gossip.restart(Comm.local(second, seat.rank, 2))
    at_start = flat(params)
    train(gossip, params, seat.rank, range(4, 7))
    gossip.close()
    return at_start, saved, gossip.metrics().averaged


def test_after_shutdown_it_goes_on_with_another_communicator() -> None:
    with Ranks(2) as ranks:
        (weights, *zero), (same, *one) = ranks.run(over_two_jobs, meeting_point(), meeting_point())
    assert np.array_equal(weights, same) and zero == one == [1, 3]


MADE_IN_THE_FUNCTION = """
import torch
import hsgd.torch as hvd

hvd.init()
state = hvd.elastic.TorchState(step=0)

@hvd.elastic.run
def train(state):
    for strategy in ("gossip", "diloco"):
        model = torch.nn.Linear(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        with hvd.DistributedOptimizer(sgd, strategy=strategy, model=model) as optimizer:
            model(torch.eye(3)).sum().backward()
            optimizer.step()
            print(f"|{strategy} {hvd.size()} {optimizer.metrics().steps}|", flush=True)

train(state)
"""


NOT_IN_THE_STATE = """
import torch
import hsgd.torch as hvd

hvd.init()
model = torch.nn.Linear(3, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(sgd, strategy="gossip", model=model)

@hvd.elastic.run
def train(state):
    optimizer.step()

train(hvd.elastic.TorchState(model, step=0))
"""


def test_an_optimizer_that_no_state_has_is_an_error_and_no_endless_restart(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NOT_IN_THE_STATE)
    command = [*HSGD, "run", "-np", "2", "--min-np", "2", sys.executable, str(script)]
    done = run_marked(command, launch_environ(), JOB_S)
    assert done.returncode > 0 and "Gossip: it has no ranks" in done.stderr, done.stderr[-3000:]


def test_in_an_elastic_job_it_may_be_made_where_all_ranks_are(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MADE_IN_THE_FUNCTION)
    command = [*HSGD, "run", "-np", "2", "--min-np", "2", sys.executable, str(script)]
    done = run_marked(command, launch_environ(), JOB_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for strategy in ("gossip", "diloco"):
        assert lines(done.stdout, strategy) == [["2", "1"]] * 2


@pytest.mark.timeout(3 * JOB_S)
@pytest.mark.parametrize("outer", ["noloco", None])
def test_an_elastic_job_goes_on_with_other_ranks(tmp_path: Path, outer: str | None) -> None:
    # A patient rank would wait for one that is in commit() and answers nothing there.
    output = local_training(tmp_path, "gossip", {"outer": outer, "max_interval": 5})
    entered = lines(output, "enter")
    assert entered.count(["3", "0", "0"]) == 3
    # Nobody waits for the lost rank before commit(), which saves first.
    assert len([words for words in entered if words[1:] == ["20", "20"]]) >= 2
    ends = lines(output, "done")
    assert len(ends) == 3 and len({tuple(words[3:]) for words in ends}) == 1
    assert all(words[0] == "3" and words[2] == "40" for words in ends)
    taken = sorted(int(words[1]) for words in ends)
    assert taken[0] in (15, 20) and taken[1] == taken[2] == 40  # nothing twice
