"""DiLoCo against the papers' formulas in NumPy, what it saves, and what it survives."""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hsgd import Comm, HsgdError
from hsgd.optim import DiLoCo, Int8, Nesterov, TopK
from hsgd.optim.diloco.fragments import cut, phases
from hsgd.optim.diloco.pseudo_gradient_exchange import exchange_of
from noisy_quadratics import drawn, gradient, initial
from outcomes import told_by
from pretended_nodes import meet
from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

SIZES = (7, 40, 12, 5)  # of the toy's parameters
RATE = 0.05


# --- the toy ---


def in_numpy(
    workers: int, steps: int, period: int, parts: list[list[int]], delay: int, alpha: float
) -> list[list[np.ndarray]]:
    """Each worker's weights after all steps: the algorithms of arXiv:2311.08105 (one part, no
    delay) and 2501.18512, in float64; means wait in a queue.
    """
    local = [[initial(i, SIZES[i]) for i in range(len(SIZES))] for _ in range(workers)]
    outer = [initial(i, SIZES[i]) for i in range(len(SIZES))]
    velocity = [np.zeros(size) for size in SIZES]
    queue: list[tuple[int, int, np.ndarray]] = []

    def arrive(step: int) -> None:
        while queue and queue[0][0] <= step:
            _, i, mean = queue.pop(0)
            velocity[i] = 0.9 * velocity[i] + mean
            outer[i] = outer[i] - 0.7 * (mean + 0.9 * velocity[i])
            for weights in local:
                weights[i] = alpha * weights[i] + (1 - alpha) * outer[i]

    for step in range(1, steps + 1):
        for worker, weights in enumerate(local):
            for i in range(len(SIZES)):
                weights[i] = weights[i] - RATE * gradient(weights[i], worker, step, i)
        arrive(step)
        for part, phase in zip(parts, phases(len(parts), period), strict=True):
            if (step + delay) % period == phase % period:
                for i in part:
                    mean = np.mean([outer[i] - weights[i] for weights in local], axis=0)
                    queue.append((step + delay, i, mean))
        arrive(step)
    return local


def toy() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.tensor(initial(i, SIZES[i]), dtype=torch.float32))
        for i in range(len(SIZES))
    ]


def toy_steps(params: list[nn.Parameter], diloco: DiLoCo, worker: int, steps: range) -> None:
    for step in steps:
        for index, parameter in enumerate(params):
            found = gradient(parameter.detach().numpy(), worker, step, index)
            parameter.grad = torch.from_numpy(found)
        diloco.step()


def run_toy(
    seat: Seat, path: str, size: int, steps: int, options: dict[str, Any]
) -> list[np.ndarray]:
    params = toy()
    if isinstance(options.get("fragments"), list):
        parts = [[params[i] for i in part] for part in options["fragments"]]
        options = {**options, "fragments": parts}
    sgd = torch.optim.SGD(params, lr=RATE)
    with DiLoCo(sgd, params, seat.comm(path, size), group=None, **options) as diloco:
        toy_steps(params, diloco, seat.rank, range(1, steps + 1))
        assert diloco.metrics().steps == steps
    return [parameter.detach().numpy() for parameter in params]


@pytest.mark.parametrize(
    ("size", "period", "parts", "delay", "alpha"),
    [
        (1, 4, [[0, 1, 2, 3]], 0, 0.0),
        (2, 4, [[0, 1, 2, 3]], 0, 0.0),
        (3, 5, [[0, 1, 2, 3]], 2, 0.0),
        (3, 5, [[2, 0], [3, 1]], 0, 0.5),
        (2, 6, [[1], [0, 2], [3]], 5, 0.25),
        (2, 1, [[0, 1, 2, 3]], 0, 0.0),
    ],
)
def test_it_is_the_formula_of_the_papers(
    pools: Callable[[int], Ranks],
    size: int,
    period: int,
    parts: list[list[int]],
    delay: int,
    alpha: float,
) -> None:
    steps = 50 * period
    options = {
        "sync_every": period,
        "fragments": parts if len(parts) > 1 else 1,
        "delay": delay,
        "alpha": alpha,
    }
    found = pools(size).run(run_toy, meeting_point(), size, steps, options)
    wanted = in_numpy(size, steps, period, parts, delay, alpha)
    for mine, theirs in zip(found, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert np.abs(a - b).max() <= 1e-6 * max(1.0, np.abs(b).max())


@pytest.mark.long
@pytest.mark.parametrize("compression", ["bfloat16", "int8", "topk", TopK(0.2, 16, 0.95), Int8(8)])
def test_compressed_pseudo_gradients_lead_to_the_same_place(
    pools: Callable[[int], Ranks], compression: Any
) -> None:
    """With error feedback what is left out comes later; all workers have the same bits."""
    outer = Nesterov(lr=0.5, momentum=0.0)
    options = {"sync_every": 5, "outer": outer, "compression": compression}
    plain = pools(3).run(run_toy, meeting_point(), 3, 1000, {**options, "compression": None})
    found = pools(3).run(run_toy, meeting_point(), 3, 1000, options)
    for index in range(len(SIZES)):
        assert all((one[index] == found[0][index]).all() for one in found)
        assert np.abs(found[0][index] - plain[0][index]).mean() < 0.2
    assert any((found[0][i] != plain[0][i]).any() for i in range(len(SIZES)))


def run_exchange(seat: Seat, path: str, how: Any, count: int, rounds: int) -> Any:
    comm = seat.comm(path, 3)
    exchange = exchange_of(how, comm, count, "values")
    sent = np.zeros(count)
    received = np.zeros(count)
    for turn in range(rounds):
        values = drawn(seat.rank, turn).normal(size=count).astype(np.float32)
        sent += values
        received += exchange.average(torch.from_numpy(values), turn).numpy()
    return sent, received, {k: v.numpy() for k, v in exchange.state_dict().items()}


def exchange_at_other_steps(seat: Seat, path: str, how: Any) -> tuple[str, str]:
    comm = seat.comm(path, 2)
    exchange = exchange_of(how, comm, 9, "pseudo-gradient 0")
    return told_by(lambda: exchange.average(torch.ones(9), due=4 + 2 * comm.rank))


@pytest.mark.parametrize("how", [Int8(), TopK(), "bfloat16", None])
def test_workers_that_are_at_other_steps_do_not_meet(
    pools: Callable[[int], Ranks], how: Any
) -> None:
    for kind, line in pools(2).run(exchange_at_other_steps, meeting_point(), how):
        assert kind == "SignatureMismatch"
        assert "due at step 4" in line and "due at step 6" in line


def take_other_numbers_of_steps(seat: Seat, path: str) -> tuple[str, str]:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    with DiLoCo(sgd, params, seat.comm(path, 2), sync_every=100, group=None) as diloco:
        toy_steps(params, diloco, seat.rank, range(1, 3 + seat.rank))
        return told_by(diloco.synchronize_weights)


def test_workers_that_took_other_numbers_of_steps_are_told(pools: Callable[[int], Ranks]) -> None:
    for kind, line in pools(2).run(take_other_numbers_of_steps, meeting_point()):
        assert kind == "HsgdError" and "ranks have taken 2 to 3 steps" in line


@pytest.mark.parametrize("count", [1, 100, 5000])
@pytest.mark.parametrize("how", [Int8(), Int8(7), TopK(), TopK(0.3, 64), "topk", None])
def test_what_is_left_out_is_never_lost(
    pools: Callable[[int], Ranks], how: Any, count: int
) -> None:
    """The sum of all means is that of what was given, but for what is still left out."""
    rows = pools(3).run(run_exchange, meeting_point(), how, count, 20)
    given = sum(sent for sent, _, _ in rows) / 3
    left = np.zeros(count)
    for rank, (_, _, errors) in enumerate(rows):
        if "sent" in errors:
            left += errors["sent"][:count] / 3
        if "mean" in errors:
            part = errors["mean"].size
            here = slice(rank * part, min(count, (rank + 1) * part))
            left[here] += errors["mean"][: here.stop - here.start] if here.start < count else 0
    for _, received, _ in rows:
        assert (received == rows[0][1]).all()
        assert np.abs(received + left - given).max() < 1e-4


# --- a model: buffers, groups, saving ---


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def backward(net: nn.Module, step: int, ranks: list[int]) -> None:
    """The mean over `ranks` of their batches' losses."""
    for rank in ranks:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        (functional.mse_loss(net(x), y) / len(ranks)).backward()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def train_in_groups(seat: Seat, path: str, how: str) -> Any:
    nodes = [0, 0, 1, 1]
    comm = meet(seat, path, nodes) if how == "node" else Comm.local(path, seat.rank, 4)
    torch.manual_seed(seat.rank)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    group: Any = "node" if how == "node" else 2
    diloco = DiLoCo(sgd, net, comm, sync_every=3, fragments=2, delay=1, alpha=0.5, group=group)
    first = flat(net).clone()
    for step in range(9):
        diloco.zero_grad()
        backward(net, step, [seat.rank])
        diloco.step()
    diloco.settle()
    last = flat(net).clone()
    with diloco.at_outer_weights():
        outer = flat(net).clone()
    kept = bool((flat(net) == last).all())
    diloco.synchronize_weights()
    same = flat(net).clone()
    sent = diloco.metrics().sent_bytes
    diloco.close()
    comm.close()
    return first, last, outer, same, kept, sent


def serial_groups(first: Tensor) -> Tensor:
    """Two workers of two ranks, as DiLoCo of one rank each would have them, without hsgd."""
    nets = []
    for _ in range(2):
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        nn.utils.vector_to_parameters(first.clone(), net.parameters())
        nets.append(net)
    parts = [[p.numel() for p in part] for part in cut(list(nets[0].parameters()), 2)]
    at = sum(parts[0])
    pieces = [slice(0, at), slice(at, len(first))]
    outer, velocity = first.clone(), torch.zeros_like(first)
    queue: list[tuple[int, slice, Tensor]] = []

    def arrive(step: int | None) -> None:
        while queue and (step is None or queue[0][0] <= step):
            _, piece, mean = queue.pop(0)
            velocity[piece] = 0.9 * velocity[piece] + mean
            outer[piece] -= 0.7 * (mean + 0.9 * velocity[piece])
            for net in nets:
                weights = flat(net).clone()
                weights[piece] = 0.5 * weights[piece] + 0.5 * outer[piece]
                nn.utils.vector_to_parameters(weights, net.parameters())

    for step in range(9):
        for worker, net in enumerate(nets):
            net.zero_grad()
            backward(net, step, [2 * worker, 2 * worker + 1])
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
        arrive(step + 1)
        for piece, phase in zip(pieces, phases(2, 3), strict=True):
            if (step + 2) % 3 == phase % 3:
                mean = torch.stack([outer[piece] - flat(net)[piece] for net in nets]).mean(0)
                queue.append((step + 2, piece, mean))
    arrive(None)
    return torch.stack([flat(net) for net in nets])


@pytest.mark.parametrize("how", ["node", "number"])
def test_ranks_of_a_group_are_one_worker(
    pools: Callable[[int], Ranks], tmp_path: Path, how: str
) -> None:
    path = str(tmp_path) if how == "node" else meeting_point()
    rows = pools(4).run(train_in_groups, path, how)
    wanted = serial_groups(rows[0][0])
    for rank, (first, last, outer, same, kept, sent) in enumerate(rows):
        assert (first == rows[0][0]).all() and kept
        assert (last - wanted[rank // 2]).abs().max() < 1e-5
        assert (outer == rows[0][2]).all()
        assert (same == rows[0][3]).all()
        assert (sent > 0) == (how == "node" and rank % 2 == 0)


def train_and_save(
    seat: Seat, path: str, size: int, stops: int | None, options: dict[str, Any]
) -> Any:
    net = network()
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    diloco = DiLoCo(adam, net, Comm.local(path, seat.rank, size), group=None, **options)
    for step in range(30):
        if step == stops:
            saved = copy.deepcopy((diloco.state_dict(), net.state_dict()))
            diloco.close()
            net = network()
            adam = torch.optim.AdamW(net.parameters(), lr=0.01)
            comm = Comm.local(f"{path}-again", seat.rank, size)
            diloco = DiLoCo(adam, net, comm, group=None, **options)
            net.load_state_dict(saved[1])
            diloco.load_state_dict(saved[0])
        diloco.zero_grad()
        backward(net, step, [seat.rank])
        diloco.step()
    net_state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    diloco.close()
    return net_state


@pytest.mark.long
@pytest.mark.parametrize("compression", [None, "int8", "topk"])
def test_a_saved_run_goes_on_bit_for_bit(pools: Callable[[int], Ranks], compression: Any) -> None:
    options = {"sync_every": 6, "fragments": 2, "delay": 4, "compression": compression}
    whole = pools(2).run(train_and_save, meeting_point(), 2, None, options)
    again = pools(2).run(train_and_save, meeting_point(), 2, 20, options)  # one is under way
    for mine, theirs in zip(again, whole, strict=True):
        assert all((mine[name] == theirs[name]).all() for name in theirs)


def resume_elsewhere(seat: Seat, path: str, size: int, state: Any) -> Any:
    net = network()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    diloco = DiLoCo(sgd, net, Comm.local(path, seat.rank, size), group=None, sync_every=4, delay=2)
    if state is not None:
        net.load_state_dict(state[1])
        diloco.load_state_dict(state[0])
    for step in range(6 if state is None else 10):
        diloco.zero_grad()
        backward(net, step, [seat.rank])
        diloco.step()
    saved = copy.deepcopy((diloco.state_dict(), net.state_dict()))
    with diloco.at_outer_weights():
        outer = flat(net).clone()
    diloco.close()
    return saved, outer


def test_another_number_of_workers_goes_on_from_the_outer_weights(
    pools: Callable[[int], Ranks],
) -> None:
    (saved, _), *_ = pools(3).run(resume_elsewhere, meeting_point(), 3, None)
    rows = pools(2).run(resume_elsewhere, meeting_point(), 2, saved)
    assert (rows[0][1] == rows[1][1]).all()
    assert rows[0][0][0]["diloco"]["steps"] == 16


def average_buffers(seat: Seat, path: str) -> Any:
    net = network()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    comm = Comm.local(path, seat.rank, 2)
    with DiLoCo(sgd, net, comm, group=None, sync_every=3) as diloco:
        means = []
        for step in range(3):
            diloco.zero_grad()
            backward(net, step, [seat.rank])
            means.append(net[1].running_mean.clone())
            diloco.step()
        return means[-1], net[1].running_mean.clone()


def test_statistics_of_a_model_are_averaged(pools: Callable[[int], Ranks]) -> None:
    (own, mean), (other, again) = pools(2).run(average_buffers, meeting_point())
    assert (mean == again).all() and (own != other).any()
    assert torch.allclose(mean, (own + other) / 2)


# --- what it survives, and what it refuses ---


def lose_a_rank(seat: Seat, path: str) -> Any:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    diloco = DiLoCo(sgd, params, Comm.local(path, seat.rank, 3), group=None, sync_every=5, delay=3)
    toy_steps(params, diloco, seat.rank, range(1, 14))
    if seat.rank == 2:
        signal.raise_signal(signal.SIGKILL)
    begin = time.monotonic()
    try:
        toy_steps(params, diloco, seat.rank, range(14, 100))
    except HsgdError as error:
        diloco.close()
        names = [thread.name for thread in threading.enumerate()]
        return type(error).__name__, str(error), time.monotonic() - begin, names


def test_the_death_of_a_worker_is_an_error_that_names_it() -> None:
    with Ranks(3) as ranks:
        ranks.start(lose_a_rank, meeting_point())
        rest = ranks.finish(on=[0, 1])
    for outcome in rest:
        assert outcome.error is None, outcome.trace
        name, text, seconds, threads = outcome.value
        assert name == "PeerLost" and "rank 2" in text and seconds < 10
        assert not any(thread.startswith("hsgd-diloco") for thread in threads)


def save_after_a_death(seat: Seat, path: str) -> Any:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    comm = Comm.local(path, seat.rank, 2)
    options: dict[str, Any] = {"sync_every": 6, "delay": 5, "fragments": 2, "group": None}
    with DiLoCo(sgd, params, comm, **options) as diloco:
        toy_steps(params, diloco, seat.rank, range(1, 6))
        comm.barrier()
        if seat.rank == 1:
            signal.raise_signal(signal.SIGKILL)
        with pytest.raises(HsgdError):
            toy_steps(params, diloco, seat.rank, range(6, 40))
        return diloco.state_dict()


def test_what_a_survivor_saves_has_no_exchange_that_failed() -> None:
    with Ranks(2) as ranks:
        ranks.start(save_after_a_death, meeting_point())
        (outcome,) = ranks.finish(on=[0])
    assert outcome.error is None, outcome.trace
    own = outcome.value["diloco"]
    assert len(own["fragments"]) == 2 and len(own["under_way"]) <= 1


def leave_by_an_error(seat: Seat, path: str) -> Any:
    """Rank 0 leaves the block while an exchange is under way that rank 1 never joins."""
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    comm = Comm.local(path, seat.rank, 2)
    begin = time.monotonic()
    options: dict[str, Any] = {"sync_every": 5, "delay": 4, "group": None}
    if seat.rank == 0:
        with contextlib.suppress(ZeroDivisionError), DiLoCo(sgd, params, comm, **options) as diloco:
            toy_steps(params, diloco, 0, range(1, 3))
            raise ZeroDivisionError
        return time.monotonic() - begin
    diloco = DiLoCo(sgd, params, comm, **options)
    with pytest.raises(HsgdError):
        toy_steps(params, diloco, 1, range(1, 30))
    diloco.close()
    return time.monotonic() - begin


def test_who_leaves_by_an_error_keeps_nobody_waiting() -> None:
    with Ranks(2) as ranks:  # with the default deadline, half an hour
        assert max(ranks.run(leave_by_an_error, meeting_point())) < 30


def end_without_close(seat: Seat, path: str) -> None:
    comm = Comm.local(path, seat.rank, 2)
    params = toy()
    diloco = DiLoCo(
        torch.optim.SGD(params, lr=RATE), params, comm, sync_every=5, delay=4, group=None
    )
    if seat.rank == 0:
        toy_steps(params, diloco, 0, range(1, 3))  # the other rank never comes
    seat.kept["diloco"] = diloco


def test_a_program_ends_while_an_exchange_is_under_way() -> None:
    with Ranks(2) as ranks:
        ranks.run(end_without_close, meeting_point())
        assert ranks.end(0) == 0 and ranks.end(1) == 0


def synchronize_twice(seat: Seat, path: str) -> Any:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    with DiLoCo(sgd, params, seat.comm(path, 2), group=None, sync_every=4) as diloco:
        toy_steps(params, diloco, seat.rank, range(1, 9))
        found = [torch.cat([p.detach().clone() for p in params])]
        for _ in range(2):
            diloco.synchronize_weights()
            found.append(torch.cat([p.detach().clone() for p in params]))
        toy_steps(params, diloco, seat.rank, range(9, 11))
        found.append(torch.cat([p.detach().clone() for p in params]))
        diloco.synchronize_weights()
        found.append(torch.cat([p.detach().clone() for p in params]))
        if seat.rank == 0:
            toy_steps(params, diloco, 0, range(11, 12))
        with pytest.raises(HsgdError, match="10 to 11 steps"):
            diloco.synchronize_weights()
    return found


def test_synchronizing_weights_steps_on_no_gradient(pools: Callable[[int], Ranks]) -> None:
    """It changes nothing where all were exchanged just now, and is the mean elsewhere."""
    mine, theirs = pools(2).run(synchronize_twice, meeting_point())
    assert (mine[0] == mine[1]).all() and (mine[0] == mine[2]).all()
    assert (mine[3] != theirs[3]).any() and (mine[4] == theirs[4]).all()
    assert torch.allclose(mine[4], (mine[3] + theirs[3]) / 2, atol=1e-6)


def roll_back(seat: Seat, path: str) -> Any:
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    options: dict[str, Any] = {"sync_every": 5, "delay": 3, "compression": "int8", "group": None}
    with DiLoCo(sgd, params, seat.comm(path, 2), **options) as diloco:
        toy_steps(params, diloco, seat.rank, range(1, 3))
        weights = [p.detach().clone() for p in params]
        state = copy.deepcopy(diloco.state_dict())
        ends = []
        for _ in range(3):
            toy_steps(params, diloco, seat.rank, range(3, 14))  # one is under way
            ends.append(torch.cat([p.detach().clone() for p in params]))
            for p, weight in zip(params, weights, strict=True):
                p.detach().copy_(weight)
            diloco.load_state_dict(state)
    return ends


def test_a_state_is_loaded_while_an_exchange_is_under_way(pools: Callable[[int], Ranks]) -> None:
    for ends in pools(2).run(roll_back, meeting_point()):
        assert all((end == ends[0]).all() for end in ends)


def train_half(seat: Seat, path: str) -> Any:
    torch.manual_seed(0)
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    sgd = torch.optim.SGD([param], lr=1.0)
    with DiLoCo(
        sgd, [param], seat.comm(path, 2), group=None, sync_every=1, outer=Nesterov(0.25, 0.0)
    ) as diloco:
        for _ in range(8):
            param.grad = torch.full_like(param, 2**-8)  # an ulp; a quarter of it per outer step
            diloco.step()
        return param.detach().float()


def test_outer_steps_below_a_digit_of_bfloat16_add_up(pools: Callable[[int], Ranks]) -> None:
    for found in pools(2).run(train_half, meeting_point()):
        assert (found == 1 - 2 * 2**-8).all()


def misuse(seat: Seat, path: str) -> list[str]:
    comm = Comm.local(path, seat.rank, 2)
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    half = [nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    lines = []
    for options, given in (
        ({"sync_every": 0}, params),
        ({"sync_every": 5, "delay": 5}, params),
        ({"alpha": 1.0}, params),
        ({"fragments": 5}, params),
        ({"fragments": 3, "sync_every": 2}, params),
        ({"fragments": [[params[0]], params]}, params),
        ({"fragments": [[], params]}, params),
        ({"compression": "int4", "group": None}, params),
        ({"group": 3}, params),
        ({"group": "rack"}, params),
        ({"group": 2}, half),
        ({}, [torch.zeros(3)]),
        ({}, [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]),
        ({"group": 2, "compression": "int4"}, params),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            DiLoCo(sgd, given, comm, **options)
        lines.append(str(caught.value))
    for make in (lambda: Nesterov(0), lambda: Nesterov(1, 1), lambda: TopK(0), lambda: Int8(0)):
        with pytest.raises((ValueError, TypeError)) as caught:
            make()
        lines.append(str(caught.value))
    with pytest.raises(TypeError) as refused:
        DiLoCo(sgd, params, object())
    lines.append(str(refused.value))
    with DiLoCo(sgd, params, comm, group=None) as diloco:
        state = diloco.state_dict()
        state["diloco"]["fragments"][0]["outer_weights"] = torch.zeros(3)
        with pytest.raises((ValueError, TypeError)) as caught:
            diloco.load_state_dict(state)
        lines.append(str(caught.value))
    with pytest.raises(HsgdError) as closed:
        diloco.step()
    lines.append(str(closed.value))
    comm.close()
    return lines


def test_arguments_that_cannot_work_are_refused_in_one_line(pools: Callable[[int], Ranks]) -> None:
    wanted = ("sync_every is 0", "from 0 to below sync_every=5", "alpha is 1.0", "from 1 to 4")
    wanted += ("3 fragments do not fit in sync_every=2", "give each of them once")
    wanted += ("a fragment has no parameters", "'int4'", "give a divisor of 2 ranks")
    wanted += ("give a divisor of 2 ranks", "torch.float64", "no parameters that train")
    wanted += ("torch.complex64", "'int4'", "lr is 0", "momentum is 1")
    wanted += ("fraction is 0", "block is 0", "a process group", "of another model", "is closed")
    for lines in pools(2).run(misuse, meeting_point()):
        for line, part in zip(lines, wanted, strict=True):
            assert part in line and "\n" not in line, (part, line)


def test_parameters_are_cut_into_even_consecutive_parts() -> None:
    sizes = [100, 1, 1, 50, 50, 98]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for number in range(1, 7):
        parts = cut(params, number)
        assert len(parts) == number and all(parts)
        assert [p for part in parts for p in part] == params
    assert [sum(p.numel() for p in part) for part in cut(params, 3)] == [100, 102, 98]
    assert phases(3, 10) == [3, 6, 10] and phases(1, 7) == [7]


# --- other ways in ---


def over_a_process_group(seat: Seat, folder: str, backend: str) -> Any:
    from torch import distributed as dist

    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=2)
    params = toy()
    sgd = torch.optim.SGD(params, lr=RATE)
    group = dist.group.WORLD
    with DiLoCo(sgd, params, group, group=None, sync_every=4) as diloco:
        toy_steps(params, diloco, seat.rank, range(1, 41))
    dist.destroy_process_group()
    return [parameter.detach().numpy() for parameter in params]


@pytest.mark.parametrize("backend", ["gloo", "hsgd"])
def test_a_process_group_will_do(tmp_path: Path, backend: str) -> None:
    with Ranks(2) as ranks:
        found = ranks.run(over_a_process_group, str(tmp_path), backend)
    wanted = in_numpy(2, 40, 4, [[0, 1, 2, 3]], 0, 0.0)
    for mine, theirs in zip(found, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert np.abs(a - b).max() <= 1e-6


def use_as_a_strategy(seat: Seat, path: str, size: int) -> Any:
    with job(seat, path, size) as hvd:
        net = network()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        for options, words in (
            ({"op": hvd.Sum}, "averages"),
            ({"backward_passes_per_step": 2}, "does not know backward_passes"),
            ({"compression": hvd.Compression.fp16}, "does not know compression"),
        ):
            with pytest.raises(ValueError, match=f'^strategy="diloco" {words}'):
                hvd.DistributedOptimizer(sgd, strategy="diloco", **options)
        optimizer = hvd.DistributedOptimizer(
            sgd,
            net.named_parameters(),
            compression=hvd.Compression.bf16,
            strategy="diloco",
            model=net,
            strategy_options={"sync_every": 4, "group": None},
        )
        for step in range(8):
            optimizer.zero_grad()
            backward(net, step, [seat.rank])
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(8, 12):
            optimizer.zero_grad()
            backward(net, step, [seat.rank])
            optimizer.step()
        metrics, weights = optimizer.metrics(), flat(net).clone()
        optimizer.close()
        return metrics, weights


def test_it_is_a_strategy_of_the_distributed_optimizer(pools: Callable[[int], Ranks]) -> None:
    rows = pools(2).run(use_as_a_strategy, meeting_point(), 2)
    for metrics, weights in rows:
        assert metrics.outer_steps == 3 and metrics.node_bytes > 0
        assert (weights == rows[0][1]).all()
