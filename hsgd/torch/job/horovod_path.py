"""Horovod's own path, for tensors on accelerators other than CUDA; loads Horovod when needed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from hsgd.errors import MissingExtra
from hsgd.jobs.launch import as_horovod, preload
from hsgd.torch.job import runtime

__all__ = ["for_device"]


def for_device(device: torch.device, what: str) -> Any:
    """Return horovod.torch, initialized over the job's ranks, for tensors on a device.

    The first call is collective. The interposer is not involved.

    Raises:
        ValueError: Horovod is not installed, or was not built for this device.
        MissingExtra: the job does not run over MPI.
        LaunchError: Horovod was built for another MPI.
    """
    horovod = _horovod()
    if horovod is None or not (
        horovod.cuda_built() or horovod.rocm_built() or horovod.nccl_built()
    ):
        raise ValueError(
            f"{what}: the tensor is on {device}; hsgd works on host memory, and there is no "
            "Horovod built for this device (HOROVOD_GPU_OPERATIONS); pass tensor.cpu()"
            f"{as_horovod.other_way()}"
        )
    comm = runtime.current().comm
    if comm.mpi is None:
        raise MissingExtra(
            f"{what} is Horovod's own, which needs a job over MPI; start with mpirun or `hsgd run`"
        )
    if not horovod.is_initialized():
        horovod.init(comm.mpi)
    return horovod


@functools.cache
def _horovod() -> Any:
    """Return the module horovod.torch; None if it is not installed, or is hsgd's."""
    libraries = () if as_horovod.is_on() else preload.horovod_libraries()
    if not any(path.parent.name == "torch" for path in libraries):
        return None
    preload.check_horovod()
    return importlib.import_module("horovod.torch")
