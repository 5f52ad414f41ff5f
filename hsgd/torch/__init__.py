"""`import hsgd.torch as hvd`: Horovod's API for PyTorch with two-level collectives under it.

Owns the order of loading, first the interposer and then Horovod, and hands out every public name
and submodule of horovod.torch unchanged. Never goes on without the interposer: what would be flat
raises LaunchError here, at import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from hsgd import preload
from hsgd.errors import MissingExtra

_SUBMODULES = (
    "compression",
    "elastic",
    "elastic.sampler",
    "elastic.state",
    "functions",
    "mpi_ops",
    "optimizer",
    "sync_batch_norm",
)


def _load_horovod() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("hsgd.torch needs PyTorch, which is not installed; pip install torch")
    if not any(path.parent.name == "torch" for path in preload.horovod_libraries()):
        raise MissingExtra(
            "hsgd.torch needs Horovod built for PyTorch, which is not installed; "
            "python -m hsgd.horovod_wheel --install builds and installs it"
        )
    preload.load_for_horovod()
    module = importlib.import_module("horovod.torch")
    preload.verify_horovod()
    return module


def _alias_submodules() -> None:
    """One copy of each module: `import hsgd.torch.mpi_ops` is horovod.torch.mpi_ops itself."""
    for name in _SUBMODULES:
        sys.modules[f"{__name__}.{name}"] = importlib.import_module(f"horovod.torch.{name}")


_horovod = _load_horovod()
_alias_submodules()
__all__ = sorted(name for name in vars(_horovod) if not name.startswith("_"))
globals().update((name, getattr(_horovod, name)) for name in __all__)


def __getattr__(name: str) -> Any:
    """Names that Horovod defines later, and all names for type checkers."""
    try:
        return getattr(_horovod, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
