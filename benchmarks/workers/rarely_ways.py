"""The ways of communicating that rarely.py compares, by name: hsgd's, DDP over gloo and torchft.

DDP and torchft meet over gloo; torchft's DiLoCo runs without its servers, so it is its rule and its
allreduces that are measured, not its quorums.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsgd.torch as hvd
from hsgd import Comm
from hsgd.optim import Budget, DiLoCo, ElasticAveraging, FixedPeriod, Gossip, Nesterov, TopK
from hsgd.optim.flat_vectors import values_kept

__all__ = [
    "BASE",
    "EAGER",
    "NEEDS_GLOO",
    "OUTER",
    "WAYS",
    "as_saved",
    "missing",
    "torchft_version",
]

Make = Callable[[Any, nn.Module, Comm, int], Any]

_NEEDS_TORCHFT = ("torchft-30",)
NEEDS_GLOO = ("ddp-gloo", *_NEEDS_TORCHFT)
BASE = "synchronous"
"""What the others are compared with."""
OUTER = Nesterov(lr=0.7, momentum=0.5)


def torchft_version() -> str | None:
    """That of its wheel; None: it is not installed."""
    try:
        return importlib.metadata.version("torchft-nightly")
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(way: str) -> str | None:
    """Why a way cannot run here; None: it can."""
    if way in _NEEDS_TORCHFT and torchft_version() is None:
        return f"{way}: torchft is not installed; pip install --no-deps torchft-nightly"
    if way in _NEEDS_TORCHFT and importlib.util.find_spec("opentelemetry") is None:
        return f"{way}: torchft lacks a package; pip install opentelemetry-exporter-otlp-proto-http"
    return None


class _DDP:
    """DistributedDataParallel over gloo, with the optimizer as it is."""

    def __init__(self, adamw: Any, net: nn.Module, comm: Comm, steps: int) -> None:
        self.forward = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        self.param_groups = adamw.param_groups
        self.step, self.zero_grad = adamw.step, adamw.zero_grad


class _Averages:
    """What torchft's DiLoCo asks of its Manager: averages over gloo, and a count of commits."""

    _use_async_quorum = False

    def __init__(self, size: int) -> None:
        self._size, self._commits = size, 0

    def current_step(self) -> int:
        return self._commits

    def should_commit(self) -> bool:
        self._commits += 1
        return True

    def allreduce(self, tensor: Tensor, **_: Any) -> Any:
        tensor.div_(self._size)
        return dist.all_reduce(tensor, async_op=True)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # quorums, and who may read the state


class _TorchFT:
    """torchft.local_sgd.DiLoCo with the same outer optimizer."""

    def __init__(self, adamw: Any, net: nn.Module, comm: Comm, steps: int) -> None:
        from torchft.local_sgd import DiLoCo as TheirDiLoCo

        self._net = net
        outer = torch.optim.SGD(
            net.parameters(), lr=OUTER.lr, momentum=OUTER.momentum, nesterov=True
        )
        self._theirs = TheirDiLoCo(
            _Averages(comm.size), [net], adamw, outer, sync_every=30, pin_memory=False
        )
        self._theirs.__enter__()
        self.param_groups = adamw.param_groups
        self.step, self.zero_grad = adamw.step, adamw.zero_grad

    @contextlib.contextmanager
    def at_outer_weights(self) -> Iterator[None]:
        (fragment,) = self._theirs._fragments
        own = {name: p.detach() for name, p in self._net.named_parameters()}
        with values_kept(list(own.values())):
            for name, weights in own.items():
                weights.copy_(fragment.original_parameters[name])
            yield

    def close(self) -> None:
        self._theirs.__exit__(None, None, None)


def _diloco(**options: Any) -> Make:
    given = {"outer": OUTER, **options}
    return lambda adamw, net, comm, steps: DiLoCo(adamw, net, comm, **given)


def _elastic(mode: Any) -> Make:
    return lambda adamw, net, comm, steps: ElasticAveraging(
        adamw, net, comm, mode, update_interval=10
    )


def _gossip(adamw: Any, net: nn.Module, comm: Comm, steps: int) -> Gossip:
    return Gossip(
        adamw,
        net,
        comm,
        Budget(1 / 10, steps),
        "exponential2",
        compression="bfloat16",
        hierarchical=comm.cross_size < comm.size,
        patience_s=5.0,
    )


def _noloco(adamw: Any, net: nn.Module, comm: Comm, steps: int) -> Gossip:
    several = comm.cross_size < comm.size
    return Gossip(adamw, net, comm, FixedPeriod(30), outer="noloco", hierarchical=several)


_MEAN = Nesterov(lr=1.0, momentum=0.0)
_STREAM = {"fragments": 4, "delay": 2, "alpha": 0.5}
_SPARSE = TopK(0.03, error_decay=0.95)
WAYS: dict[str, Make] = {
    "synchronous": lambda adamw, net, comm, steps: hvd.DistributedOptimizer(
        adamw, net.named_parameters()
    ),
    "ddp-gloo": _DDP,
    "local-sgd-30": _diloco(sync_every=30, outer=_MEAN),
    "diloco-10": _diloco(sync_every=10),
    "diloco-10-int8": _diloco(sync_every=10, compression="int8"),
    "diloco-30": _diloco(sync_every=30),
    "diloco-100": _diloco(sync_every=100),
    "streaming-30": _diloco(sync_every=30, **_STREAM),
    "eager-30": _diloco(sync_every=30, eager=True),
    "diloco-30-int8": _diloco(sync_every=30, compression="int8"),
    "diloco-30-topk": _diloco(sync_every=30, compression="topk"),
    "sparse-30": _diloco(sync_every=30, compression=_SPARSE, outer=_MEAN),
    "diloco-100-int8": _diloco(sync_every=100, compression="int8"),
    "noloco-30": _noloco,
    "torchft-30": _TorchFT,
    "easgd_async-10": _elastic("async"),
    "easgd_hybrid-10": _elastic("hybrid"),
    "gossip-10": _gossip,
}
"""Ways of communicating, by name. The number is the period in steps, "sparse" the form of
SparseLoCo, gossip's a Budget of 1/10 in bfloat16."""


EAGER = {"eager-30"}
"""Ways whose exchanges are under way at all times."""


@contextlib.contextmanager
def as_saved(optimizer: Any) -> Iterator[None]:
    """Within it the model is what the way would save; collective."""
    if isinstance(optimizer, DiLoCo):
        inner: Any = optimizer.at_outer_weights(average=True)
    elif isinstance(optimizer, _TorchFT):
        inner = optimizer.at_outer_weights()
    elif isinstance(optimizer, ElasticAveraging):
        inner = optimizer.at_centre()
    elif isinstance(optimizer, Gossip):
        optimizer.settle()
        inner = optimizer.mean_model()
    else:
        inner = contextlib.nullcontext()
    with inner:
        yield
