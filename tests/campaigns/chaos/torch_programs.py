"""Programs of ranks over torch.distributed, on hsgd and on gloo, and over hsgd.torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from campaigns.chaos.fault_seat import FaultSeat
from campaigns.seat import WrongResult, check

__all__ = ["apart", "c10d", "ddp", "fsdp", "gloo", "gloo_ddp", "horovod"]


def _functions(seat: FaultSeat, backend: str) -> None:
    seat.join_torch(backend)
    total = float(sum(range(seat.size)))
    for step in seat.loop():
        count = seat.luck.choice((1, 1000, 50_000, 300_000))
        given = torch.full((count,), float(seat.rank))
        kind = seat.luck.randrange(5)
        if kind == 0:
            dist.all_reduce(given)
            check(given, total, "all_reduce")
        elif kind == 1:
            work: Any = dist.all_reduce(given, async_op=True)
            work.wait()
            check(given, total, "all_reduce, asynchronous")
        elif kind == 2:
            dist.broadcast(given, step % seat.size)
            check(given, float(step % seat.size), "broadcast")
        elif kind == 3:
            found = [torch.empty(count) for _ in range(seat.size)]
            dist.all_gather(found, given)
            for rank, block in enumerate(found):
                check(block, float(rank), "all_gather")
        else:
            dist.barrier()
    dist.destroy_process_group()


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 700), nn.Linear(700, 700), nn.Linear(700, 8))


def _bias_gradient(model: Any) -> torch.Tensor:
    found: torch.Tensor = model[2].bias.grad
    return found


def _train(seat: FaultSeat, model: nn.Module, gradient: Callable[[], torch.Tensor]) -> None:
    """The gradient of the last bias is the mean over ranks of what they multiply the loss by."""
    for step in seat.loop():
        model.zero_grad()
        scale = float(seat.rank + step % 3)
        model(torch.ones(1, 64)).sum().mul(scale).backward()
        wanted = (seat.size - 1) / 2 + step % 3
        found = gradient()
        if not torch.allclose(found, torch.full_like(found, wanted)):
            raise WrongResult(f"gradient {found[:4].tolist()}, not {wanted}")


def _ddp(seat: FaultSeat, backend: str) -> None:
    seat.join_torch(backend)
    model = _model()
    _train(seat, DistributedDataParallel(model, bucket_cap_mb=1), partial(_bias_gradient, model))
    dist.destroy_process_group()


def fsdp(seat: FaultSeat) -> None:
    """Parameters, gradients and states in shards."""
    seat.join_torch()
    model: Any = _model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    _train(seat, model, lambda: model[2].bias.grad.full_tensor())
    dist.destroy_process_group()


def horovod(seat: FaultSeat) -> None:
    """Horovod's API, with a strategy of those that keep ranks together."""
    options = seat.luck.choice((*_TOGETHER, *_TOGETHER, *_SHARED))
    _with_optimizer(seat, options, is_exact=options in _TOGETHER)


def apart(seat: FaultSeat) -> None:
    """Horovod's API, with a strategy by which ranks go on by themselves."""
    _with_optimizer(seat, seat.luck.choice(_APART), is_exact=False)


_TOGETHER: tuple[dict[str, Any], ...] = (
    {},
    {"strategy": "overlap"},
    {"strategy": "after_backward"},
)
_SHARED: tuple[dict[str, Any], ...] = (
    {"node_shared": True},
    {"strategy": "notified_tree"},
    {"strategy": "diloco", "strategy_options": {"sync_every": 3, "group": None}},
)
_APART: tuple[dict[str, Any], ...] = tuple(
    {"strategy": strategy} for strategy in ("gossip", "easgd_async", "easgd_hybrid")
)


def _with_optimizer(seat: FaultSeat, options: dict[str, Any], *, is_exact: bool) -> None:
    import hsgd.torch as hvd

    hvd.init(seat.communicator())
    model: Any = _model()
    if not is_exact and "strategy" in options:
        options = {**options, "model": model}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6),
        named_parameters=model.named_parameters(),
        **options,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def synchronized() -> torch.Tensor:
        optimizer.step()
        return _bias_gradient(model)

    if is_exact:
        _train(seat, model, synchronized)
    else:
        for _ in seat.loop():
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            if not bool(torch.isfinite(model[2].bias).all()):
                raise WrongResult(f"{options}: {model[2].bias[:4].tolist()}")
    hvd.shutdown()


c10d = partial(_functions, backend="hsgd")
gloo = partial(_functions, backend="gloo")
ddp = partial(_ddp, backend="hsgd")
gloo_ddp = partial(_ddp, backend="gloo")
