"""NotifiedTree: equal to serial SGD on the global batch, whatever the timing; an end to faults."""

from __future__ import annotations

import copy
import random
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hsgd import HsgdError
from hsgd.config import Config
from hsgd.optim import LARS, NotifiedTree
from hsgd.optim.notified_tree.tree_parts import Part, layers_of, parts_of
from hsgd.optim.notified_tree.tree_plan import (
    Team,
    best_arity,
    gather_children,
    gather_parent,
    share_roots,
    spread_children,
    spread_parent,
    teams_of,
)
from hsgd.optim.notified_tree.tree_updater import Updater
from ranks import Ranks, Seat, meeting_point

__all__: list[str] = []

STEPS = 6
BATCH = 4  # of each rank
DETECTED_S = 3.0


class Odd(nn.Module):
    """Shared weights, a frozen layer, a layer that is used by its parent only, and one that is used
    in some steps only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.twin = nn.Linear(5, 5, bias=False)
        self.twin.weight = self.second.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.borrowed = nn.Linear(5, 5)
        self.rare = nn.Linear(5, 5)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(5, 3)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twin(torch.tanh(self.second(torch.tanh(self.first(x))))))
        x = functional.linear(x, self.borrowed.weight, self.borrowed.bias)
        x = torch.relu(self.frozen(x))
        if self.step % 3 == 1:
            x = self.rare(x)
        return self.last(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Folded(nn.Module):
    """A parameter whose elements lie in another order, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.images = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        images = self.images(self.first(x).view(-1, 3, 2, 2))
        return images.flatten(1)[:, :3] + self.empty.sum()


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "odd": Odd, "folded": Folded}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "damped": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "lars": lambda p: LARS(p, lr=1.0, momentum=0.9, weight_decay=1e-3),
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def serial(model: str, optimizer: str, size: int, steps: int = STEPS) -> list[Tensor]:
    """One process, the batches of all ranks at once."""
    torch.manual_seed(0)
    net = MODELS[model]()
    opt = OPTIMIZERS[optimizer](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for step in range(steps):
        net.step = step  # type: ignore[assignment]
        data = [batch(step, rank) for rank in range(size)]
        opt.zero_grad()
        output = net(torch.cat([x for x, _ in data]))
        functional.mse_loss(output, torch.cat([y for _, y in data])).backward()
        opt.step()
        scheduler.step()
    return [p.detach().clone() for p in net.parameters()]


def take_steps(
    tree: NotifiedTree, scheduler: Any, net: nn.Module, steps: Iterable[int], rank: int
) -> None:
    """A rank's part of training."""
    for step in steps:
        net.step = step  # type: ignore[assignment]
        x, y = batch(step, rank)
        tree.zero_grad()
        functional.mse_loss(net(x), y).backward()
        tree.step()
        scheduler.step()


def train(
    seat: Seat,
    path: str,
    size: int,
    model: str,
    optimizer: str,
    options: dict[str, Any],
    steps: int = STEPS,
) -> list[Tensor]:
    torch.set_num_threads(1)
    comm = seat.comm(path, size)
    torch.manual_seed(seat.rank)  # rank 0's weights count, which are those of seed 0
    net = MODELS[model]()
    opt = OPTIMIZERS[optimizer](net.parameters())
    tree = NotifiedTree(opt, net, comm, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(tree, 2, 0.5)
    take_steps(tree, scheduler, net, range(steps), seat.rank)
    tree.close()
    return [p.detach().clone() for p in net.parameters()]


def check_equal(results: list[list[Tensor]], expected: list[Tensor]) -> None:
    for weights in results:
        for mine, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6)
        for mine, first in zip(weights, results[0], strict=True):
            assert torch.equal(mine, first)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("model", ["mlp", "odd"])
def test_weights_are_those_of_serial_sgd_on_the_global_batch(
    pools: Callable[[int], Ranks], size: int, model: str
) -> None:
    results = pools(size).run(train, meeting_point(), size, model, "sgd", {})
    check_equal(results, serial(model, "sgd", size))


@pytest.mark.parametrize(
    ("optimizer", "overlap"),
    [
        *(("adam", overlap) for overlap in (True, False)),
        *(("lars", overlap) for overlap in (True, False)),
        *((name, True) for name in ("nesterov", "plain", "damped")),
    ],
)
def test_any_optimizer_is_updated_layer_by_layer(
    pools: Callable[[int], Ranks], optimizer: str, overlap: bool
) -> None:
    options = {"overlap_forward": overlap}
    results = pools(2).run(train, meeting_point(), 2, "odd", optimizer, options)
    check_equal(results, serial("odd", optimizer, 2))


@pytest.mark.parametrize(
    ("size", "model", "optimizer"),
    [(1, "odd", "sgd"), (2, "mlp", "nesterov"), (2, "odd", "plain"), (3, "folded", "sgd")]
    + [(2, "odd", name) for name in ("adam", "lars", "damped")],  # whose layers stay whole
)
def test_layers_that_go_in_parts_come_to_the_same_weights(
    pools: Callable[[int], Ranks], size: int, model: str, optimizer: str
) -> None:
    results = pools(size).run(train, meeting_point(), size, model, optimizer, {"part_bytes": 64})
    check_equal(results, serial(model, optimizer, size))


def test_sums_have_a_fixed_order(pools: Callable[[int], Ranks]) -> None:
    one, two = (pools(3).run(train, meeting_point(), 3, "mlp", "sgd", {})[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def step_by_step(seat: Seat, path: str) -> tuple[list[Tensor], int]:
    """Momenta are replaced after the second step, and not used in the fifth. Also, how often the
    root called Python for an update.
    """
    torch.manual_seed(0)
    net, calls = mlp(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    tree = NotifiedTree(optimizer, net, seat.comm(path, 2))
    update = tree._updater.update
    tree._updater.update = lambda *args: (calls.append(args), update(*args))[1]  # type: ignore[func-returns-value, method-assign]
    for step in range(STEPS):
        x, y = batch(step, seat.rank)
        optimizer.param_groups[0]["momentum"] = 0.0 if step == 4 else 0.9
        tree.zero_grad()
        functional.mse_loss(net(x), y).backward()
        tree.step()
        tree.wait()
        if step == 1:
            replace_momenta(optimizer)
    tree.close()
    return [p.detach().clone() for p in net.parameters()], len(calls)


def replace_momenta(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = 0.5 * state["momentum_buffer"]


def test_sgd_is_updated_without_python_until_its_momenta_are_replaced(
    pools: Callable[[int], Ranks],
) -> None:
    results = pools(2).run(step_by_step, meeting_point())
    torch.manual_seed(0)
    net = mlp()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        opt.param_groups[0]["momentum"] = 0.0 if step == 4 else 0.9
        opt.zero_grad()
        for rank in range(2):
            x, y = batch(step, rank)
            (functional.mse_loss(net(x), y) / 2).backward()
        opt.step()
        if step == 1:
            replace_momenta(opt)
    check_equal([weights for weights, _ in results], [p.detach() for p in net.parameters()])
    layers = 3
    assert [calls for _, calls in results] == [2 * layers, 0]


def test_momenta_replaced_between_two_parts_of_a_parameter_are_noticed() -> None:
    net = nn.ParameterList([nn.Parameter(torch.randn(64))])
    (parameter,) = net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    updater = Updater(optimizer, [parameter], None, cut=True)
    options = updater.snapshot()

    def update(part: Part) -> weakref.ref[Tensor]:
        places = updater.update([(s, torch.ones(s.bytes // 4)) for s in part.stretches], options)
        assert places is not None
        updater.keep(part.index, places)
        return weakref.ref(optimizer.state[parameter]["momentum_buffer"])

    first, second, *_ = parts_of(layers_of(net), 64)
    before = update(first)
    assert updater.is_steady()
    replace_momenta(optimizer)
    update(second)
    assert before() is not None  # the first part's places are in it
    assert not updater.is_steady()
    updater.forget()
    assert before() is None
    update(first)
    update(second)
    assert updater.is_steady()


class Twice(nn.Module):
    """Uses a weight behind autograd's back, before it uses it openly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.linear(self.first(x), self.last.weight.detach()))


def use_twice(seat: Seat, path: str) -> str:
    net = Twice()
    tree = NotifiedTree(torch.optim.SGD(net.parameters(), lr=0.1), net, seat.comm(path, 2))
    with pytest.raises(RuntimeError) as caught:
        net(torch.randn(BATCH, 6)).sum().backward()
    tree.close()
    return str(caught.value)


def test_weights_that_may_have_changed_are_refused_on_all_ranks(
    pools: Callable[[int], Ranks],
) -> None:
    for line in pools(2).run(use_twice, meeting_point()):
        assert "modified by an inplace operation" in line


class Uneven(nn.Module):
    """A layer that rank 0 uses in one step, and nobody afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.once = nn.Linear(5, 5)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.once(x) if use else x)


def use_once(seat: Seat, path: str) -> list[Tensor]:
    """Rank 1 says late that it has no gradient for the layer that rank 0 used; the learning rate
    changes meanwhile.
    """
    slow = False

    def late() -> None:
        time.sleep(0.1 if slow else 0.0)

    torch.manual_seed(0)
    net = Uneven()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tree = NotifiedTree(optimizer, net, seat.comm(path, 2), _before_notify=late)
    for step in range(3):
        x, y = batch(step, seat.rank)
        tree.zero_grad()
        functional.mse_loss(net(x, seat.rank == 0 and step == 0), y).backward()
        slow = seat.rank == 1
        tree.step()
        slow = False
        optimizer.param_groups[0]["lr"] = 10.0 ** -(step + 2)
    tree.close()
    return [p.detach().clone() for p in net.parameters()]


def test_a_layer_is_updated_with_the_options_of_its_step_however_late(
    pools: Callable[[int], Ranks],
) -> None:
    results = pools(2).run(use_once, meeting_point())
    torch.manual_seed(0)
    net = Uneven()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        opt.zero_grad()
        for rank in range(2):
            x, y = batch(step, rank)
            (functional.mse_loss(net(x, rank == 0 and step == 0), y) / 2).backward()
        opt.step()
        opt.param_groups[0]["lr"] = 10.0 ** -(step + 2)
    check_equal(results, [p.detach() for p in net.parameters()])


def train_late(seat: Seat, path: str, size: int, steps: int, seed: int) -> list[Tensor]:
    """Training in which notifications are late by up to a tenth of a millisecond, or much more."""
    delays = random.Random(seed * 100 + seat.rank)

    def late() -> None:
        time.sleep(delays.choice([0, 0, 0, 1e-6, 1e-4, 3e-4]))

    return train(seat, path, size, "mlp", "sgd", {"_before_notify": late}, steps)


def test_late_notifications_change_nothing(pools: Callable[[int], Ranks]) -> None:
    steps = 700  # 3 ranks * 3 layers * 2 notifications and more: over 10^4
    results = pools(3).run(train_late, meeting_point(), 3, steps, 1)
    check_equal(results, serial("mlp", "sgd", 3, steps))


def clip(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.05)


def train_clipped(seat: Seat, path: str) -> tuple[list[Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = train(seat, path, 2, "mlp", "sgd", {"before_update": clip})
    return weights, [str(w.message) for w in caught if "NotifiedTree" in str(w.message)]


def test_clipping_by_the_global_norm_waits_for_all_layers_and_says_so(
    pools: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = mlp()
    opt = OPTIMIZERS["sgd"](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for step in range(STEPS):
        data = [batch(step, rank) for rank in range(2)]
        opt.zero_grad()
        output = net(torch.cat([x for x, _ in data]))
        functional.mse_loss(output, torch.cat([y for _, y in data])).backward()
        clip(list(net.parameters()))
        opt.step()
        scheduler.step()
    results = pools(2).run(train_clipped, meeting_point())
    check_equal([weights for weights, _ in results], [p.detach() for p in net.parameters()])
    assert "needs the gradients of all layers" in results[0][1][0]
    assert results[1][1] == []


def accumulate(seat: Seat, path: str) -> list[Tensor]:
    comm = seat.comm(path, 2)
    torch.manual_seed(0)
    net = mlp()
    tree = NotifiedTree(torch.optim.SGD(net.parameters(), lr=0.1), net, comm)
    for step in range(3):
        tree.zero_grad()
        with tree.no_sync():
            x, y = batch(2 * step, seat.rank)
            (functional.mse_loss(net(x), y) / 2).backward()
        x, y = batch(2 * step + 1, seat.rank)
        (functional.mse_loss(net(x), y) / 2).backward()
        tree.step()
    tree.zero_grad()
    losses = [functional.mse_loss(net(x), y) for _ in range(2)]
    losses[0].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()
    with pytest.raises(HsgdError, match="is called between its backward pass and step"):
        net(x)
    tree.step()
    tree.close()
    return [p.detach().clone() for p in net.parameters()]


def test_gradients_accumulate_within_no_sync(pools: Callable[[int], Ranks]) -> None:
    results = pools(2).run(accumulate, meeting_point())
    torch.manual_seed(0)
    net = mlp()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        data = [batch(2 * step + half, rank) for half in range(2) for rank in range(2)]
        opt.zero_grad()
        output = net(torch.cat([x for x, _ in data]))
        functional.mse_loss(output, torch.cat([y for _, y in data])).backward()
        opt.step()
    opt.zero_grad()
    x, y = (torch.cat(parts) for parts in zip(batch(5, 0), batch(5, 1), strict=True))
    functional.mse_loss(net(x), y).backward()
    opt.step()
    check_equal(results, [p.detach() for p in net.parameters()])


def norm_and_state(seat: Seat, path: str) -> Any:
    """BatchNorm, evaluation, saving and loading in the middle."""
    comm = seat.comm(path, 2)
    torch.manual_seed(seat.rank)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    tree = NotifiedTree(OPTIMIZERS["sgd"](net.parameters()), net, comm)

    def step(number: int) -> None:
        x, y = batch(number, seat.rank)
        tree.zero_grad()
        functional.mse_loss(net(x), y).backward()
        tree.step()

    step(0)
    net.eval()
    with torch.no_grad():
        before = net(batch(0, 0)[0])  # waits for the weights of the step
    net.train()
    tree.average_buffers()
    saved = copy.deepcopy((net.state_dict(), tree.state_dict()))
    step(1)
    step(2)
    tree.wait()
    once = copy.deepcopy(net.state_dict())
    net.load_state_dict(saved[0])
    tree.load_state_dict(saved[1])
    comm.barrier()
    step(1)
    step(2)
    tree.wait()
    again = net.state_dict()
    same = all(torch.equal(again[name], once[name]) for name in once if "running" not in name)
    net.eval()
    tree.close()
    tree.close()
    momentum = sum("momentum_buffer" in entry for entry in saved[1]["state"].values())
    return before, same, saved[0], momentum


def test_batch_norm_evaluation_and_state_dicts_work(pools: Callable[[int], Ranks]) -> None:
    one, two = pools(2).run(norm_and_state, meeting_point())
    assert one[1] and two[1]
    assert all(torch.equal(one[2][name], two[2][name]) for name in one[2])
    assert one[3] == 6 and two[3] == 0  # the root has the state


def misuse(seat: Seat, path: str) -> list[str]:
    comm = seat.comm(path, 1)
    net, lines = mlp(), []

    def told(call: Callable[[], Any]) -> None:
        with pytest.raises((ValueError, TypeError, HsgdError)) as caught:
            call()
        lines.append(str(caught.value))

    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    told(lambda: NotifiedTree(sgd, net, comm, arity=0))
    told(lambda: NotifiedTree(sgd, net, comm, part_bytes=-1))
    told(lambda: NotifiedTree(sgd, mlp(), comm))
    told(lambda: NotifiedTree(torch.optim.LBFGS(net.parameters()), net, comm))
    told(lambda: NotifiedTree(sgd, net, comm, roots="last"))
    told(lambda: NotifiedTree(sgd, net, comm, roots="shared", before_update=clip))
    tree = NotifiedTree(sgd, net, comm)
    told(lambda: tree.step(lambda: 0.0))
    told(lambda: tree.add_param_group({"params": []}))
    functional.mse_loss(net(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    sgd.param_groups[0]["lr"] = 7.0
    told(tree.step)
    tree.close()
    told(tree.step)
    tree = NotifiedTree(sgd, net, comm, part_bytes=64)
    sgd.param_groups[0]["dampening"] = 0.5
    told(functional.mse_loss(net(batch(0, 0)[0]), batch(0, 0)[1]).backward)
    tree.close()
    only = nn.Linear(6, 3)  # whose gradient needs no weights
    tree = NotifiedTree(torch.optim.SGD(only.parameters(), lr=0.1), only, comm)
    losses = [only(batch(0, 0)[0]).sum() for _ in range(2)]
    losses[0].backward()
    told(losses[1].backward)
    tree.close()
    return lines


def test_misuse_is_refused_in_one_line(pools: Callable[[int], Ranks]) -> None:
    wanted = ("arity is 0", "part_bytes is -1", "not one of the model's", "LBFGS")
    wanted += ("roots is 'last'",)
    wanted += ("on one rank", "closures", "cannot be added")
    wanted += ("changed between backward() and step()", "this NotifiedTree is closed")
    wanted += ("dampening or maximize was set after large layers were cut",)
    wanted += ("has a second gradient before step()",)
    (lines,) = pools(1).run(misuse, meeting_point())
    for line, part in zip(lines, wanted, strict=True):
        assert part in line and "\n" not in line


def train_until_error(seat: Seat, path: str, size: int, limit_s: float) -> tuple[str, str, float]:
    comm = seat.comm(path, size, Config(timeout_s=limit_s))
    net = mlp()
    tree = NotifiedTree(torch.optim.SGD(net.parameters(), lr=0.01), net, comm)
    try:
        for step in range(1_000_000):
            x, y = batch(step, seat.rank)
            tree.zero_grad()
            functional.mse_loss(net(x), y).backward()
            tree.step()
            if step == 20:
                seat.tell("trains")
    except HsgdError as error:
        report = type(error).__name__, str(error), time.monotonic()
    with pytest.raises(HsgdError):
        tree.wait()
    tree.close()
    return report


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_is_named_on_all_others(victim: int) -> None:
    with Ranks(3) as pool:
        pool.start(train_until_error, meeting_point(), 3, 30.0)
        assert [pool.hear(rank) for rank in range(3)] == ["trains"] * 3
        pid = pool.pid(victim)
        pool.signal(victim, signal.SIGKILL)
        killed = time.monotonic()
        for outcome in pool.finish(on=[rank for rank in range(3) if rank != victim]):
            kind, line, when = outcome.value
            assert kind == "PeerLost" and f"rank {victim} (pid {pid}, " in line, line
            assert line.startswith("NotifiedTree: weights of layer") and "\n" not in line
            assert when - killed < DETECTED_S


def test_a_rank_that_stalls_is_named_at_the_deadline() -> None:
    with Ranks(2) as pool:
        pool.start(train_until_error, meeting_point(), 2, 1.0)
        assert [pool.hear(rank) for rank in range(2)] == ["trains"] * 2
        pool.signal(1, signal.SIGSTOP)
        (outcome,) = pool.finish(on=(0,))
        pool.signal(1, signal.SIGCONT)
        pool.finish(on=(1,))
        kind, line, _ = outcome.value
        assert kind == "CollectiveTimeout" and "no gradient from rank 1" in line


@pytest.mark.parametrize("nodes", range(1, 20))
def test_both_trees_reach_every_node_once(nodes: int) -> None:
    assert all(node in gather_children(gather_parent(node), nodes) for node in range(1, nodes))
    assert sum(len(gather_children(node, nodes)) for node in range(nodes)) == nodes - 1
    for arity in range(1, nodes + 1):
        for node in range(1, nodes):
            assert node in spread_children(spread_parent(node, arity), arity, nodes)
        counts = [len(spread_children(node, arity, nodes)) for node in range(nodes)]
        assert sum(counts) == nodes - 1 and max(counts) <= arity


def test_the_arity_minimises_sends_times_levels() -> None:
    def cost(arity: int, nodes: int) -> int:
        node, levels = nodes - 1, 0
        while node > 0:
            node, levels = spread_parent(node, arity), levels + 1
        return arity * levels

    for nodes in range(2, 70):
        best = best_arity(nodes)
        assert cost(best, nodes) == min(cost(k, nodes) for k in range(1, nodes + 1))


def test_leaders_join_the_nodes_and_ranks_their_leader() -> None:
    teams = [Team.of(rank, [0, 0, 1, 1, 2], 2) for rank in range(5)]
    assert [team.leads for team in teams] == [True, False, True, False, True]
    assert teams[0].is_root and teams[0].gather_from == (2, 4) and teams[0].spread_to == (2, 4)
    assert teams[3].members == (2, 3) and teams[2].gather_to == teams[2].spread_from == 0
    assert teams[4].place == 1 and np.all([team.most_children == 2 for team in teams])


def test_the_best_arity_with_shared_roots_costs_as_little_with_fewer_levels() -> None:
    assert (best_arity(4), best_arity(4, shared_roots=True)) == (1, 3)
    for nodes in range(2, 70):
        assert best_arity(nodes, shared_roots=True) >= best_arity(nodes)


def test_shared_roots_balance_bytes_and_take_turns() -> None:
    assert share_roots([4] * 5, 2) == [0, 1, 0, 1, 0]
    assert share_roots([1, 100, 1, 1], 2) == [1, 0, 1, 1]
    assert share_roots([], 3) == [] and share_roots([7, 9], 1) == [0, 0]


@pytest.mark.parametrize("count", range(1, 6))
def test_every_layer_has_one_root_and_trees_that_fit_together(count: int) -> None:
    nodes = [node for node in range(count) for _ in range(2)]
    sizes = [8] * (2 * count)
    teams = [teams_of(rank, nodes, None, sizes, True) for rank in range(len(nodes))]
    for layer in range(len(sizes)):
        team_of = {rank: teams[rank][layer] for rank in range(len(nodes))}
        leaders = [rank for rank, team in team_of.items() if team.leads]
        (root,) = [rank for rank in leaders if team_of[rank].is_root]
        assert root == 2 * (layer % count) and team_of[root].spread_from == -1
        for rank in leaders:
            for child in team_of[rank].gather_from:
                assert team_of[child].gather_to == rank
                assert team_of[rank].gather_from[team_of[child].place] == child
            assert all(team_of[child].spread_from == rank for child in team_of[rank].spread_to)
        assert sum(len(team_of[rank].gather_from) for rank in leaders) == count - 1
        assert sum(len(team_of[rank].spread_to) for rank in leaders) == count - 1


def end_without_closing(seat: Seat, path: str, size: int) -> Any:
    """A script that only ends: rank 0 is slow to pass weights on, and rank 2 has none of it."""
    slow = (lambda: time.sleep(0.05)) if seat.rank == 0 else None
    comm = seat.comm(path, size)
    net = mlp()
    tree = NotifiedTree(OPTIMIZERS["sgd"](net.parameters()), net, comm, _before_notify=slow)
    for step in range(3):
        x, y = batch(step, seat.rank)
        tree.zero_grad()
        functional.mse_loss(net(x), y).backward()
        tree.step()
    comm.close()
    return [p.detach().clone().tolist() for p in net.parameters()], repr(tree._engine.error)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_script_that_only_ends_leaves_nobody_without_weights(size: int) -> None:
    with Ranks(size) as pool:
        reports = pool.run(end_without_closing, meeting_point(), size)
    # When all have met, one may have gone before the thread of another one stops to listen.
    assert all(error == "None" or "closed its NotifiedWindow" in error for _, error in reports)
    assert all(weights == reports[0][0] for weights, _ in reports)


def end_late(seat: Seat, path: str) -> Any:
    """Rank 1 ends long before rank 0 asks for the weights of the last step, which had come."""
    comm = seat.comm(path, 2)
    net = mlp()
    tree = NotifiedTree(OPTIMIZERS["sgd"](net.parameters()), net, comm)
    x, y = batch(0, seat.rank)
    functional.mse_loss(net(x), y).backward()
    tree.step()
    tree._window.drain()
    if seat.rank == 1:
        tree.wait()
        tree._end()
        return "ended"
    for _ in range(1000):
        if tree._engine.error is not None:
            break
        time.sleep(0.01)
    assert "rank 1" in str(tree._engine.error)
    tree.wait()
    return "waited"


def test_weights_that_came_count_though_others_have_ended() -> None:
    with Ranks(2) as pool:
        assert pool.run(end_late, meeting_point()) == ["waited", "ended"]
