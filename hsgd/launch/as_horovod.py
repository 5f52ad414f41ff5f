"""HSGD_AS_HOROVOD=1: `import horovod.torch` gives hsgd.torch, where no Horovod is installed.

Owns the names of Horovod's modules and what they stand for. The start-up hook asks when a module of
the name horovod is imported; where the variable is not set nothing happens.
"""

from __future__ import annotations

import importlib
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from hsgd.config import Config
from hsgd.errors import LaunchError

__all__ = ["VERSION", "find", "is_on"]

VERSION = "0.28.1"  # whose names hsgd.torch has
_PACKAGES = ("horovod", "horovod.common")
_MODULES = {
    "horovod.common.exceptions": "hsgd.torch.exceptions",
    "horovod.common.process_sets": "hsgd.torch.job.process_sets",
    "horovod.torch": "hsgd.torch",
    **{
        f"horovod.torch.{name}": f"hsgd.torch.{name}"
        for name in (
            *("compression", "elastic", "elastic.sampler", "elastic.state", "functions"),
            *("mpi_ops", "optimizer", "sync_batch_norm"),
        )
    },
}


def is_on() -> bool:
    """Whether modules named horovod are hsgd's in this process; local."""
    return Config.from_env().as_horovod != "0"


def find(name: str, installed: str | None) -> ModuleSpec | None:
    """What stands for the module `name` of Horovod; None where the variable is not set. Local.

    installed: where Horovod is, if it is. Raises LaunchError where it is and was not to be passed
    over, ModuleNotFoundError for modules that hsgd has not.
    """
    choice = Config.from_env().as_horovod
    if choice == "0":
        return None
    if installed is not None and choice != "force":
        raise LaunchError(
            "HSGD_AS_HOROVOD=1 needs an environment without Horovod, and one is installed "
            f"({installed}); set HSGD_AS_HOROVOD=force to ignore it, or use horovodrun --plugin "
            "hsgd"
        )
    if name in _PACKAGES:
        return ModuleSpec(name, _Package(), is_package=True)
    if name in _MODULES:
        return ModuleSpec(name, _Alias(_MODULES[name]))
    raise ModuleNotFoundError(
        f"No module named {name!r}: with HSGD_AS_HOROVOD the name horovod stands for hsgd.torch, "
        "which has no such module",
        name=name,
    )


class _Package(Loader):
    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = VERSION  # type: ignore[attr-defined]
        if module.__name__ == _PACKAGES[0]:
            module.run = _refuse_run  # type: ignore[attr-defined]


def _refuse_run(*_: Any, **__: Any) -> NoReturn:
    raise LaunchError(
        "horovod.run: with HSGD_AS_HOROVOD a program does not start its ranks itself; start it by "
        "`hsgd run --horovod -np N python PROGRAM`, and call the function in each rank"
    )


class _Alias(Loader):
    """Gives a module that is there under another name, as it is."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has set that of the alias
