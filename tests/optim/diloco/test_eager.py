"""Eager outer steps against the formula of arXiv:2502.12996 in NumPy, saved and made alike."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hsgd import HsgdError
from hsgd.optim import DiLoCo, Nesterov
from hsgd.optim.diloco import diloco_optimizer
from hsgd.optim.diloco.fragments import phases
from noisy_quadratics import gradient, initial
from ranks import Ranks, Seat, meeting_point

__all__: list[str] = []

SIZES = (7, 40, 12)
RATE = 0.05


def in_numpy(
    workers: int, steps: int, period: int, parts: list[list[int]], alpha: float
) -> tuple[list[list[np.ndarray]], ...]:
    """Each worker's weights and outer weights after all steps, in float64: in an outer step worker
    m takes D_m(t) / M + sum of D_j(t - 1) / M over all others j. Then the outer weights as if the
    last step had had the others' D_j(t).
    """
    local = [[initial(i, size) for i, size in enumerate(SIZES)] for _ in range(workers)]
    outer = copy.deepcopy(local)
    velocity = [[np.zeros(size) for size in SIZES] for _ in range(workers)]
    before = [[np.zeros(size) for size in SIZES] for _ in range(workers)]
    for step in range(1, steps + 1):
        for worker, weights in enumerate(local):
            for i in range(len(SIZES)):
                weights[i] = weights[i] - RATE * gradient(weights[i], worker, step, i)
        for part, phase in zip(parts, phases(len(parts), period), strict=True):
            if step % period != phase % period:
                continue
            for i in part:
                now = [outer[m][i] - local[m][i] for m in range(workers)]
                for m in range(workers):
                    others = sum(before[j][i] for j in range(workers) if j != m)
                    mixed = (now[m] + others) / workers
                    velocity[m][i] = 0.9 * velocity[m][i] + mixed
                    outer[m][i] = outer[m][i] - 0.7 * (mixed + 0.9 * velocity[m][i])
                    local[m][i] = alpha * local[m][i] + (1 - alpha) * outer[m][i]
                for m in range(workers):
                    before[m][i] = now[m]
    whole = copy.deepcopy(outer)
    for m in range(workers):
        for i in range(len(SIZES)):
            others = sum(before[j][i] for j in range(workers) if j != m)
            whole[m][i] = outer[m][i] - 0.7 * (1 + 0.9) * others / workers
    return local, outer, whole


def toy() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.tensor(initial(i, size), dtype=torch.float32))
        for i, size in enumerate(SIZES)
    ]


def train(diloco: DiLoCo, params: list[nn.Parameter], worker: int, steps: range) -> None:
    for step in steps:
        for index, parameter in enumerate(params):
            found = gradient(parameter.detach().numpy(), worker, step, index)
            parameter.grad = torch.from_numpy(found)
        diloco.step()


def made(seat: Seat, path: str, size: int, **options: Any) -> tuple[DiLoCo, list[nn.Parameter]]:
    params = toy()
    fragments = options.pop("fragments", [[0, 1, 2]])
    parts = [[params[i] for i in part] for part in fragments]
    sgd = torch.optim.SGD(params, lr=RATE)
    comm = seat.comm(path, size)
    diloco = DiLoCo(sgd, params, comm, group=None, eager=True, fragments=parts, **options)
    return diloco, params


def values(params: list[nn.Parameter]) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in params]


def run_toy(seat: Seat, path: str, size: int, steps: int, options: dict[str, Any]) -> Any:
    diloco, params = made(seat, path, size, **options)
    with diloco:
        train(diloco, params, seat.rank, range(1, steps + 1))
        own = values(params)
        with diloco.at_outer_weights():
            outer = values(params)
        with diloco.at_outer_weights(average=True):
            mean = values(params)
        assert all(np.array_equal(a, b) for a, b in zip(own, values(params), strict=True))
        metrics = diloco.metrics()
        diloco.synchronize_weights()
        together = values(params)
        if len(options["fragments"]) == 1:  # exchanged after this very step
            assert all(np.array_equal(a, b) for a, b in zip(mean, together, strict=True))
    return own, outer, together, metrics.outer_steps


@pytest.mark.parametrize(
    ("size", "period", "parts", "alpha"),
    [
        (1, 4, [[0, 1, 2]], 0.0),
        (2, 4, [[0, 1, 2]], 0.0),
        (3, 5, [[2, 0], [1]], 0.5),
        (3, 1, [[0, 1, 2]], 0.0),
    ],
)
def test_it_is_the_formula_of_the_paper(
    pools: Callable[[int], Ranks], size: int, period: int, parts: list[list[int]], alpha: float
) -> None:
    """In the end synchronize_weights() adds what has arrived, and takes the mean."""
    steps = 50 * period
    options = {"sync_every": period, "fragments": parts, "alpha": alpha}
    found = pools(size).run(run_toy, meeting_point(), size, steps, options)
    local, outer, whole = in_numpy(size, steps, period, parts, alpha)
    for rank, (own, own_outer, together, outer_steps) in enumerate(found):
        assert outer_steps == 50 * len(parts)
        for i in range(len(SIZES)):
            scale = max(1.0, float(np.abs(local[rank][i]).max()))
            assert np.abs(own[i] - local[rank][i]).max() <= 1e-6 * scale
            assert np.abs(own_outer[i] - outer[rank][i]).max() <= 1e-6 * scale
            if i in parts[-1]:  # exchanged after this very step
                mean = np.mean([whole[m][i] for m in range(size)], axis=0)
                assert np.abs(together[i] - mean).max() <= 1e-6 * scale
            assert np.array_equal(together[i], found[0][2][i])


def walk(seat: Seat, path: str, size: int, eager: bool, dtype: torch.dtype) -> Any:
    """Each step takes a worker 1 + its rank further, whatever the weights are."""
    params = [nn.Parameter(torch.zeros(5, dtype=dtype))]
    sgd = torch.optim.SGD(params, lr=1.0)
    options: dict[str, Any] = {"outer": Nesterov(lr=1.0, momentum=0.0), "sync_every": 10}
    comm = seat.comm(path, size)
    found = []
    with DiLoCo(sgd, params, comm, group=None, eager=eager, **options) as diloco:
        for step in range(1, 46):
            params[0].grad = torch.full((5,), 1.0 + seat.rank, dtype=dtype)
            diloco.step()
            if step == 40:
                with diloco.at_outer_weights(average=True):
                    found.append(float(params[0][0]))
        for _ in range(2):
            diloco.synchronize_weights()
            found.append(float(params[0][0]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_a_worker_did_is_lost(
    pools: Callable[[int], Ranks], dtype: torch.dtype
) -> None:
    """Without momentum the mean has come as far as that of DiLoCo, at any time."""
    plain = pools(3).run(walk, meeting_point(), 3, False, torch.float32)
    assert plain[0] == pytest.approx([-80.0, -90.0, -90.0])
    for found in pools(3).run(walk, meeting_point(), 3, True, dtype):
        assert found == pytest.approx(plain[0], rel=1e-5 if dtype == torch.float32 else 1e-2)


def save_and_go_on(seat: Seat, path: str, elsewhere: bool) -> Any:
    """Train 30 steps, or 17 with a state, which another object goes on from."""
    options = {"sync_every": 5, "fragments": [[0], [1, 2]]}
    diloco, params = made(seat, f"{path}-a", 2, **options)
    with diloco:
        train(diloco, params, seat.rank, range(1, 18))
        state, weights = copy.deepcopy(diloco.state_dict()), values(params)
        train(diloco, params, seat.rank, range(18, 31))
        whole = values(params)
    again, params = made(seat, f"{path}-b", 2, **options)
    if elsewhere:  # what rank 0 saved, on all
        state = seat.comm(f"{path}-c", 2).allgather_object((state, weights))[0][0]
    with again, torch.no_grad():
        for parameter, kept in zip(params, weights, strict=True):
            parameter.copy_(torch.from_numpy(kept))
        again.load_state_dict(state)
        train(again, params, seat.rank, range(18, 31))
        resumed = values(params)
        again.synchronize_weights()
    return whole, resumed, values(params)


def test_a_saved_run_goes_on_bit_for_bit(pools: Callable[[int], Ranks]) -> None:
    for whole, resumed, _ in pools(2).run(save_and_go_on, meeting_point(), False):
        assert all(np.array_equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_ranks_that_load_what_rank_0_saved_go_on_and_can_be_made_alike(
    pools: Callable[[int], Ranks],
) -> None:
    found = pools(2).run(save_and_go_on, meeting_point(), True)
    assert all(np.isfinite(part).all() for _, resumed, _ in found for part in resumed)
    assert all(np.array_equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def in_workers_of_two(seat: Seat, path: str) -> Any:
    """Four ranks are two workers; each rank's gradient is that of its worker."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            ends = -0.5, 0.5 + 0.1 * index
            parameter.copy_(torch.linspace(*ends, parameter.numel()).view_as(parameter))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    comm = seat.comm(path, 4)
    with DiLoCo(sgd, model, comm, group=2, sync_every=3, eager=True) as diloco:
        for step in range(10):
            diloco.zero_grad()
            luck = torch.Generator().manual_seed(100 * step + seat.rank)
            model(torch.randn(8, 3, generator=luck)).square().mean().backward()
            diloco.step()
        own = [parameter.detach().clone() for parameter in model.parameters()]
        diloco.synchronize_weights()
    return own, [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]


def test_ranks_of_a_worker_are_alike_and_in_the_end_all_with_the_buffers(
    pools: Callable[[int], Ranks],
) -> None:
    found = pools(4).run(in_workers_of_two, meeting_point())
    for pair in (0, 2):
        assert all(
            torch.equal(a, b) for a, b in zip(found[pair][0], found[pair + 1][0], strict=True)
        )
    assert any(not torch.equal(a, b) for a, b in zip(found[0][0], found[2][0], strict=True))
    for rank in range(1, 4):
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[rank][1], strict=True))


def load_another_schedule(seat: Seat, path: str) -> Any:
    """States with an exchange under way go on without it under another schedule."""
    schedules: list[dict[str, Any]] = [
        {"sync_every": 10, "eager": True},
        {"sync_every": 10, "delay": 3},
        {"sync_every": 5, "eager": True},
    ]
    ended = []
    for before in schedules:
        for after in schedules:
            params = toy()
            sgd = torch.optim.SGD(params, lr=RATE)
            comm = seat.comm(f"{path}-{len(ended)}", 2)
            with DiLoCo(sgd, params, comm, group=None, **before) as diloco:
                train(diloco, params, seat.rank, range(1, 19))
                state = copy.deepcopy(diloco.state_dict())
            sgd = torch.optim.SGD(params, lr=RATE)
            with DiLoCo(sgd, params, comm, group=None, **after) as diloco:
                diloco.load_state_dict(state)
                train(diloco, params, seat.rank, range(19, 36))
                diloco.synchronize_weights()
            ended.append(values(params))
    return ended


def test_a_state_of_another_schedule_goes_on_without_what_was_under_way(
    pools: Callable[[int], Ranks],
) -> None:
    first, second = pools(2).run(load_another_schedule, meeting_point())
    for mine, theirs in zip(first, second, strict=True):
        assert all(np.isfinite(part).all() for part in mine)
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def fail_between_fragments(seat: Seat, path: str) -> Any:
    """The outer state before and after synchronize_weights(), in which rank 2 fails once all have
    averaged the first of two fragments.
    """
    diloco, params = made(seat, path, 3, fragments=[[0], [1, 2]], sync_every=5)
    train(diloco, params, seat.rank, range(1, 13))
    whole = diloco_optimizer.average_outer
    calls = []

    def fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if seat.rank == 2 and len(calls) == 2:
            raise HsgdError("a fault of the test")
        return whole(*arguments)

    before = diloco.state_dict()["diloco"]["fragments"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diloco_optimizer, "average_outer", fails)
        with pytest.raises(HsgdError):
            diloco.synchronize_weights()
    assert len(calls) == 2
    after = diloco.state_dict()["diloco"]["fragments"]
    with contextlib.suppress(HsgdError):
        diloco.close()
    return [
        (one[name].numpy(), other[name].numpy())
        for one, other in zip(before, after, strict=True)
        for name in ("outer_weights", "velocity")
    ]


def test_where_they_cannot_be_made_alike_outer_weights_stay() -> None:
    with Ranks(3) as pool:
        for pairs in pool.run(fail_between_fragments, meeting_point()):
            assert all(np.array_equal(before, after) for before, after in pairs)


def refuse(seat: Seat, path: str) -> str:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    with pytest.raises(ValueError, match="eager=True gives each exchange a whole period") as found:
        DiLoCo(sgd, params, seat.comm(path, 2), group=None, sync_every=5, delay=2, eager=True)
    return str(found.value)


def test_a_delay_beside_it_is_refused_in_one_line(pools: Callable[[int], Ranks]) -> None:
    assert all("\n" not in line for line in pools(2).run(refuse, meeting_point()))
