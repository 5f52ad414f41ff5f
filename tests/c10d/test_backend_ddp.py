"""DistributedDataParallel and FSDP2 over backend "hsgd": what they compute, and on all ranks alike.

gloo is the reference for DDP, one process with the global batch for FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from backend_programs import group, not_in_torch_2_7
from gloo_reference import over_gloo
from ranks import Ranks, Seat

__all__: list[str] = []

SIZE, STEPS, ROWS = 2, 4, 6
MOST_RANKS = SIZE
Weights = list[list[float]]


class Net(nn.Module):
    """Two ways through it, a buffer, and more parameters than fit in one small bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 64)
        self.norm = nn.BatchNorm1d(64)
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 3)

    def forward(self, rows: torch.Tensor, way: str = "both") -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(rows)))
        if way != "right":
            hidden = hidden + torch.tanh(self.left(hidden))
        if way != "left":
            hidden = hidden + torch.tanh(self.right(hidden))
        return self.last(hidden)


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.last = nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((rows[:, :4] * 7).long() % 20).mean(1))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ROWS, 10, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    model: DistributedDataParallel,
    rank: int,
    steps: int = STEPS,
    forward: Callable[..., torch.Tensor] | None = None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        out = model(batch(rank, step)) if forward is None else forward(model, step)
        out.square().mean().backward()
        optimizer.step()


def _plain(rank: int) -> nn.Module:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    train(model, rank)
    return model


def _unused(rank: int) -> nn.Module:
    model = DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=0.01)
    ways = ["left", "right"]
    train(model, rank, forward=lambda m, step: m(batch(rank, step), ways[(rank + step) % 2]))
    return model


def _static(rank: int) -> nn.Module:
    model = DistributedDataParallel(Net(), static_graph=True, gradient_as_bucket_view=True)
    train(model, rank, forward=lambda m, step: m(batch(rank, step), "left"))
    return model


def _no_sync(rank: int) -> nn.Module:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch(rank, step)).mean().backward()
        model(batch(rank, step + 50)).mean().backward()
        optimizer.step()
    return model


def _join(rank: int) -> nn.Module:
    model = DistributedDataParallel(Net().eval())
    with Join([model]):
        train(model, rank, steps=2 + 2 * rank)
    return model


def _half_hook(rank: int) -> nn.Module:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, rank)
    return model


def _python_hook(rank: int) -> nn.Module:
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, no text
        gathered = torch.empty(SIZE * bucket.buffer().numel())
        work = dist.all_gather_into_tensor(gathered, bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: gathered.view(SIZE, -1).mean(0))

    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    model.register_comm_hook(None, hook)
    train(model, rank)
    return model


def _power_hook(rank: int) -> nn.Module:
    model = DistributedDataParallel(Net())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, rank)
    return model


def _sparse(rank: int) -> nn.Module:
    model = DistributedDataParallel(Words())
    train(model, rank)
    return model


def _wrapped_hook(rank: int) -> nn.Module:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    model.register_comm_hook(None, hook)
    train(model, rank)
    return model


class Wide(nn.Module):
    """More than a MiB of parameters, so that buckets move to shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(10, 700), nn.Tanh(), nn.Linear(700, 600))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.parts(rows)


def _wide(rank: int) -> nn.Module:
    model = DistributedDataParallel(Wide(), bucket_cap_mb=1.2)
    train(model, rank)
    return model


def _wide_views(rank: int) -> nn.Module:
    model = DistributedDataParallel(Wide(), gradient_as_bucket_view=True)
    train(model, rank)
    return model


def _wide_join(rank: int) -> nn.Module:
    model = DistributedDataParallel(Wide())
    with Join([model]):
        train(model, rank, steps=2 + 2 * rank)
    return model


DDP = {
    function.__name__.strip("_"): function
    for function in (
        *(_plain, _unused, _static, _no_sync, _join, _half_hook, _python_hook, _power_hook),
        *(_sparse, _wrapped_hook, _wide, _wide_views, _wide_join),
    )
}


def train_all(rank: int, size: int) -> dict[str, Weights]:
    torch.set_num_threads(1)
    found = {}
    for name, function in DDP.items():
        torch.manual_seed(5 + rank)  # DDP sends rank 0's weights
        model = function(rank)
        found[name] = [each.detach().flatten().tolist() for each in model.parameters()]
    return found


def do_ddp(seat: Seat, path: str) -> dict[str, Weights]:
    with group(seat.rank, SIZE, path):
        return train_all(seat.rank, SIZE)


@pytest.fixture(scope="module")
def trained(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Weights]]]:
    path = str(tmp_path_factory.mktemp("stores") / "store")
    return {"gloo": over_gloo(SIZE, path, train_all), "hsgd": ranks.run(do_ddp, path)}


@pytest.mark.parametrize("name", DDP)
def test_ddp_is_that_over_gloo_and_bitwise_equal_on_all_ranks(
    trained: dict[str, list[dict[str, Weights]]], name: str
) -> None:
    ours, theirs = trained["hsgd"], trained["gloo"]
    assert ours[0][name] == ours[1][name]
    for mine, other in zip(ours[0][name], theirs[0][name], strict=True):
        assert mine == pytest.approx(other, rel=1e-6, abs=1e-6)


def is_in_shared_memory(tensor: torch.Tensor) -> bool:
    with open("/proc/self/maps") as lines:
        for line in lines:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return "memfd:hsgd" in line
    return False


def do_move_buckets(seat: Seat, path: str) -> tuple[list[bool], list[bool], list[bool], bool]:
    """Whether gradients, which are views of buckets, lie in shared memory, step by step; and what
    a user's tensor of the same form does, and a gradient that outlives its group.
    """
    torch.set_num_threads(1)
    moved, alike = [], []
    with group(seat.rank, SIZE, path):
        torch.manual_seed(0)
        model = DistributedDataParallel(Wide(), gradient_as_bucket_view=True)
        for step in range(4):
            model.zero_grad()
            model(batch(seat.rank, step)).square().mean().backward()
            gradient = model.module.parts[2].weight.grad
            moved.append(is_in_shared_memory(gradient))
            gathered = [torch.empty_like(gradient) for _ in range(SIZE)]
            dist.all_gather(gathered, gradient)
            alike.append(torch.equal(*gathered))
        own = torch.ones(1 << 19)
        for _ in range(3):
            work = dist.all_reduce(own, async_op=True)
            assert work is not None
            work.wait()
        users = [is_in_shared_memory(own), own[7].item() == SIZE**3]
    return moved, alike, users, bool(gradient.isfinite().all())


@pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="this torch moves no storage"
)
def test_buckets_move_to_shared_memory_and_tensors_of_the_user_stay(
    ranks: Ranks, path: str
) -> None:
    for moved, alike, users, usable in ranks.run(do_move_buckets, path):
        assert moved == [False, False, True, True]  # DDP makes them anew after the first step
        assert alike == [True] * 4
        assert users == [False, True]
        assert usable


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(10, 33), nn.Linear(33, 17), nn.Linear(17, 3)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            rows = torch.tanh(part(rows))
        return rows


def do_fsdp(seat: Seat, path: str) -> tuple[list[float], list[float], bool]:
    """(FSDP2's weights, those of one process with the global batch, state dict round trip)"""
    torch.set_num_threads(1)
    with group(seat.rank, SIZE, path):
        torch.manual_seed(0)
        alone, model = Stack(), Stack()
        model.load_state_dict(alone.state_dict())
        for part in model.parts:
            fully_shard(part)
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        reference = torch.optim.Adam(alone.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(seat.rank, step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            reference.zero_grad()
            whole = torch.cat([batch(rank, step) for rank in range(SIZE)])
            alone(whole).square().mean().backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            reference.step()
        full = [each.full_tensor() for each in model.parameters()]  # type: ignore[operator]
        other = [each.detach() for each in alone.parameters()]
        return (
            torch.cat([each.detach().flatten() for each in full]).tolist(),
            torch.cat([each.flatten() for each in other]).tolist(),
            any(each.to_local().numel() < each.numel() for each in model.parameters()),  # type: ignore[operator]
        )


def test_fsdp2_is_one_process_with_the_global_batch(ranks: Ranks, path: str) -> None:
    results = ranks.run(do_fsdp, path)
    assert results[0][0] == results[1][0]
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-5, abs=1e-6)
    assert results[0][2]  # every rank keeps a part only


def do_fsdp_half(seat: Seat, path: str) -> bool:
    with group(seat.rank, SIZE, path):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 3))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model(batch(seat.rank, 0)).float().sum().backward()
        grads = [each.grad for each in model.parameters()]
        return all(grad is not None and bool(grad.full_tensor().isfinite().all()) for grad in grads)


@not_in_torch_2_7
def test_fsdp2_takes_bfloat16_and_a_mesh_of_two_dimensions(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_fsdp_half, path) == [True] * SIZE
