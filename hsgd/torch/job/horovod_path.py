"""What Horovod itself does for hsgd.torch: tensors on accelerators other than CUDA.

Owns the loading of Horovod, when it is first needed, and the handles that it gave. Where it is not
installed, or cannot do it, raises one clear error.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch
from hsgd.errors import MissingExtra
from hsgd.jobs.launch import as_horovod, preload
from hsgd.torch.job import runtime

__all__ = ["for_device", "installed", "keep", "load", "owns", "poll", "synchronize", "usable"]

_REMEDY = "python -m hsgd.jobs.launch.horovod_wheel --install builds and installs it"
_lock = threading.Lock()
_handles: dict[int, Any] = {}
_loaded: list[Any] = []


def installed() -> bool:
    """Whether Horovod built for PyTorch is there; local, imports nothing of it."""
    if as_horovod.is_on():  # its name is hsgd's
        return False
    return any(path.parent.name == "torch" for path in preload.horovod_libraries())


def load(what: str) -> Any:
    """The module horovod.torch; local. Raises MissingExtra that says who needs it, LaunchError when
    it was built for another MPI.

    Without the interposer: what Horovod does here is nothing that it would take.
    """
    if not installed():
        raise MissingExtra(
            f"{what} is Horovod's own, and Horovod for PyTorch is not installed; {_REMEDY}"
        )
    with _lock:
        if not _loaded:
            preload.check_horovod()
            _loaded.append(importlib.import_module("horovod.torch"))
    return _loaded[0]


def usable(what: str) -> Any:
    """load(), and Horovod's own init() over all ranks of the job; the first use is collective."""
    comm = runtime.current().comm
    if comm.mpi is None:
        raise MissingExtra(
            f"{what} is Horovod's own, which needs a job over MPI; start with mpirun or `hsgd run`"
        )
    horovod = load(what)
    if not horovod.is_initialized():
        horovod.init(comm.mpi)
    return horovod


def for_device(device: torch.device, what: str) -> Any:
    """Horovod for tensors on `device`. Raises ValueError where it was not built for that."""
    if installed():
        horovod = load(what)
        if horovod.cuda_built() or horovod.rocm_built() or horovod.nccl_built():
            return usable(what)
    raise ValueError(
        f"{what}: the tensor is on {device}; hsgd works on host memory, and there is no Horovod "
        "built for this device (HOROVOD_GPU_OPERATIONS); pass tensor.cpu()"
        f"{as_horovod.other_way()}"
    )


def keep(number: int, handle: Any) -> None:
    """Remember that a handle of hsgd.torch stands for one of Horovod's."""
    _handles[number] = handle


def owns(number: int) -> bool:
    """Whether the handle is one of those."""
    return number in _handles


def poll(number: int) -> bool:
    """Horovod's poll()."""
    return bool(_loaded[0].poll(_handles[number]))


def synchronize(number: int) -> Any:
    """Horovod's synchronize()."""
    return _loaded[0].synchronize(_handles.pop(number))
