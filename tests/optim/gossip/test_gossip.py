"""Gossip as an optimizer: what it sends and when, what it averages, and what it survives."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hsgd import Comm, HsgdError
from hsgd.optim import Budget, FixedPeriod, Gossip, RelativeChange
from lost_partner import without_rank_1
from ranks import Ranks, Seat, meeting_point
from tiers import short_form
from toolkit.cluster import Cluster
from torch_job import job

__all__: list[str] = []

HERE = Path(__file__).resolve().parent
STEPS = 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def loss(net: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return functional.mse_loss(net(x), y)


def in_turn(comm: Comm, gossip: Gossip) -> None:
    """One rank after the other, so that runs repeat."""
    for rank in range(comm.size):
        if rank == comm.rank:
            gossip.step()
        comm.barrier()


def settle_in_turn(comm: Comm, gossip: Gossip) -> None:
    """As settle(), but in an order that repeats: what a rank answers first is chance otherwise."""
    for rank in 2 * list(range(comm.size)):
        if rank == comm.rank and gossip._pairs is not None:
            gossip._note(gossip._pairs.poll())
        comm.barrier()
    gossip.settle()


def train(
    seat: Seat,
    path: str,
    size: int,
    options: dict[str, Any],
    pause: int | None = None,
    resume: bool = False,
    optimizer: str = "sgd",
) -> dict[str, Any]:
    """`pause`: before this step all averages are settled; with `resume` a new run begins then."""
    torch.set_num_threads(1)
    comm = seat.comm(path, size)
    created = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[optimizer]

    def start(options: dict[str, Any]) -> tuple[nn.Module, Gossip]:
        net = network()
        ready = {k: v() if callable(v) else v for k, v in options.items()}
        if ready.get("buffers"):
            ready["buffers"] = [b for b in net.buffers() if b.is_floating_point()]
        return net, Gossip(created(net.parameters()), net.parameters(), comm, **ready)

    net, gossip = start(options)
    scheduler = torch.optim.lr_scheduler.StepLR(gossip, 3, 0.5)
    for step in range(STEPS):
        if step == pause:
            settle_in_turn(comm, gossip)
        if step == pause and resume:
            kept = copy.deepcopy([net.state_dict(), gossip.state_dict(), scheduler.state_dict()])
            gossip.close()
            comm.barrier()
            net, gossip = start(options)
            scheduler = torch.optim.lr_scheduler.StepLR(gossip, 3, 0.5)
            net.load_state_dict(kept[0])
            gossip.load_state_dict(kept[1])
            scheduler.load_state_dict(kept[2])
        gossip.zero_grad()
        loss(net, step, seat.rank).backward()
        in_turn(comm, gossip)
        scheduler.step()
    before = [p.detach().clone() for p in net.parameters()]
    settle_in_turn(comm, gossip)
    metrics, distance = gossip.metrics(), gossip.consensus_distance()
    gossip.close()
    return {
        "before": before,
        "weights": [p.detach().clone() for p in net.parameters()],
        "buffers": [b.clone() for b in net.buffers() if b.is_floating_point()],
        "moments": [
            s.get("momentum_buffer", s.get("exp_avg")).clone() for s in gossip.state.values()
        ],
        "metrics": metrics,
        "distance": distance,
    }


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_threshold_0_is_gossip_in_every_step(pools: Callable[[int], Ranks]) -> None:
    for topology in ("random", "exponential2"):
        runs = [
            pools(4).run(train, meeting_point(), 4, {"trigger": trigger, "topology": topology})
            for trigger in (lambda_zero, lambda_every)
        ]
        for mine, wanted in zip(*runs, strict=True):
            assert equal(mine["before"] + mine["weights"], wanted["before"] + wanted["weights"])
            assert mine["metrics"].asked == wanted["metrics"].asked
            assert mine["metrics"].triggers == STEPS and mine["metrics"].averaged >= STEPS // 2


def lambda_zero() -> RelativeChange:
    return RelativeChange(0.0)


def lambda_every() -> FixedPeriod:
    return FixedPeriod(1)


def lambda_never() -> RelativeChange:
    return RelativeChange(math.inf)


def lambda_third() -> FixedPeriod:
    return FixedPeriod(3)


def lambda_change() -> RelativeChange:
    return RelativeChange(0.1)


def lambda_budget() -> Budget:
    return Budget(0.5, STEPS, reserve=2)


def plain(rank: int) -> list[Tensor]:
    net = network()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 3, 0.5)
    for step in range(STEPS):
        sgd.zero_grad()
        loss(net, step, rank).backward()
        sgd.step()
        scheduler.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("topology", ["exponential2", "ring"])
def test_ranks_that_choose_one_another_average_once(
    pools: Callable[[int], Ranks], topology: str
) -> None:
    options = {"trigger": lambda_third, "topology": topology}
    reports = [one["metrics"] for one in pools(4).run(train, meeting_point(), 4, options)]
    assert sum(one.asked for one in reports) == 2 * (STEPS // 3) and not any(
        o.refused for o in reports
    )
    assert all(one.averaged == one.triggers == STEPS // 3 for one in reports)


def test_an_infinite_threshold_never_sends(pools: Callable[[int], Ranks]) -> None:
    for rank, mine in enumerate(pools(3).run(train, meeting_point(), 3, {"trigger": lambda_never})):
        for weight, wanted in zip(mine["weights"], plain(rank), strict=True):
            torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)
        report = mine["metrics"]
        assert (report.messages, report.local_bytes, report.remote_bytes, report.asked) == (
            0,
            0,
            0,
            0,
        )


def test_max_interval_ends_a_silence(pools: Callable[[int], Ranks]) -> None:
    options = {"trigger": lambda_never, "max_interval": 4}
    reports = [one["metrics"] for one in pools(2).run(train, meeting_point(), 2, options)]
    assert (
        sum(one.asked for one in reports) == 2 and reports[0].averaged == reports[1].averaged == 2
    )


def test_metrics_count_what_was_sent(pools: Callable[[int], Ranks]) -> None:
    reports = [
        one["metrics"] for one in pools(2).run(train, meeting_point(), 2, {"trigger": lambda_third})
    ]
    model = 4 * sum(p.numel() for p in network().parameters())
    exchanges = reports[0].averaged
    assert exchanges == reports[1].averaged >= 2
    assert sum(one.asked for one in reports) == exchanges + sum(one.refused for one in reports)
    asked = sum(one.asked for one in reports)
    assert sum(one.local_bytes for one in reports) == model * (asked + exchanges)
    assert all(one.remote_bytes == 0 and one.last_distance > 0 for one in reports)


@pytest.mark.parametrize(
    "options",
    [
        {"trigger": lambda_change, "momentum": "reset"},
        {"trigger": lambda_budget, "topology": "ring"},
        {"trigger": lambda_third, "momentum": "average", "max_interval": 2},
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(
    pools: Callable[[int], Ranks], options: dict[str, Any]
) -> None:
    options = {**options, "buffers": True}
    run = pools(2).run(train, meeting_point(), 2, options, 4)
    resumed = pools(2).run(train, meeting_point(), 2, options, 4, True)
    for mine, wanted in zip(resumed, run, strict=True):
        assert equal(mine["weights"] + mine["buffers"], wanted["weights"] + wanted["buffers"])
        assert mine["metrics"].triggers == wanted["metrics"].triggers > 0
        assert mine["metrics"].averaged == wanted["metrics"].averaged


class SlowToSee:
    """A barrier whose end this rank sees late: not before the other has long had time to ask."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._seen: float | None = None

    def done(self) -> bool:
        if self._seen is None and self._request.done():
            self._seen = time.monotonic()
        return self._seen is not None and time.monotonic() > self._seen + 0.3

    def wait(self) -> None:
        self._request.wait()


def ask_when_settled(seat: Seat, path: str) -> tuple[list[float], list[float], int]:
    comm = seat.comm(path, 2)
    weight = nn.Parameter(torch.zeros(3))
    gossip = Gossip(torch.optim.SGD([weight], lr=0.0), [weight], comm, FixedPeriod(1), "random")
    with torch.no_grad():
        weight += 8.0 * seat.rank
    begin = comm.barrier_async
    late = (lambda: SlowToSee(begin())) if seat.rank == 1 else begin
    with mock.patch.object(comm, "barrier_async", late):
        gossip.settle()
    settled = weight.tolist()
    in_turn(comm, gossip)
    gossip.settle()
    averaged = gossip.metrics().averaged
    gossip.close()
    return settled, weight.tolist(), averaged


def test_nobody_asks_while_another_still_settles(pools: Callable[[int], Ranks]) -> None:
    """Or the other would leave settle() with its half of an average, and the asker without."""
    for rank, (settled, ended, averaged) in enumerate(
        pools(2).run(ask_when_settled, meeting_point())
    ):
        assert settled == [8.0 * rank] * 3 and ended == [4.0] * 3 and averaged > 0


def test_a_global_average_makes_all_models_one(pools: Callable[[int], Ranks]) -> None:
    options = {"trigger": lambda_never, "global_average_every": 4}
    first, *others = pools(3).run(train_together, meeting_point(), 3, options)
    for other in others:
        assert equal(first["weights"], other["weights"])
    assert first["distance"] < 1e-6


def train_together(seat: Seat, path: str, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """All ranks step at once, as they must where step() is collective."""
    torch.set_num_threads(1)
    comm = seat.comm(path, size)
    net = network()
    ready = {k: v() if callable(v) else v for k, v in options.items()}
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    gossip = Gossip(sgd, net.parameters(), comm, **ready)
    for step in range(STEPS):
        gossip.zero_grad()
        loss(net, step, seat.rank).backward()
        gossip.step()
    gossip.settle()
    distance, metrics = gossip.consensus_distance(), gossip.metrics()
    gossip.close()
    weights = [p.detach().clone() for p in net.parameters()]
    return {"weights": weights, "distance": distance, "metrics": metrics}


def test_metrics_count_global_averages(pools: Callable[[int], Ranks]) -> None:
    options = {"trigger": lambda_never, "global_average_every": 4}
    model = 4 * sum(p.numel() for p in network().parameters())
    for mine in pools(3).run(train_together, meeting_point(), 3, options):
        report = mine["metrics"]
        assert (report.global_averages, report.averaged, report.remote_bytes) == (2, 0, 0)
        assert 2 * model <= report.local_bytes <= 2 * 10 * model


def leave_a_part_unused(seat: Seat, path: str) -> tuple[float, float]:
    comm = seat.comm(path, 2)
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    sometimes = nn.Parameter(torch.ones(1))
    every = [used, unused, sometimes]
    sgd = torch.optim.SGD(every, lr=0.1, weight_decay=0.5)
    options: dict[str, Any] = {"hierarchical": True, "group_size": 2}
    gossip = Gossip(sgd, every, comm, FixedPeriod(1), **options)
    for _ in range(3):
        gossip.zero_grad()
        (used.sum() + (sometimes.sum() if seat.rank == 0 else 0.0)).backward()
        gossip.step()
    gossip.close()
    return float(unused.sum()), float(sometimes)


def test_what_nobody_of_a_group_uses_does_not_decay(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(leave_a_part_unused, meeting_point())
    assert first[0] == second[0] == 3.0
    assert first[1] == second[1] < 1.0  # one rank's gradient is the group's


def test_momentum_is_kept_averaged_or_reset(pools: Callable[[int], Ranks]) -> None:
    def last(momentum: str) -> list[list[Tensor]]:
        options = {"trigger": lambda_every, "topology": "ring", "momentum": momentum}
        return [one["moments"] for one in pools(2).run(train, meeting_point(), 2, options)]

    def apart(two: list[list[Tensor]]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(*two, strict=True))

    kept, averaged, reset = (last(way) for way in ("keep", "average", "reset"))
    assert apart(averaged) < 1e-5 < apart(kept)
    assert any(float(m.abs().max()) == 0 for two in reset for m in two)


def average_adam(seat: Seat, path: str) -> dict[str, Any]:
    options = {"trigger": lambda_every, "momentum": "average", "buffers": True}
    return train(seat, path, 2, options, None, False, "adam")


def test_adams_first_moments_and_buffers_are_averaged(pools: Callable[[int], Ranks]) -> None:
    one, other = pools(2).run(average_adam, meeting_point())
    for what in ("moments", "buffers", "weights"):
        for a, b in zip(one[what], other[what], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_groups_train_as_one_and_gossip_with_others(pools: Callable[[int], Ranks]) -> None:
    never = {"trigger": lambda_never, "hierarchical": True, "group_size": 2}
    apart = pools(4).run(train_together, meeting_point(), 4, never)
    assert equal(apart[0]["weights"], apart[1]["weights"])
    assert equal(apart[2]["weights"], apart[3]["weights"])
    net = network()  # with the batches of ranks 0 and 1
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        sgd.zero_grad()
        ((loss(net, step, 0) + loss(net, step, 1)) / 2).backward()
        sgd.step()
    for mine, wanted in zip(apart[0]["weights"], net.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted.detach(), rtol=1e-4, atol=1e-6)
    often = {**never, "trigger": lambda_every, "patience_s": 5.0}
    met = pools(4).run(train_together, meeting_point(), 4, often)
    assert equal(met[0]["weights"], met[1]["weights"])
    assert equal(met[2]["weights"], met[3]["weights"])
    assert met[0]["distance"] < apart[0]["distance"]
    reset = pools(4).run(train_together, meeting_point(), 4, {**often, "momentum": "reset"})
    assert equal(reset[0]["weights"], reset[1]["weights"])
    assert equal(reset[2]["weights"], reset[3]["weights"])
    assert met[0]["metrics"].averaged > 0 and met[1]["metrics"].messages == 0


def compare(seat: Seat, path: str) -> tuple[Any, float, list[float]]:
    comm = seat.comm(path, 3)
    weight = nn.Parameter(torch.zeros(2))
    gossip = Gossip(torch.optim.SGD([weight], lr=1.0), [weight], comm, RelativeChange(math.inf))
    with torch.no_grad():
        weight += [1.0, 2.0, 6.0][seat.rank]
    scores = gossip.compare(lambda: float(weight.sum()))
    distance = gossip.consensus_distance()
    gossip.close()
    return scores, distance, weight.tolist()


def test_models_are_compared_with_the_worst_and_the_mean_one(
    pools: Callable[[int], Ranks],
) -> None:
    for rank, (scores, distance, weight) in enumerate(pools(3).run(compare, meeting_point())):
        assert (scores.worst, scores.average, scores.mean_model) == (2.0, 6.0, 6.0)
        assert scores.own == 2 * [1.0, 2.0, 6.0][rank] == sum(weight)
        wanted = math.sqrt(sum(2 * (x - 3) ** 2 for x in (1, 2, 6)) / 3)
        assert math.isclose(distance, wanted, rel_tol=1e-6)


def train_on(seat: Seat, path: str) -> tuple[list[str], Any]:
    comm = seat.comm(path, 3)
    net = network()
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    gossip = Gossip(sgd, net.parameters(), comm, FixedPeriod(1))
    step, after = 0, 0
    deadline = time.monotonic() + 50
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        while not seat.pipe.poll() and time.monotonic() < deadline:
            step += 1
            gossip.zero_grad()
            loss(net, step, seat.rank).backward()
            begin = gossip.metrics().averaged
            gossip.step()
            if step == 10:
                seat.tell("trains")
            averages = gossip.metrics().averaged - begin if gossip.metrics().lost else 0
            if after < 20 <= after + averages:
                seat.tell("goes on")
            after += averages
    assert seat.pipe.recv() == "enough"
    gossip.close()
    return [str(one.message) for one in raised], gossip.metrics()


@pytest.mark.long
def test_a_killed_rank_is_left_out_of_the_training_with_a_warning() -> None:
    pid, found = without_rank_1(train_on)
    for report, metrics in found:
        assert 1 in metrics.lost
        (line,) = [line for line in report if "Gossip goes on without" in line]
        assert f"rank 1 (pid {pid}, " in line


def misuse(seat: Seat, path: str) -> list[str]:
    comm = seat.comm(path, 2)
    net = nn.Linear(2, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    lines = []
    wrong: list[dict[str, Any]] = [
        {"topology": "star"},
        {"topology": [[1], [0], []]},
        {"topology": [[0, 1], [0]]},
        {"trigger": 3},
        {"momentum": "sum"},
        {"compression": "int8"},
        {"max_interval": 0},
        {"group_size": 2},
        {"hierarchical": True, "group_size": 3},
    ]
    for options in wrong:
        with pytest.raises((ValueError, TypeError)) as caught:
            Gossip(sgd, net.parameters(), comm, **options)
        lines.append(str(caught.value))
    with pytest.raises(ValueError, match="parameter 0") as caught:
        Gossip(sgd, [torch.zeros(3, dtype=torch.int64)], comm)
    lines.append(str(caught.value))
    gossip = Gossip(sgd, net.parameters(), comm)
    with pytest.raises(ValueError, match="cannot be added"):
        gossip.add_param_group({"params": [torch.zeros(1)]})
    gossip.close()
    gossip.close()
    with pytest.raises(HsgdError, match="closed"):
        gossip.step()
    return lines


def test_arguments_that_cannot_work_are_refused_in_one_line(pools: Callable[[int], Ranks]) -> None:
    wanted = ('"star" is not known', "3 ranks for 2", "own neighbour", "trigger is a int")
    wanted += ("momentum is 'sum'", "compression is 'int8'", "max_interval is 0")
    wanted += ("for hierarchical=True", "a divisor of 2", "torch.int64")
    for lines in pools(2).run(misuse, meeting_point()):
        for line, part in zip(lines, wanted, strict=True):
            assert part in line and "\n" not in line, (part, line)


def use_as_a_strategy(seat: Seat, path: str, size: int) -> tuple[Any, float]:
    with job(seat, path, size) as hvd:
        net = network()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        for options, words in (
            ({"op": hvd.Sum}, "averages"),
            ({"backward_passes_per_step": 2}, "does not know backward_passes"),
        ):
            with pytest.raises(ValueError, match=f'^strategy="gossip" {words}'):
                hvd.DistributedOptimizer(sgd, strategy="gossip", **options)
        with pytest.raises(ValueError, match="strategy_options are for"):
            hvd.DistributedOptimizer(sgd, strategy_options={"topology": "ring"})
        optimizer = hvd.DistributedOptimizer(
            sgd,
            net.named_parameters(),
            compression=hvd.Compression.bf16,
            strategy="gossip",
            model=net,
            strategy_options={"trigger": FixedPeriod(1), "topology": "ring", "patience_s": 5.0},
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(net, step, seat.rank).backward()
            optimizer.step()
        optimizer.settle()
        metrics, distance = optimizer.metrics(), optimizer.consensus_distance()
        optimizer.close()
        return metrics, distance


def test_it_is_a_strategy_of_the_distributed_optimizer(pools: Callable[[int], Ranks]) -> None:
    for metrics, distance in pools(2).run(use_as_a_strategy, meeting_point(), 2):
        assert metrics.averaged > 0 and distance < 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "way"),
    short_form(
        "chaos", [("node1:1,node2:1", "flat"), ("node1:2,node2:2", "hierarchical")], keep=[1]
    ),
)
def test_nodes_gossip(cluster: Callable[..., Cluster], hosts: str, way: str) -> None:
    size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    done = cluster(2).mpirun(
        size, [sys.executable, str(HERE / "gossip_programs.py"), way], hosts=hosts
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kept"] < 1e-3 and report["distance"] < report["before"] / 2
    sends = 2 if way == "hierarchical" else size
    assert sum(count > 0 for count in report["remote_bytes"]) == min(sends, size)


@pytest.mark.long
def test_the_example_learns(mpirun: Callable[..., Any]) -> None:
    example = HERE.parents[2] / "examples" / "train_gossip.py"
    # a rank has half of the digits, and could get no more than half of the test right by itself;
    # where ranks take turns on the cores it takes twice as many steps
    done = mpirun(
        2, example, "--epochs", "16", "--rate", "0.5", "--target-accuracy", "65", timeout_s=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks: ")
