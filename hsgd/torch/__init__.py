"""Horovod's API for PyTorch on hsgd's own collectives: `import hsgd.torch as hvd`.

Horovod need not be installed, except for tensors on accelerators other than CUDA.
"""

from __future__ import annotations

import importlib.util

from hsgd.errors import MissingExtra

if importlib.util.find_spec("torch") is None:
    raise MissingExtra("hsgd.torch needs PyTorch, which is not installed; pip install torch")

from hsgd.c10d import register
from hsgd.comm.preemption import preempted, save_and_exit
from hsgd.optim.replicas.guarded_ddp import guard
from hsgd.torch import elastic, mpi_ops, preemptible_job
from hsgd.torch.exceptions import HorovodVersionMismatchError, HostsUpdatedInterrupt
from hsgd.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hsgd.torch.mpi_ops import *  # noqa: F403
from hsgd.torch.optimizer import DistributedOptimizer
from hsgd.torch.strategy_table import share_parameters
from hsgd.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "guard",
    "preempted",
    "save_and_exit",
    "share_parameters",
]
__all__ += mpi_ops.__all__

register()  # in case that torch does not load entry points
del register
preemptible_job.register()
