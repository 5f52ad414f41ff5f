"""ElasticAveraging: the rule bit for bit, nothing lost under concurrency, an end to each worker."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hsgd import Comm, HsgdError
from hsgd.config import Config
from hsgd.optim import ElasticAveraging
from hsgd.optim.elastic_averaging.easgd_progress import COUNTERS, Progress
from ranks import Ranks, Seat, meeting_point

__all__: list[str] = []

STEPS = 12
# Measures nothing: there are many communicators.
PATIENT = Config(timeout_s=60.0, chunk_bytes=65536, oneshot_bytes=1024, store="ordinary")
Model = nn.Module


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def flat(model: Model) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def local_step(model: Model, optimizer: Any, step: int, rank: int = 0) -> None:
    x, y = batch(step, rank)
    optimizer.zero_grad()
    functional.mse_loss(model(x), y).backward()
    optimizer.step()


def comm_of(seat: Seat, path: str, size: int) -> Comm:
    return Comm.local(path, seat.rank, size, PATIENT)


def simulated(
    rate: float,
    interval: int,
    order: str,
    ranks: Sequence[int] = (0,),
    pull: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One worker and its centre, step by step; its gradients are the mean over `ranks`."""
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    centre = flat(model).clone()

    def exchange() -> None:
        at = 0
        with torch.no_grad():
            for p in model.parameters():
                c = centre[at : at + p.numel()].view_as(p)
                d = torch.tensor(pull or rate, dtype=torch.float32) * (p - c)
                p -= d
                c += d if pull is None else d * (rate / pull)
                at += p.numel()

    for step in range(STEPS):
        sgd.zero_grad()
        for rank in ranks:
            x, y = batch(step, rank)
            (functional.mse_loss(model(x), y) / len(ranks)).backward()
        if order == "easgd" and step > 0 and step % interval == 0:
            exchange()
        sgd.step()
        if order == "shmcaffe" and (step + 1) % interval == 0:
            exchange()
    return flat(model), centre


def train_alone(seat: Seat, path: str, options: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with comm_of(seat, path, 1) as comm:
        elastic = ElasticAveraging(sgd, model, comm, **options)
        for step in range(STEPS):
            local_step(model, elastic, step)
        centre = torch.cat([part.reshape(-1) for part in elastic.centre()])
        metrics = elastic.metrics()
        elastic.close()
    return flat(model), centre, metrics


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("order", ["shmcaffe", "easgd"])
def test_one_worker_and_its_centre_follow_the_rule_bit_for_bit(order: str, overlap: bool) -> None:
    with Ranks(1) as pool:
        for interval in (1, 3):
            options = {
                "moving_rate": 0.3,
                "update_interval": interval,
                "order": order,
                "overlap": overlap,
            }
            ((weights, centre, metrics),) = pool.run(train_alone, meeting_point(), options)
            wanted, wanted_centre = simulated(0.3, interval, order)
            assert torch.equal(weights, wanted) and torch.equal(centre, wanted_centre)
            due = STEPS if order == "shmcaffe" else STEPS - 1
            assert (metrics.steps, metrics.exchanges) == (STEPS, due // interval)
            assert (
                metrics.pushed_bytes == metrics.read_bytes == due // interval * weights.numel() * 4
            )


@pytest.mark.parametrize("overlap", [True, False])
def test_the_centre_may_pull_more_than_it_is_moved(overlap: bool) -> None:
    options = {"moving_rate": 0.3, "pull_rate": 0.9, "update_interval": 2, "overlap": overlap}
    with Ranks(1) as pool:
        ((weights, centre, _),) = pool.run(train_alone, meeting_point(), options)
    wanted, wanted_centre = simulated(0.3, 2, "shmcaffe", pull=0.9)
    assert torch.equal(weights, wanted) and torch.equal(centre, wanted_centre)


def exchange_only(seat: Seat, path: str, size: int, options: dict[str, Any]) -> Any:
    """NotifiedWindows of weights that no gradient moves: what these lose the centre gets."""
    with comm_of(seat, path, size) as comm:
        model = nn.Linear(40, 50)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        elastic = ElasticAveraging(sgd, model, comm, moving_rate=0.25, **options)
        start = torch.cat([part.reshape(-1) for part in elastic.centre()])
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.full_like(p, 4096.0 * (seat.rank + 1)))
        before = flat(model)
        comm.barrier()
        for _ in range(5):
            elastic.zero_grad()
            elastic.step()
        elastic.finish_push()
        comm.barrier()
        centre = torch.cat([part.reshape(-1) for part in elastic.centre()])
        metrics = elastic.metrics()
        comm.barrier()
        elastic.close()
        return before.double(), flat(model).double(), start.double(), centre.double(), metrics


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"compression": "bfloat16"}])
def test_what_the_weights_lose_the_centre_gets(options: dict[str, Any]) -> None:
    size = 4
    with Ranks(size) as pool:
        reports = pool.run(exchange_only, meeting_point(), size, options)
    lost = sum(before - after for before, after, *_ in reports)
    for _, _, start, centre, metrics in reports:
        torch.testing.assert_close(centre - start, lost, rtol=1e-5, atol=1e-2)
        assert metrics.exchanges == 5
        if options.get("overlap", True):
            assert sum(metrics.staleness.values()) == 5
            assert all(0 <= behind <= 5 * (size - 1) for behind in metrics.staleness)
        if "compression" in options:
            assert metrics.pushed_bytes * 2 == metrics.read_bytes


def step_by_closure(model: Model, optimizer: Any, step: int, rank: int) -> None:
    x, y = batch(step, rank)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) > 0


def step_by_hand(model: Model, optimizer: Any, step: int, rank: int) -> None:
    x, y = batch(step, rank)
    loss = functional.mse_loss(model(x), y)
    parameters = list(model.parameters())
    optimizer.zero_grad()
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient
    optimizer.step()


def train_in_groups(
    seat: Seat,
    path: str,
    size: int,
    group_size: int | None,
    one_step: Callable[[Model, Any, int, int], None] = local_step,
    pull_rate: float | None = None,
) -> Any:
    with comm_of(seat, path, size) as comm:
        model = mlp(seed=seat.rank)  # rank 0's weights are everybody's
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        elastic = ElasticAveraging(
            *(sgd, model, comm, "hybrid"),
            moving_rate=0.3,
            pull_rate=pull_rate,
            update_interval=2,
            group_size=group_size,
        )
        for step in range(STEPS):
            one_step(model, elastic, step, seat.rank)
        elastic.finish_push()
        distance = elastic.consensus_distance()
        leads = not np.isnan(distance)
        centre = torch.cat([p.reshape(-1) for p in elastic.centre()]) if leads else None
        metrics = elastic.metrics()
        comm.barrier()
        elastic.close()
        return flat(model), centre, metrics, elastic.workers


@pytest.mark.parametrize(
    ("one_step", "pull"),
    [(local_step, None), (step_by_closure, None), (step_by_hand, None), (local_step, 0.9)],
)
def test_a_group_is_one_worker_with_the_mean_gradient(one_step: Any, pull: float | None) -> None:
    with Ranks(2) as pool:
        reports = pool.run(train_in_groups, meeting_point(), 2, None, one_step, pull)
    weights, centre = simulated(0.3, 2, "shmcaffe", ranks=(0, 1), pull=pull)
    torch.testing.assert_close(reports[0][0], weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reports[0][1], centre, rtol=1e-5, atol=1e-6)
    assert torch.equal(reports[0][0], reports[1][0])
    assert [workers for *_, workers in reports] == [1, 1]


@pytest.mark.long
def test_groups_are_equal_within_and_only_their_first_ranks_exchange() -> None:
    with Ranks(4) as pool:
        reports = pool.run(train_in_groups, meeting_point(), 4, 2)
    weights = [row[0] for row in reports]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])
    pushed = [row[2].pushed_bytes for row in reports]
    assert pushed[1] == pushed[3] == 0 and pushed[0] == pushed[2] > 0
    assert sum(pushed) == 2 * (STEPS // 2) * weights[0].numel() * 4  # half of what four would push
    assert [row[3] for row in reports] == [2] * 4
    assert all(row[2].group_bytes > 0 for row in reports)


class Partly(nn.Module):
    """Of two branches only one has a gradient in a step; buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.used, self.never = nn.Linear(6, 3), nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.norm(x)) + self.frozen


def train_partly(seat: Seat, path: str, size: int, mode: str) -> Any:
    torch.manual_seed(seat.rank)
    model = Partly()
    with comm_of(seat, path, size) as comm:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        options = {"group_size": 2} if mode == "hybrid" else {}
        elastic = ElasticAveraging(sgd, model, comm, mode, moving_rate=0.5, **options)
        never = model.never.weight.detach().clone()
        for step in range(4):
            local_step(model, elastic, step, seat.rank)
        kept = torch.equal(model.never.weight, never)
        elastic.finish_push()
        comm.barrier()
        distance = elastic.consensus_distance()
        centre = None if np.isnan(distance) else elastic.centre()
        comm.barrier()
        elastic.close()
        return model.state_dict(), centre, kept


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "hybrid"])
def test_statistics_of_batch_norm_are_averaged_and_unused_parameters_stay(mode: str) -> None:
    with Ranks(2) as pool:
        reports = pool.run(train_partly, meeting_point(), 2, mode)
    first, second = (row[0] for row in reports)
    assert reports[0][2] and reports[1][2]  # no gradient anywhere: no decay either
    assert torch.equal(first["never.weight"], second["never.weight"])
    assert torch.equal(first["norm.num_batches_tracked"], torch.tensor(4))
    shapes = [tuple(part.shape) for part in reports[0][1]]
    assert shapes[-2:] == [(6,), (6,)]  # running mean and variance
    running = reports[0][1][-2]
    assert running.abs().max() > 0
    if mode == "hybrid":
        assert torch.equal(first["norm.running_mean"], second["norm.running_mean"])


def end_by_rule(
    seat: Seat, path: str, size: int, rule: str, mode: str, target: int
) -> tuple[int, float]:
    """Rank 1 is slow; how many steps this one made."""
    model = mlp()
    with comm_of(seat, path, size) as comm:
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"group_size": 2} if mode == "hybrid" else {}
        elastic = ElasticAveraging(
            sgd, model, comm, mode, stop_rule=rule, max_steps=target, **options
        )
        comm.barrier()
        step = 0
        while not elastic.done:
            local_step(model, elastic, step, seat.rank)
            step += 1
            if seat.rank == 1:
                time.sleep(0.002)
        metrics = elastic.metrics()
        elastic.close()
        return metrics.steps, 0.0


@pytest.mark.parametrize("rule", ["master", "fastest", "mean"])
def test_the_stop_rules_end_all_workers(rule: str) -> None:
    target = 40
    with Ranks(3) as pool:
        steps = [row[0] for row in pool.run(end_by_rule, meeting_point(), 3, rule, "async", target)]
        if rule == "master":
            assert steps[0] == target
        elif rule == "fastest":
            assert max(steps) == target
        else:
            assert sum(steps) >= 3 * target
        assert min(steps) > 0


@pytest.mark.parametrize("rule", ["master", "fastest", "mean"])
def test_the_ranks_of_a_group_end_after_the_same_step(rule: str) -> None:
    with Ranks(4) as pool:
        rows = pool.run(end_by_rule, meeting_point(), 4, rule, "hybrid", 20)
        steps = [row[0] for row in rows]
        assert steps[0] == steps[1] and steps[2] == steps[3]
        assert max(steps) >= 20


class FarBox:
    """A box whose counters are on another node, from where no answer comes before it may."""

    counts_at_once = False

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.counters = [0] * COUNTERS

    def fetch_add(self, counter: int, value: int = 1) -> int:
        assert self.may_answer.wait(60.0)
        before = self.counters[counter]
        self.counters[counter] += value
        return before


def report_to_a_far_box(seat: Seat, path: str) -> list[Any]:
    reports: list[Any] = []
    with comm_of(seat, path, 1) as comm:
        for rule in ("fastest", "mean"):
            box = FarBox()
            progress = Progress(box, comm, rule, 4)  # type: ignore[arg-type]
            reports += [progress.report(steps) for steps in (1, 2, 3)]  # would wait for ever
            reports.append(progress.report(4))
            box.may_answer.set()
            while not progress.report(5):
                time.sleep(0.001)
            progress.close()
            reports.append(box.counters)
    return reports


def test_telling_another_node_of_a_step_keeps_no_step_waiting() -> None:
    with Ranks(1) as pool:
        (reports,) = pool.run(report_to_a_far_box, meeting_point())
    fastest, mean = reports[:5], reports[5:]
    assert fastest == [False, False, False, True, [0, 1]]  # it has ended training itself
    assert mean[:4] == [False] * 4
    assert mean[4][0] in (4, 5)


def train_until_done(seat: Seat, path: str, size: int, victim: int, rule: str) -> Any:
    model = mlp()
    with comm_of(seat, path, size) as comm:
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        elastic = ElasticAveraging(sgd, model, comm, stop_rule=rule, max_steps=60)
        comm.barrier()
        step = 0
        while not elastic.done:
            local_step(model, elastic, step, seat.rank)
            step += 1
            if step == 20:
                comm.barrier()  # nobody ends all workers before the victim has come this far
                if seat.rank == victim:
                    seat.tell("half-way")
                    seat.pipe.recv()
        elastic.finish_push()
        centre = torch.cat([part.reshape(-1) for part in elastic.centre()])
        elastic.close()
        return step, bool(torch.isfinite(centre).all())


@pytest.mark.parametrize(("victim", "rule"), [(0, "master"), (2, "master"), (1, "mean")])
def test_a_worker_that_is_killed_does_not_keep_the_others(victim: int, rule: str) -> None:
    with Ranks(3) as pool:
        pool.start(train_until_done, meeting_point(), 3, victim, rule)
        assert pool.hear(victim) == "half-way"
        pool.signal(victim, signal.SIGKILL)
        for outcome in pool.finish(on=[rank for rank in range(3) if rank != victim]):
            assert outcome.error is None, outcome.trace
            assert outcome.value[1]


class Noted:
    """A trigger that exchanges after steps 2 and 7, and says what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def step(self, step: int, params: Sequence[Tensor], lr: float) -> bool:
        self.told.append((step, len(params), lr))
        return step in (2, 7)

    def reset(self, params: Sequence[Tensor]) -> None:
        self.told.append("reset")

    def state_dict(self) -> dict[str, Any]:
        return {"told": len(self.told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = ["loaded"] * state["told"]


def use_a_trigger(seat: Seat, path: str) -> Any:
    model, trigger = mlp(), Noted()
    with comm_of(seat, path, 1) as comm:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = ElasticAveraging(sgd, model, comm, update_interval=trigger)
        for step in range(8):
            local_step(model, elastic, step)
        state = elastic.state_dict()
        report = list(trigger.told)
        elastic.load_state_dict(state)
        elastic.close()
        return report, len(trigger.told), elastic.metrics().exchanges


def test_a_trigger_decides_when_to_exchange() -> None:
    with Ranks(1) as pool:
        ((reports, loaded, exchanges),) = pool.run(use_a_trigger, meeting_point())
    calls = [row for row in reports if row != "reset"]
    assert calls == [(step, 4, 0.1) for step in range(1, 9)]
    assert reports[0] == "reset" and reports[3] == "reset" and reports[9] == "reset"
    assert loaded == len(reports) and exchanges == 2


def resume(seat: Seat, path: str) -> Any:
    """Half of the steps, then the rest with what was saved."""
    model = mlp()
    with comm_of(seat, path, 1) as comm:
        make = lambda m: ElasticAveraging(  # noqa: E731
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
            m,
            comm,
            moving_rate=0.3,
            update_interval=4,
        )
        elastic = make(model)
        for step in range(STEPS // 2):
            local_step(model, elastic, step)
        saved = model.state_dict(), elastic.state_dict()
        elastic.close()
        again = mlp(seed=9)
        elastic = make(again)
        again.load_state_dict(saved[0])
        elastic.load_state_dict(saved[1])
        for step in range(STEPS // 2, STEPS):
            local_step(again, elastic, step)
        centre = torch.cat([part.reshape(-1) for part in elastic.centre()])
        elastic.close()
        return flat(again), centre


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped() -> None:
    with Ranks(1) as pool:
        ((weights, centre),) = pool.run(resume, meeting_point())
    wanted, wanted_centre = simulated(0.3, 4, "shmcaffe")
    assert torch.equal(weights, wanted) and torch.equal(centre, wanted_centre)


def load_centres_of_several_ages(seat: Seat, path: str, size: int) -> Any:
    model = mlp()
    with comm_of(seat, path, size) as comm:
        elastic = ElasticAveraging(torch.optim.SGD(model.parameters(), lr=0.1), model, comm)
        saved = elastic.state_dict()
        for version in range(3):
            if version == seat.rank:
                local_step(model, elastic, version)
                saved = elastic.state_dict()
            comm.barrier()
        newest = torch.cat([part.reshape(-1) for part in elastic.centre()])
        comm.barrier()
        local_step(model, elastic, 9)
        elastic.load_state_dict(saved)
        centre = torch.cat([part.reshape(-1) for part in elastic.centre()])
        comm.barrier()
        elastic.close()
        return saved["elastic"]["version"], torch.equal(centre, newest)


def test_the_newest_of_the_centres_that_are_loaded_counts() -> None:
    with Ranks(3) as pool:
        reports = pool.run(load_centres_of_several_ages, meeting_point(), 3)
    assert reports == [(1, True), (2, True), (3, True)]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def train_masked(seat: Seat, path: str) -> tuple[Tensor, bool]:
    model = Masked()
    mask = model.get_buffer("mask").clone()
    with comm_of(seat, path, 1) as comm:
        elastic = ElasticAveraging(torch.optim.SGD(model.parameters(), lr=0.1), model, comm)
        for step in range(3):
            local_step(model, elastic, step)
        elastic.close()
    return flat(model), torch.equal(model.get_buffer("mask"), mask)


def test_constants_that_are_infinite_stay_as_they_are() -> None:
    with Ranks(1) as pool:
        ((weights, same),) = pool.run(train_masked, meeting_point())
    assert bool(torch.isfinite(weights).all()) and same


def look_at_the_centre(seat: Seat, path: str, size: int) -> Any:
    model = mlp()
    with comm_of(seat, path, size) as comm:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = ElasticAveraging(sgd, model.parameters(), comm, moving_rate=0.5)
        for step in range(3):
            local_step(model, elastic, step, seat.rank)
        elastic.finish_push()
        comm.barrier()
        own, centre = flat(model), torch.cat([part.reshape(-1) for part in elastic.centre()])
        with elastic.at_centre():
            inside = flat(model)
        distance = elastic.consensus_distance()
        comm.barrier()
        elastic.close()
        norm = float((own.double() - centre.double()).norm())
        return [
            torch.equal(inside, centre),
            torch.equal(flat(model), own),
            abs(distance - norm) < 1e-4 * norm + 1e-6,
        ]


def test_weights_can_be_the_centres_for_a_while() -> None:
    with Ranks(2) as pool:
        assert pool.run(look_at_the_centre, meeting_point(), 2) == [[True] * 3] * 2


def look_in_a_group(seat: Seat, path: str, size: int, broken: str) -> Any:
    def fails() -> Any:
        raise MemoryError("no room for the centre")

    model = mlp()
    with comm_of(seat, path, size) as comm:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = ElasticAveraging(
            sgd, model, comm, "hybrid", moving_rate=0.5, group_size=2, update_interval=2
        )
        for step in range(3):
            local_step(model, elastic, step, seat.rank)
        elastic.finish_push()
        comm.barrier()
        own = flat(model)
        if broken == "closed" and elastic._box is not None:
            elastic._box.close()
        if broken == "no room":
            elastic.centre = fails
        try:
            with elastic.at_centre():
                inside = flat(model)
        except (HsgdError, MemoryError) as error:
            return str(error)
        comm.barrier()
        elastic.close()
        return inside, torch.equal(flat(model), own), torch.equal(inside, own)


def test_all_ranks_of_a_group_see_the_centre_that_its_first_rank_reads() -> None:
    with Ranks(4) as pool:
        reports = pool.run(look_in_a_group, meeting_point(), 4, "")
    assert all(torch.equal(reports[0][0], inside) for inside, _, _ in reports)
    assert [(kept, same) for _, kept, same in reports] == [(True, False)] * 4


@pytest.mark.parametrize("reason", ["closed", "no room"])
def test_a_centre_that_the_first_rank_cannot_read_is_an_error_on_all_ranks_of_the_group(
    reason: str,
) -> None:
    with Ranks(2) as pool:
        first, second = pool.run(look_in_a_group, meeting_point(), 2, reason)
    assert reason in first
    assert second.endswith("the first rank of the group failed: no centre for its other ranks")


def refuse(seat: Seat, path: str) -> list[tuple[str, str]]:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    reports = []
    with comm_of(seat, path, 1) as comm:

        def line(call: Callable[[], Any]) -> None:
            try:
                call()
            except (HsgdError, ValueError, TypeError) as error:
                reports.append((type(error).__name__, str(error)))

        make = lambda **options: ElasticAveraging(sgd, model, comm, **options)  # noqa: E731
        line(lambda: make(mode="sync"))
        line(lambda: make(order="other"))
        line(lambda: make(stop_rule="slowest"))
        line(lambda: make(compression="int8"))
        line(lambda: make(group_size=2))
        line(lambda: make(mode="hybrid", group_size=3))
        line(lambda: make(moving_rate=0.0))
        line(lambda: make(pull_rate=1.5))
        line(lambda: make(update_interval=0))
        line(lambda: make(update_interval="often"))
        line(lambda: make(network="pigeons"))
        line(lambda: ElasticAveraging(sgd, [], comm))
        line(lambda: ElasticAveraging(sgd, model.double(), comm))
        line(lambda: ElasticAveraging(sgd, [torch.ones(3, 4).T], comm))
        model.float()
        elastic = make()
        line(lambda: elastic.add_param_group({"params": []}))
        saved = elastic.state_dict()
        saved["elastic"]["centre"] = saved["elastic"]["centre"][1:]
        line(lambda: elastic.load_state_dict(saved))
        elastic.close()
        line(lambda: elastic.step())
    return reports


def test_what_cannot_work_is_refused_by_name() -> None:
    with Ranks(1) as pool:
        (reports,) = pool.run(refuse, meeting_point())
    lines = [
        ("ValueError", "mode is 'sync'; use one of 'async', 'hybrid'"),
        ("ValueError", "order is 'other'; use one of 'shmcaffe', 'easgd'"),
        ("ValueError", "stop_rule is 'slowest'"),
        ("ValueError", "compression is 'int8'; use one of None, 'bfloat16'"),
        ("ValueError", 'group_size is for mode="hybrid"'),
        ("ValueError", "group_size is 3; give a divisor of 1 ranks"),
        ("ValueError", "moving_rate is 0.0"),
        ("ValueError", "pull_rate is 1.5"),
        ("ValueError", "update_interval is 0"),
        ("TypeError", "update_interval is a number of steps or a trigger"),
        ("ValueError", "network is 'pigeons'; give"),
        ("ValueError", "there are no parameters"),
        ("TypeError", "torch.float64 on cpu; the box takes float32"),
        ("ValueError", "is not C-contiguous"),
        ("ValueError", "parameters cannot be added"),
        ("ValueError", "has 3 tensors of 35 values, this model 4 of 83; it is of another model"),
        ("ClosedError", "this ElasticAveraging is closed"),
    ]
    assert len(reports) == len(lines)
    for (kind, line), (wanted, part) in zip(reports, lines, strict=True):
        assert kind == wanted and part in line and "\n" not in line, (kind, line)


def warn_above_the_bound(seat: Seat, path: str, size: int) -> list[str]:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    with comm_of(seat, path, size) as comm:
        for rate in (0.49, 0.5, None):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                elastic = ElasticAveraging(sgd, model, comm, moving_rate=rate)
                lines += [str(warning.message) for warning in caught]
            assert rate is not None or elastic.moving_rate == 0.9 / (size + 1)
            comm.barrier()
            elastic.close()
    return lines


def test_a_moving_rate_that_may_diverge_is_warned_of_once_per_job() -> None:
    with Ranks(3) as pool:
        reports = pool.run(warn_above_the_bound, meeting_point(), 3)
    assert [len(lines) for lines in reports] == [1, 0, 0]
    assert "moving_rate 0.5 is not below 0.5; 3 workers that push at the same time" in reports[0][0]
