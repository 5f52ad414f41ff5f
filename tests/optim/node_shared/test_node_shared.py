"""One copy of the parameters per node: the same bits as the same optimizer after an allreduce."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hsgd import Comm, HsgdError, PeerLost
from hsgd.optim import LAMB, LARS
from hsgd.optim.node_shared import node_shared_optimizer
from hsgd.optim.node_shared.node_shared_optimizer import (
    NodeSharedOptimizer,
    share_parameters,
)
from hsgd.optim.node_shared.shared_parameters import ALIGNMENT
from ranks import PATIENT, Ranks, Seat, meeting_point

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("one_thread")

MOST_RANKS = 4
STEPS = 5

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "lars": lambda p: LARS(p, lr=1.0, weight_decay=0.01, trust_coefficient=0.02),
    "lamb": lambda p: LAMB(p, lr=0.01, weight_decay=0.01),
}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(13, 37),
        nn.BatchNorm1d(37),
        nn.ReLU(),
        nn.Linear(37, 5, bias=False),
        nn.Linear(5, 3),
    )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, not in the order of the model."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.05}]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    result: torch.Tensor = model(torch.randn(8, 13)).square().mean()
    return result


def weights(model: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


def make_gradients(model: nn.Module, optimizer: Any, rank: int, step: int, way: str) -> None:
    optimizer.zero_grad(set_to_none=way != "zeros")
    loss_of(model, rank, step).backward()
    if way == "two passes":
        loss_of(model, rank, step + 50).backward()
    if way == "by hand":  # one tensor for two parameters, as nobody else reads it
        same = torch.full((37,), 0.1 * (rank + step))
        model[0].bias.grad = model[1].weight.grad = same


def take_step(model: nn.Module, optimizer: Any, comm: Comm, step: int, way: str = "plain") -> None:
    make_gradients(model, optimizer, comm.rank, step, way)
    if way == "by hand" or way == "synchronized":
        optimizer.synchronize()
    optimizer.step()


def take_reference_step(
    model: nn.Module, optimizer: Any, comm: Comm, step: int, way: str = "plain"
) -> None:
    make_gradients(model, optimizer, comm.rank, step, way)
    model[0].bias.grad = model[0].bias.grad.clone()
    for parameter in model.parameters():
        if parameter.grad is not None:
            comm.allreduce(parameter.grad, "mean", out=parameter.grad)
    optimizer.step()


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state_dict that compares."""
    flat = {
        index: {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in entry.items()
            if value is not None
        }
        for index, entry in state["state"].items()
    }
    flat = {index: entry for index, entry in flat.items() if entry}  # SGD without momentum
    return {"state": flat, "param_groups": state["param_groups"]}


def do_compare(seat: Seat, path: str, size: int, kind: str) -> dict[str, bool]:
    torch.set_num_threads(1)
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        model = make_model(seat.rank)  # all get the root's values
        reference = make_model(0)
        shared = share_parameters(model, comm)
        optimizer = NodeSharedOptimizer(MAKERS[kind](groups_of(model)), shared)
        other = MAKERS[kind](groups_of(reference))
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, other)]
        same_start = weights(model) == weights(reference)
        for step in range(STEPS):
            take_step(model, optimizer, comm, step)
            take_reference_step(reference, other, comm, step)
            for scheduler in schedulers:
                scheduler.step()
        return {
            "start": same_start,
            "weights": weights(model) == weights(reference),
            "state": plain(optimizer.state_dict()) == plain(other.state_dict()),
        }


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_is_bitwise_that_of_the_same_optimizer(ranks: Ranks, size: int, kind: str) -> None:
    found = ranks.run(do_compare, meeting_point(), size, kind, on=range(size))
    assert found == [{"start": True, "weights": True, "state": True}] * size


def do_compare_in_batches(seat: Seat, path: str, size: int, kind: str, way: str) -> bool:
    torch.set_num_threads(1)
    small = mock.patch.object(node_shared_optimizer, "_BATCH", 2 * ALIGNMENT)
    with small, Comm.local(path, seat.rank, size, PATIENT) as comm:
        model, reference = make_model(), make_model()
        optimizer = NodeSharedOptimizer(
            MAKERS[kind](groups_of(model)), share_parameters(model, comm)
        )
        other = MAKERS[kind](groups_of(reference))
        for step in range(STEPS):
            take_step(model, optimizer, comm, step, way)
            take_reference_step(reference, other, comm, step, way)
        assert kind == "lars" or len(optimizer._batches) > 1
        same = plain(optimizer.state_dict()) == plain(other.state_dict())
        return same and weights(model) == weights(reference)


@pytest.mark.parametrize("way", ["plain", "zeros", "two passes", "synchronized", "by hand"])
@pytest.mark.parametrize("kind", ["fused", "adam", "lars"])
def test_it_is_the_same_in_batches_and_however_gradients_come(
    ranks: Ranks, kind: str, way: str
) -> None:
    found = ranks.run(do_compare_in_batches, meeting_point(), 3, kind, way, on=range(3))
    assert found == [True] * 3


def do_train(
    seat: Seat, path: str, size: int, kind: str, steps: range, start: Any
) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        model = make_model()
        if start is not None:
            model.load_state_dict(start[0])
        optimizer = NodeSharedOptimizer(
            MAKERS[kind](groups_of(model)), share_parameters(model, comm)
        )
        if start is not None:
            optimizer.load_state_dict(start[1])
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()  # the same on all ranks: their number plays no role
            optimizer.step()
        state = copy.deepcopy(model.state_dict())
        return {name: value.clone() for name, value in state.items()}, optimizer.state_dict()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_checkpoint_loads_with_another_number_of_ranks_and_in_one_process(
    ranks: Ranks, kind: str
) -> None:
    """Written by 2 ranks, read and written by 3, which take no step (three equal gradients do not
    have themselves as their mean), continued by 4 and by one process: as if never interrupted.
    """
    by_two = ranks.run(do_train, meeting_point(), 2, kind, range(3), None, on=range(2))
    by_three = ranks.run(do_train, meeting_point(), 3, kind, range(0), by_two[1], on=range(3))
    saved = by_three[2]
    assert plain(saved[1]) == plain(by_two[0][1])
    by_four = ranks.run(do_train, meeting_point(), 4, kind, range(3, 6), saved, on=range(4))
    whole, resumed = make_model(), make_model(1)
    resumed.load_state_dict(saved[0])
    optimizers = [MAKERS[kind](groups_of(model)) for model in (whole, resumed)]
    optimizers[1].load_state_dict(saved[1])
    for step in range(6):
        for model, optimizer, first in zip((whole, resumed), optimizers, (0, 3), strict=True):
            if step >= first:
                optimizer.zero_grad()
                loss_of(model, 0, step).backward()
                optimizer.step()
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
        for outcome in by_four:
            assert torch.equal(outcome[0][name], value), name


def do_share_batches(seat: Seat, path: str, size: int, kind: str) -> float:
    """How far the weights are from those of one process with the batches of all ranks."""
    torch.set_num_threads(1)
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        model, alone = (nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 3)) for _ in "ab")
        shared = share_parameters(model, comm)
        alone.load_state_dict(model.state_dict())
        optimizer = NodeSharedOptimizer(MAKERS[kind](model.parameters()), shared)
        other = MAKERS[kind](alone.parameters())
        rows = torch.randn(STEPS, size, 6, 13, generator=torch.Generator().manual_seed(3))
        for step in range(STEPS):
            optimizer.zero_grad()
            model(rows[step, comm.rank]).square().mean().backward()
            optimizer.step()
            other.zero_grad()
            alone(rows[step].flatten(0, 1)).square().mean().backward()
            other.step()
        apart = [
            float((a - b).norm() / b.norm())
            for a, b in zip(model.parameters(), alone.parameters(), strict=True)
        ]
        return max(apart)


@pytest.mark.parametrize("kind", ["momentum", "lars"])
def test_training_is_that_of_one_process_with_the_global_batch(ranks: Ranks, kind: str) -> None:
    for apart in ranks.run(do_share_batches, meeting_point(), 3, kind, on=range(3)):
        assert apart < 1e-6


def do_look_at_buffers(seat: Seat, path: str) -> tuple[list[float], int]:
    with Comm.local(path, seat.rank, 2, PATIENT) as comm:
        model = make_model()
        model.register_buffer("seen", torch.tensor([comm.rank, 7]))
        optimizer = NodeSharedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), share_parameters(model, comm)
        )
        take_step(model, optimizer, comm, 0)
        norm, seen = model[1], model.get_buffer("seen")
        kept = [name for name, _ in model.named_buffers()]
        return (
            [*norm.running_mean[:2].tolist(), *seen.tolist()],
            int(norm.num_batches_tracked),
            kept,
        )


def test_buffers_stay_each_ranks_own_whatever_their_dtype(ranks: Ranks) -> None:
    first, second = ranks.run(do_look_at_buffers, meeting_point(), on=range(2))
    assert first[0][:2] != second[0][:2]  # statistics of different batches
    assert (first[0][2:], second[0][2:]) == ([0.0, 7.0], [1.0, 7.0])
    assert first[1] == second[1] == 1


def do_leave_some_out(seat: Seat, path: str) -> list[bool]:
    with Comm.local(path, seat.rank, 3, PATIENT) as comm:
        used_by_one, used_by_none = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4))
        late = nn.Parameter(torch.ones(3), requires_grad=False)
        model = nn.ParameterList([used_by_one, used_by_none, late])
        shared = share_parameters(model, comm)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        optimizer = NodeSharedOptimizer(sgd, shared)
        if comm.rank == 1:
            used_by_one.sum().backward()
        optimizer.step()
        seen = [used_by_one.tolist() == pytest.approx([1 - (1 / 3 + 0.5)] * 5)]
        seen.append(used_by_none.tolist() == [1.0] * 4)
        late.requires_grad_(True)
        optimizer.zero_grad()
        (3 * late).sum().backward()
        optimizer.step()
        seen.append(late.tolist() == pytest.approx([1 - 3.5] * 3))
        seen.append(used_by_none.tolist() == [1.0] * 4)
        return seen


def test_unused_and_late_unfrozen_parameters(ranks: Ranks) -> None:
    assert ranks.run(do_leave_some_out, meeting_point(), on=range(3)) == [[True] * 4] * 3


def do_average_large(seat: Seat, path: str) -> list[bool]:
    """Gradients that pass the caches: made by autograd, put there by hand, and with other strides
    than their parameter.
    """
    with Comm.local(path, seat.rank, 2, PATIENT) as comm:
        weight = nn.Parameter(torch.zeros(3, (1 << 18) + 7))
        shared = share_parameters(nn.ParameterList([weight]), comm)
        optimizer = NodeSharedOptimizer(torch.optim.SGD([weight], lr=1.0), shared)
        base = (torch.arange(weight.numel()) % 1000).view_as(weight).float()
        seen = []
        for step in range(1, 4):
            if step == 1:
                (weight * (base + comm.rank)).sum().backward()
            elif step == 2:
                weight.grad = base + comm.rank
            else:
                weight.grad = (base + comm.rank).t().contiguous().t()
            optimizer.step()
            seen.append(torch.equal(weight, -step * (base + 0.5)))
            optimizer.zero_grad()
        return seen


def test_large_gradients_are_averaged_to_the_last_element(ranks: Ranks) -> None:
    assert ranks.run(do_average_large, meeting_point(), on=range(2)) == [[True] * 3] * 2


def do_clip(seat: Seat, path: str, norm_type: float) -> tuple[bool, bool]:
    torch.set_num_threads(1)
    with Comm.local(path, seat.rank, 3, PATIENT) as comm:
        model, reference = make_model(), make_model()
        optimizer = NodeSharedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), share_parameters(model, comm)
        )
        other = torch.optim.SGD(reference.parameters(), lr=0.1)
        loss_of(model, seat.rank, 0).backward()
        norm = optimizer.clip_grad_norm_(0.01, norm_type)
        optimizer.step()
        loss_of(reference, seat.rank, 0).backward()
        for parameter in reference.parameters():
            comm.allreduce(parameter.grad, "mean", out=parameter.grad)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        other.step()
        close = all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-8)
            for a, b in zip(model.parameters(), reference.parameters(), strict=True)
        )
        return bool(torch.isclose(norm.float(), expected, rtol=1e-5)), close


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_over_all_parameters(
    ranks: Ranks, norm_type: float
) -> None:
    found = ranks.run(do_clip, meeting_point(), norm_type, on=range(3))
    assert found == [(True, True)] * 3


def do_write_outside(seat: Seat, path: str) -> list[float]:
    with Comm.local(path, seat.rank, 3, PATIENT) as comm:
        model = make_model()
        shared = share_parameters(model, comm)
        loaded = make_model(7).state_dict()
        shared.synchronize()
        if comm.local_rank == 2:  # any one rank of the node will do
            model.load_state_dict(loaded)
        shared.synchronize()
        same = [
            torch.equal(parameter, loaded[name]) for name, parameter in model.named_parameters()
        ]
        return [float(all(same))]


def test_what_one_rank_loads_the_whole_node_has(ranks: Ranks) -> None:
    assert ranks.run(do_write_outside, meeting_point(), on=range(3)) == [[1.0]] * 3


def do_swap(seat: Seat, path: str) -> list[bool]:
    """Initialization, and evaluation with averaged weights in the midst of a training."""
    torch.set_num_threads(1)
    with Comm.local(path, seat.rank, 2, PATIENT) as comm:
        model, reference = make_model(), make_model(5)
        shared = share_parameters(model, comm)
        optimizer = NodeSharedOptimizer(MAKERS["momentum"](groups_of(model)), shared)
        other = MAKERS["momentum"](groups_of(reference))
        with torch.no_grad():
            shared.synchronize()
            if comm.local_rank == 0:  # as one rank, with any function that writes
                for mine, given in zip(model.parameters(), reference.parameters(), strict=True):
                    nn.init.zeros_(mine)
                    mine.add_(given)
            shared.synchronize()
        seen = [weights(model) == weights(reference)]
        average = torch.optim.swa_utils.AveragedModel(reference, multi_avg_fn=ema())
        for step in range(STEPS):
            take_step(model, optimizer, comm, step)
            take_reference_step(reference, other, comm, step)
            average.update_parameters(reference)
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            for values in (average.module.parameters(), kept):
                shared.synchronize()
                with torch.no_grad():  # as all ranks, with the same values
                    for mine, value in zip(model.parameters(), values, strict=True):
                        mine.copy_(value)
                shared.synchronize()
                if values is not kept:
                    seen.append(weights(model) == weights(average.module))
        return [*seen, weights(model) == weights(reference)]


def ema() -> Any:
    return torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)


def test_a_node_is_initialized_and_swapped_with_averaged_weights(ranks: Ranks) -> None:
    found = ranks.run(do_swap, meeting_point(), on=range(2))
    assert found == [[True] * (STEPS + 2)] * 2


def shared_kib() -> int:
    """Proportional share of this process in memory that ranks share, KiB."""
    total, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0] and not line[0].isupper():
                ours = "memfd:hsgd" in line
            elif ours and line.startswith("Pss:"):
                total += int(line.split()[1])
    return total


def do_weigh(seat: Seat, path: str, size: int, count: int) -> int:
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        comm.barrier()
        before = shared_kib()
        model = nn.ParameterList([nn.Parameter(torch.ones(count))])
        optimizer = NodeSharedOptimizer(
            torch.optim.Adam(model.parameters()), share_parameters(model, comm)
        )
        model[0].sum().backward()
        optimizer.step()
        comm.barrier()
        after = shared_kib()
        comm.barrier()
        return after - before


def test_parameters_and_state_exist_once_per_node(ranks: Ranks) -> None:
    count = 1 << 20  # 4 MiB of parameters, 8 of state, and 4 of gradients for each rank
    found = ranks.run(do_weigh, meeting_point(), 4, count, on=range(4))
    mib = sum(found) / 1024
    assert 4 + 8 + 4 * 4 <= mib < 4 + 8 + 4 * 4 + 2, found


def do_step_until_told(seat: Seat, path: str) -> tuple[str, int, bool]:
    torch.set_num_threads(1)
    with Comm.local(path, seat.rank, 3, PATIENT) as comm:
        model = make_model()
        optimizer = NodeSharedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            share_parameters(model, comm),
        )
        take_step(model, optimizer, comm, 0)
        saved = optimizer.state_dict()
        kept = copy.deepcopy(saved)
        seat.tell("ready")
        try:
            for step in range(1, 1_000_000):
                take_step(model, optimizer, comm, step)
        except HsgdError as error:
            return type(error).__name__, error.rank, plain(saved) == plain(kept)
        raise AssertionError("nobody was missed")


def test_a_rank_that_is_killed_is_named_and_the_last_state_dict_stays() -> None:
    with Ranks(3) as pool:
        pool.start(do_step_until_told, meeting_point())
        for rank in range(3):
            pool.hear(rank)
        pool.signal(1, signal.SIGKILL)
        for outcome in pool.finish(on=[0, 2]):
            assert outcome.value == (PeerLost.__name__, 1, True), outcome.trace


def do_die_in_the_update(seat: Seat, path: str, victim: int) -> tuple[str, int, bool, int]:
    """The victim has updated its first piece when it is killed; the others may be done."""
    torch.set_num_threads(1)
    with Comm.local(path, seat.rank, 3, PATIENT) as comm:
        model = make_model()
        optimizer = NodeSharedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.1), share_parameters(model, comm)
        )
        take_step(model, optimizer, comm, 0)
        weights_before = copy.deepcopy(model.state_dict())
        saved = optimizer.state_dict()
        kept = copy.deepcopy(saved)
        if comm.rank == victim:
            inner = optimizer._batches[0].optimizer
            groups = inner.param_groups
            half = [{**group, "params": group["params"][:1]} for group in groups[:1]]

            def begin_and_die(closure: Any = None) -> None:
                torch.optim.Adam(half).step()
                os.kill(os.getpid(), signal.SIGKILL)

            inner.step = begin_and_die
        try:
            take_step(model, optimizer, comm, 1)
        except HsgdError as error:
            kind, rank = type(error).__name__, error.rank
        intact = plain(saved) == plain(kept)
        whole = make_model(1)  # goes on alone, from what was saved
        whole.load_state_dict(weights_before)
        alone = torch.optim.Adam(whole.parameters(), lr=0.1)
        alone.load_state_dict(saved)
        loss_of(whole, 0, 1).backward()
        alone.step()
        return kind, rank, intact, int(alone.state[whole[0].weight]["step"])


def test_a_rank_killed_in_the_update_leaves_peer_lost_and_the_last_state_dict() -> None:
    with Ranks(3) as pool:
        pool.start(do_die_in_the_update, meeting_point(), 1)
        for outcome in pool.finish(on=[0, 2]):
            assert outcome.value == (PeerLost.__name__, 1, True, 2), outcome.trace


def local(model: nn.Module) -> Any:
    return share_parameters(model, Comm.local(meeting_point(), 0, 1))


def test_optimizers_that_need_whole_tensors_are_refused_by_name() -> None:
    model = make_model()
    shared = local(model)
    with pytest.raises(ValueError, match=r"^node_shared: Adagrad is not supported.*SGD, Adam"):
        NodeSharedOptimizer(torch.optim.Adagrad(model.parameters()), shared)


def test_an_optimizer_with_state_or_foreign_parameters_is_refused() -> None:
    model, other = make_model(), make_model()
    shared = local(model)
    used = torch.optim.Adam(model.parameters())
    loss_of(model, 0, 0).backward()
    used.step()
    with pytest.raises(ValueError, match=r"^node_shared: the Adam has state already"):
        NodeSharedOptimizer(used, shared)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0, shape \(37, 13\), is not among"):
        NodeSharedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), shared)


def test_a_parameter_that_left_the_shared_memory_is_named() -> None:
    model = make_model()
    optimizer = NodeSharedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), local(model))
    loss_of(model, 0, 0).backward()
    model[3].weight.data = torch.zeros(5, 37)
    with pytest.raises(
        RuntimeError, match=r"^node_shared: parameter 4, shape \(5, 37\), no longer"
    ):
        optimizer.step()


def test_only_floating_point_parameters_in_host_memory_are_shared() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)])
    with pytest.raises(
        ValueError, match=r"^share_parameters: parameter 0, shape \(2,\), is torch.int64"
    ):
        local(model)


def test_sparse_gradients_and_later_groups_are_refused() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = NodeSharedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), local(model))
    with pytest.raises(TypeError, match=r"^node_shared: parameter 0, shape \(5, 2\), has a sparse"):
        model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"^node_shared: groups cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_gradient_scaler_is_refused_and_hooks_are_called() -> None:
    model = make_model()
    optimizer = NodeSharedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), local(model))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0, 0)).backward()
    with pytest.raises(ValueError, match=r"^node_shared: GradScaler decides on each rank"):
        scaler.step(optimizer)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.step()
    assert called == ["before", "after"]


def test_nothing_is_left_in_shared_memory() -> None:
    assert [name for name in os.listdir("/dev/shm") if "hsgd" in name] == []
