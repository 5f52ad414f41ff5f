"""NoLoCo against its formula in NumPy, what it saves, and partners that are late or dead."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hsgd.config import Config
from hsgd.optim import FixedPeriod, Gossip, JitteredPeriod, NoLoCo
from hsgd.optim.gossip.pair_rounds import PairRounds, partner_of
from lost_partner import without_rank_1
from noisy_quadratics import gradient, initial
from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

SIZES = (7, 40, 12)
RATE, PERIOD, ROUNDS, SEED = 0.05, 3, 50, 5


def in_numpy(size: int, rounds: int, alpha: float, beta: float, gamma: float) -> np.ndarray:
    """Each worker's weights after all rounds, in float64: phi of arXiv:2506.10911."""
    phi = np.stack([np.concatenate([initial(i, n) for i, n in enumerate(SIZES)])])
    phi = np.repeat(phi, size, axis=0)
    delta, theta = np.zeros_like(phi), phi.copy()
    cuts = np.cumsum(SIZES)[:-1]
    for step in range(1, rounds * PERIOD + 1):
        for worker in range(size):
            parts = np.split(theta[worker], cuts)
            found = [gradient(part, worker, step, i) for i, part in enumerate(parts)]
            theta[worker] = theta[worker] - RATE * np.concatenate(found)
        if step % PERIOD:
            continue
        partners = [partner_of(worker, size, step // PERIOD, SEED) for worker in range(size)]
        pairs = [[w] if p is None else [w, p] for w, p in enumerate(partners)]
        progress, before = theta - phi, phi.copy()
        for worker, pair in enumerate(pairs):
            pull = before[pair].mean(axis=0) - before[worker]
            moved = progress[pair].mean(axis=0)
            delta[worker] = alpha * delta[worker] + beta * moved + gamma * pull
            phi[worker] = before[worker] + delta[worker]
        theta = phi.copy()
    return theta


def toy() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.tensor(initial(i, n), dtype=torch.float32)) for i, n in enumerate(SIZES)
    ]


def flat(params: list[nn.Parameter]) -> np.ndarray:
    return torch.cat([p.detach() for p in params]).numpy().copy()


def take_steps(params: list[nn.Parameter], gossip: Gossip, worker: int, steps: range) -> None:
    for step in steps:
        for index, parameter in enumerate(params):
            found = gradient(parameter.detach().numpy(), worker, step, index)
            parameter.grad = torch.from_numpy(found)
        gossip.step()


def run_toy(seat: Seat, path: str, size: int, outer: Any, steps: int) -> tuple[np.ndarray, Any]:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    comm = seat.comm(path, size)
    with Gossip(sgd, params, comm, FixedPeriod(PERIOD), outer=outer, seed=SEED) as gossip:
        take_steps(params, gossip, seat.rank, range(1, steps + 1))
        return flat(params), gossip.metrics()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("outer", "constants"),
    [("noloco", (0.5, 0.7, 0.7)), (NoLoCo(lr=0.9, momentum=0.3, pull=0.4), (0.3, 0.9, 0.4))],
)
def test_it_is_the_formula_of_the_paper(
    pools: Callable[[int], Ranks], size: int, outer: Any, constants: tuple[float, float, float]
) -> None:
    wanted = in_numpy(size, ROUNDS, *constants)
    found = pools(size).run(run_toy, meeting_point(), size, outer, ROUNDS * PERIOD)
    for worker, (weights, metrics) in enumerate(found):
        scale = max(1.0, float(np.abs(wanted[worker]).max()))
        assert np.abs(weights - wanted[worker]).max() <= 1e-6 * scale
        assert metrics.triggers == ROUNDS == metrics.averaged + metrics.skipped
    assert size <= 2 or np.abs(wanted[0] - wanted[1]).max() > 0.01  # workers are apart


def over_a_process_group(seat: Seat, folder: str, backend: str) -> np.ndarray:
    from torch import distributed as dist

    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=2)
    params = toy()
    sgd, group = torch.optim.SGD(params, lr=RATE), dist.group.WORLD
    trigger = FixedPeriod(PERIOD)
    with Gossip(sgd, params, None, trigger, outer="noloco", seed=SEED) as gossip:
        gossip.restart(group)
        take_steps(params, gossip, seat.rank, range(1, ROUNDS * PERIOD + 1))
    dist.destroy_process_group()
    return flat(params)


@pytest.mark.parametrize("backend", ["gloo", "hsgd"])
def test_a_process_group_will_do(tmp_path: Path, backend: str) -> None:
    wanted = in_numpy(2, ROUNDS, 0.5, 0.7, 0.7)
    with Ranks(2) as ranks:
        for worker, weights in enumerate(ranks.run(over_a_process_group, str(tmp_path), backend)):
            scale = max(1.0, float(np.abs(wanted[worker]).max()))
            assert np.abs(weights - wanted[worker]).max() <= 1e-6 * scale


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_each_round_is_a_matching_and_all_meet_in_the_end(size: int) -> None:
    met = set()
    for number in range(1, 200):
        partners = [partner_of(rank, size, number, SEED) for rank in range(size)]
        alone = [rank for rank, partner in enumerate(partners) if partner is None]
        assert len(alone) == size % 2
        for rank, partner in enumerate(partners):
            if partner is not None:
                assert partner != rank and partners[partner] == rank
                met.add((rank, partner))
    assert len(met) == size * (size - 1)


def drift(seat: Seat, path: str, pull: float) -> float:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    outer = NoLoCo(pull=pull)
    with Gossip(sgd, params, seat.comm(path, 4), FixedPeriod(PERIOD), outer=outer) as gossip:
        take_steps(params, gossip, seat.rank, range(1, 30 * PERIOD + 1))
        return gossip.consensus_distance()


def test_the_pull_holds_workers_together(pools: Callable[[int], Ranks]) -> None:
    (pulled, *_), (free, *_) = (pools(4).run(drift, meeting_point(), pull) for pull in (0.7, 0.0))
    assert pulled < free / 2


def resume(seat: Seat, path: str, size: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """A run without a break, and one that was saved in the middle of its local steps."""
    found = []
    for pause in (None, steps // 2 + 1):
        params, state = toy(), None
        for part in (
            [range(1, steps + 1)]
            if pause is None
            else [
                range(1, pause + 1),
                range(pause + 1, steps + 1),
            ]
        ):
            kept = flat(params)
            params = toy()
            sgd = torch.optim.SGD(params, lr=RATE, momentum=0.9)
            trigger = JitteredPeriod(PERIOD, seed=3)
            with Gossip(
                sgd, params, seat.comm(path, size), trigger, outer="noloco", seed=SEED
            ) as gossip:
                if state is not None:
                    with torch.no_grad():
                        for parameter, own in zip(
                            params, np.split(kept, np.cumsum(SIZES)[:-1]), strict=True
                        ):
                            parameter.copy_(torch.from_numpy(own))
                    gossip.load_state_dict(state)
                take_steps(params, gossip, seat.rank, part)
                state = copy.deepcopy(gossip.state_dict())
        found.append(flat(params))
    return found[0], found[1]


def test_a_saved_run_goes_on_bit_for_bit(pools: Callable[[int], Ranks]) -> None:
    for whole, resumed in pools(3).run(resume, meeting_point(), 3, 40):
        assert np.array_equal(whole, resumed)


def swap_late(seat: Seat, path: str, remote: bool) -> list[Any]:
    """Rank 1 misses round 1, and comes to round 2 with its own vectors."""
    comm = seat.comm(path, 2)
    mine = torch.full((5,), float(seat.rank))
    rounds = PairRounds(comm, [mine], 20.0, remote_only=remote)
    found = []
    if seat.rank == 0:
        found.append(rounds.swap(1, 1, [mine], 0.05))
    comm.barrier()  # rank 1 begins when rank 0 has given up
    for number in (1, 2) if seat.rank == 1 else (2,):
        patience_s = 0.05 if number == 1 else 20.0
        got = rounds.swap(number, 1 - seat.rank, [mine + 10 * number], patience_s)
        found.append(None if got is None else got[0].tolist())
    comm.barrier()
    rounds.close()
    return found


@pytest.mark.parametrize("remote", [False, True])
def test_a_late_partner_costs_its_round_only(pools: Callable[[int], Ranks], remote: bool) -> None:
    first, second = pools(2).run(swap_late, meeting_point(), remote)
    assert first == [None, [21.0] * 5]
    # what rank 0 had sent for round 1 is there; whether it had gone on alone is not known
    assert second[0] == [0.0] * 5 and second[1] == [20.0] * 5


def train_on(seat: Seat, path: str) -> tuple[list[str], Any]:
    comm = seat.comm(path, 3, Config(timeout_s=30.0))
    params = toy()
    gossip = Gossip(torch.optim.SGD(params, lr=RATE), params, comm, FixedPeriod(1), outer="noloco")
    step, after = 0, 0
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        deadline = time.monotonic() + 50
        while not seat.pipe.poll() and time.monotonic() < deadline:
            step += 1
            before = gossip.metrics()
            take_steps(params, gossip, seat.rank, range(step, step + 1))
            if step == 10:
                seat.tell("trains")
            if before.lost:
                after += gossip.metrics().averaged - before.averaged
                if after == 20:
                    seat.tell("goes on")
    assert seat.pipe.recv() == "enough"
    gossip.close()
    return [str(one.message) for one in raised], gossip.metrics()


def test_a_partner_that_dies_is_left_out_with_a_warning() -> None:
    _, found = without_rank_1(train_on)
    for report, metrics in found:
        assert 1 in metrics.lost and metrics.refused > 0
        (line,) = [line for line in report if "goes on without rank 1" in line]
        assert "\n" not in line


def meet_diverged(seat: Seat, path: str) -> list[bool]:
    params = toy()
    comm = seat.comm(path, 2)
    sgd = torch.optim.SGD(params, lr=RATE)
    with Gossip(sgd, params, comm, FixedPeriod(1), outer="noloco") as gossip:
        for step in range(1, 5):
            for parameter in params:
                parameter.grad = torch.zeros_like(parameter)
                if seat.rank == 1 and step == 2:
                    parameter.grad.fill_(float("nan"))
            gossip.step()
        return [bool(torch.isfinite(parameter).all()) for parameter in params]


def test_a_partner_that_diverged_is_left_alone(pools: Callable[[int], Ranks]) -> None:
    sound, diverged = pools(2).run(meet_diverged, meeting_point())
    assert all(sound) and not any(diverged)


def go_back(seat: Seat, path: str) -> str:
    params = toy()
    comm = seat.comm(path, 2)
    sgd = torch.optim.SGD(params, lr=RATE)
    with Gossip(sgd, params, comm, FixedPeriod(1), outer="noloco") as gossip:
        take_steps(params, gossip, seat.rank, range(1, 3))
        saved = gossip.state_dict()
        take_steps(params, gossip, seat.rank, range(3, 5))
        with pytest.raises(ValueError, match="this state is of round 2, the job is at 4") as caught:
            gossip.load_state_dict(saved)
        return str(caught.value)


def test_a_state_of_an_earlier_round_is_refused_in_the_same_job(
    pools: Callable[[int], Ranks],
) -> None:
    assert all("make a new one" in line for line in pools(2).run(go_back, meeting_point()))


def misuse(seat: Seat, path: str) -> list[str]:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    lines = []
    wrong: list[dict[str, Any]] = [
        {"outer": "diloco"},
        {"outer": "noloco", "topology": "ring"},
        {"outer": "noloco", "compression": "bfloat16"},
        {"outer": "noloco", "network": "mpi"},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=r"^Gossip: outer") as caught:
            Gossip(sgd, params, seat.comm(path, 2), **options)
        lines.append(str(caught.value))
    return lines


def test_arguments_that_cannot_work_are_refused_in_one_line(pools: Callable[[int], Ranks]) -> None:
    for lines in pools(2).run(misuse, meeting_point()):
        assert "'diloco'" in lines[0] and all("\n" not in line for line in lines)
    for options, words in (
        ({"lr": 0.0}, "lr is 0.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"pull": -1.0}, "pull is -1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            NoLoCo(**options)


def use_as_a_strategy(seat: Seat, path: str, size: int) -> tuple[Any, float]:
    with job(seat, path, size) as hvd:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            strategy="gossip",
            model=net,
            strategy_options={"trigger": FixedPeriod(2), "outer": "noloco"},
        )
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + seat.rank))
            net(x).square().mean().backward()
            optimizer.step()
        metrics = optimizer.metrics()
        optimizer.close()
        return metrics, float(net[1].running_mean.sum())


def test_it_is_a_strategy_of_the_distributed_optimizer(pools: Callable[[int], Ranks]) -> None:
    (metrics, mean), (_, other) = pools(2).run(use_as_a_strategy, meeting_point(), 2)
    assert metrics.averaged == 4 and metrics.local_bytes > 0
    assert mean == pytest.approx(other, rel=1e-6)  # buffers are the mean of the pair
