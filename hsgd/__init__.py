"""hsgd: two-level collectives, contiguous HDF5 input and large-batch training for multi-rank nodes.

The import loads nothing heavy: the first use of a communicator loads NumPy, MPI and the native
core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hsgd import errors
from hsgd.errors import (
    ClosedError,
    CollectiveTimeout,
    DataError,
    HsgdError,
    LaunchError,
    MissingExtra,
    PeerLost,
    QueueFull,
    ReplicasDiffer,
    SharedMemoryError,
    SignatureMismatch,
)

if TYPE_CHECKING:
    from hsgd.comm.communicator import Comm
    from hsgd.comm.handle import Handle
    from hsgd.comm.preemption import preempted, save_and_exit
    from hsgd.onesided.notified_window import NotifiedWindow
    from hsgd.onesided.parameter_box import ParameterBox
    from hsgd.world import (
        cross_rank,
        cross_size,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "CollectiveTimeout",
    "Comm",
    "DataError",
    "Handle",
    "HsgdError",
    "LaunchError",
    "MissingExtra",
    "NotifiedWindow",
    "ParameterBox",
    "PeerLost",
    "QueueFull",
    "ReplicasDiffer",
    "SharedMemoryError",
    "SignatureMismatch",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "preempted",
    "rank",
    "save_and_exit",
    "shutdown",
    "size",
]

_MODULES = {
    "Comm": "hsgd.comm.communicator",
    "Handle": "hsgd.comm.handle",
    "NotifiedWindow": "hsgd.onesided.notified_window",
    "ParameterBox": "hsgd.onesided.parameter_box",
    "preempted": "hsgd.comm.preemption",
    "save_and_exit": "hsgd.comm.preemption",
}
_MODULES |= {name: "hsgd.world" for name in __all__ if name.islower() and name not in _MODULES}


def __getattr__(name: str) -> Any:
    if name == "_native":
        return _load_native()
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'hsgd' has no attribute {name!r}")


def _load_native() -> Any:
    """Return the compiled module; ImportError in a folder of sources without it."""
    from pathlib import Path

    try:
        importlib.import_module("hsgd.tools.status.dump")  # now: after a loss no disk may answer
        return importlib.import_module("hsgd._native")
    except ModuleNotFoundError as error:
        if error.name != "hsgd._native":
            raise
    folder = Path(__file__).parent
    remedy = (
        "install hsgd again: pip install --force-reinstall --no-deps --no-cache-dir SOURCES, or a "
        "wheel of it"
    )
    if (folder.parent / "setup.py").exists():
        remedy = (
            "this is the folder of the sources, which Python prefers to an installed hsgd: change "
            "to another folder, or build here with pip install -e ."
        )
    raise ImportError(
        f"hsgd was imported from {folder}, which has no compiled library; {remedy}",
        name="hsgd._native",
        path=str(folder),
    )


def _report(error: HsgdError) -> None:
    """Show what the ranks of this node do after a timeout, or a loss if HSGD_DUMP_DIR is set."""
    from hsgd.tools.status import dump

    dump.after(error)


errors.observers.append(_report)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
