"""guard: compares the ranks of a DistributedDataParallel while they train."""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hsgd.comm.communicator import Comm
from hsgd.optim.replicas.replica_guard import ReplicaGuard

__all__ = ["guard", "guard_all"]


def guard(model: DistributedDataParallel, *, buffers: bool = False) -> DistributedDataParallel:
    """Compare the parameters of all ranks of `model` in its forward passes, and return it; local.

    Works over any backend. Forward passes in training that begin a step become collective: the
    first compares all parameters, each later one a share, so that all are compared within 520
    steps; HSGD_CHECK_REPLICAS=1 compares all in each step, 0 none. They raise hsgd.ReplicasDiffer
    on all ranks. `buffers` compares buffers too; BatchNorm's statistics differ between ranks unless
    they come from SyncBatchNorm. Not compared: what DDP ignores, and steps within its join().

    Raises:
        TypeError: `model` is of another class.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"hsgd.torch.guard: {type(model).__name__} is not a DistributedDataParallel; give it "
            "the model that DDP returned"
        )
    _watch(model, model.module, buffers=buffers)
    return model


@functools.cache
def guard_all() -> None:
    """Guard each DDP that this process makes from now on; local. Later calls do nothing."""

    def registered(module: nn.Module, name: str, inner: nn.Module | None) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel) and inner is not None:
            _watch(module, inner, buffers=False)

    register_module_module_registration_hook(registered)


def _watch(model: DistributedDataParallel, inner: nn.Module, *, buffers: bool) -> None:
    found = weakref.ref(model)  # the model holds the inner module, which holds the hook

    def tensors() -> list[tuple[str, Tensor]]:
        alive = found()
        assert alive is not None
        named = [*inner.named_parameters(), *(inner.named_buffers() if buffers else ())]
        return [(name, tensor) for name, tensor in named if name not in alive.parameters_to_ignore]

    replicas = ReplicaGuard(tensors)
    group: Comm | None = None
    begins = True  # whether this forward pass is the first of a step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check(_: nn.Module, __: Any) -> None:
        nonlocal begins, group
        alive = found()
        # Other ranks need not make a forward pass of the inner module alone or without gradients.
        if alive is None or not (inner.training and torch.is_grad_enabled()):
            return
        if DistributedDataParallel._active_ddp_module is not alive:
            return
        first, begins = begins, alive.require_backward_grad_sync
        if not first or alive._join_config.enable:
            return
        group = group or cast(Comm, _Group(alive.process_group))
        replicas.check(group)

    inner.register_forward_pre_hook(check)


class _Group:
    """The parts of a communicator that ReplicaGuard uses, over a process group of any backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        devices = group._device_types
        self._device = next((d for d in devices if d.type == "cpu"), devices[0])

    def broadcast(self, array: np.ndarray, root: int = 0, name: str = "") -> None:
        numbers = torch.from_numpy(array).to(self._device)
        dist.broadcast(numbers, dist.get_global_rank(self._group, root), self._group)
        array[:] = numbers.cpu().numpy()

    def allreduce(self, array: np.ndarray, op: str, out: np.ndarray, name: str = "") -> None:
        assert op == "max"
        numbers = torch.from_numpy(array).to(self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group)
        out[:] = numbers.cpu().numpy()

    def allgather(self, array: np.ndarray, name: str = "") -> np.ndarray:
        numbers = torch.from_numpy(array).to(self._device)
        parts = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(parts, numbers, self._group)
        return torch.cat(parts).cpu().numpy()
