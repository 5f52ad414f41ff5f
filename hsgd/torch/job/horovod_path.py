"""What Horovod itself does for hsgd.torch: tensors on accelerators other than CUDA.

Owns the loading of Horovod, when it is first needed. Where it is not installed, or cannot do it,
raises one clear error.
"""

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
    """Return horovod.torch for tensors on a device, initialized over all ranks of the job; the
    first call is collective.

    Without the interposer: what Horovod does here is nothing that it would take.

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
    """The module horovod.torch; None if it is not installed, or its name is hsgd's."""
    libraries = () if as_horovod.is_on() else preload.horovod_libraries()
    if not any(path.parent.name == "torch" for path in libraries):
        return None
    preload.check_horovod()
    return importlib.import_module("horovod.torch")
