"""Modules of Horovod that hsgd replaces: `import horovod.torch` gives hsgd.torch.

With HSGD_AS_HOROVOD=1 all of them, if no Horovod is installed. With HOROVOD_PLUGIN=hsgd only those
of PyTorch, beside an installed Horovod, which keeps its other frameworks. The choice depends on the
environment, and on whether horovodrun is loaded, never on what the script uses: ranks with
different choices would wait for each other forever. A script that needs more is refused. The
start-up hook calls find() when a module of the name horovod is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hsgd.config import Config
from hsgd.errors import LaunchError
from hsgd.jobs.launch import hook, preload

__all__ = ["VERSION", "announce", "by_plugin", "find", "is_on", "other_way", "refuse_beside"]

VERSION = "0.28.1"  # hsgd.torch has the names of this version
_OTHER_WAY = (
    f"horovodrun --plugin {preload.INTERPOSER} (HOROVOD_PLUGIN={preload.INTERPOSER}) keeps "
    "Horovod's own horovod.torch, over MPI calls of hsgd"
)
_LAUNCHER = "horovod.runner.launch"
_TORCH = "horovod.torch"
_PROCESS_SETS = "horovod.common.process_sets"
_OTHERS = ("horovod.tensorflow", "horovod.mxnet")
_PACKAGES = ("horovod", "horovod.common")
_MODULES = {
    "horovod.common.exceptions": "hsgd.torch.exceptions",
    _PROCESS_SETS: "hsgd.torch.job.process_sets",
    _TORCH: "hsgd.torch",
    **{
        f"{_TORCH}.{name}": f"hsgd.torch.{name}"
        for name in (
            *("compression", "elastic", "elastic.sampler", "elastic.state", "functions"),
            *("mpi_ops", "optimizer", "sync_batch_norm"),
        )
    },
}


def is_on() -> bool:
    """Return whether `import horovod.torch` gives hsgd.torch in this process; local."""
    return Config.from_env().as_horovod != "0" or by_plugin()


def by_plugin() -> bool:
    """Return whether HOROVOD_PLUGIN=hsgd gives hsgd.torch; local. False in horovodrun itself."""
    return (
        preload.plugin_of(os.environ) == preload.AS_HOROVOD
        and Config.from_env().as_horovod == "0"
        and _LAUNCHER not in sys.modules
        and hook.is_installed()
        and hook.find_elsewhere("horovod") is not None
        and importlib.util.find_spec("torch") is not None
    )


def other_way(first: str = "") -> str:
    """Return a hint for errors that Horovod would not raise; empty without the plugin; local."""
    return f"; {first}{_OTHER_WAY}" if _TORCH in sys.modules and by_plugin() else ""


def find(name: str, installed: str | None) -> ModuleSpec | None:
    """Return the spec that replaces Horovod's module `name`; None to use Horovod's own. Local.

    Raises LaunchError if HSGD_AS_HOROVOD=1 and Horovod is `installed` at that place,
    ModuleNotFoundError if hsgd has no such module.
    """
    choice = Config.from_env().as_horovod
    if choice == "0":
        return _find_for_plugin(name) if by_plugin() else None
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


def _find_for_plugin(name: str) -> ModuleSpec | None:
    if name == _PROCESS_SETS and any(other in sys.modules for other in _OTHERS):
        return None
    if name in (_TORCH, _PROCESS_SETS) or name.startswith(f"{_TORCH}."):
        if name not in _MODULES:
            raise ModuleNotFoundError(
                f"No module named {name!r}: with HOROVOD_PLUGIN=hsgd horovod.torch is hsgd.torch, "
                f"which has no such module; {_OTHER_WAY}",
                name=name,
            )
        return ModuleSpec(name, _PluginAlias(name, _MODULES[name]))
    return None


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
    """Loader that returns an existing module under another name."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has set that of the alias


class _PluginAlias(_Alias):
    """Loader for a script that may need names that only Horovod's own module has."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(target)
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            preload.refuse_other_backends(os.environ)
            _refuse_both(next((n for n in _OTHERS if f"{n}.mpi_ops" in sys.modules), None))
            return super().create_module(spec)
        except Exception as error:
            raise SystemExit(f"hsgd: error: HOROVOD_PLUGIN=hsgd, {self._name}: {error}") from None

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self._name == _TORCH:
            for name, target in _MODULES.items():
                if name.startswith(_TORCH):
                    served: Any = importlib.import_module(target)
                    served.__getattr__ = functools.partial(_refuse_missing, name, target)


def _refuse_missing(name: str, target: str, wanted: str) -> NoReturn:
    """Raise for the name `wanted`, which the module `target` lacks.

    SystemExit if Horovod's own module `name` has it: the script needs it, and `from ... import`
    would turn an AttributeError into an ImportError without these words. Else AttributeError.
    """
    if wanted in _horovods_names(name):
        raise SystemExit(
            f"hsgd: error: HOROVOD_PLUGIN=hsgd: {name} is {target}, which has no {wanted}; "
            f"{_OTHER_WAY}"
        )
    raise AttributeError(f"module {target!r} has no attribute {wanted!r}")


@functools.cache
def _horovods_names(module: str) -> frozenset[str]:
    """Return the names that Horovod's file of a module defines or imports from Horovod."""
    place = Path(hook.find_elsewhere("horovod") or "").parent.joinpath(*module.split(".")[1:])
    if not place.is_dir():
        return frozenset(_names_in(ast.parse(place.with_suffix(".py").read_text()).body))
    beside = {path.name.partition(".")[0] for path in place.iterdir()}
    return frozenset(beside | {*_names_in(ast.parse((place / "__init__.py").read_text()).body)})


def _names_in(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
            yield from (each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _names_in(node.body + node.orelse)


def refuse_beside(name: str) -> None:
    """Raise LaunchError if one of Horovod's built frameworks joins hsgd's horovod.torch; local."""
    if name not in _OTHERS or not by_plugin() or not {_TORCH, _PROCESS_SETS} & sys.modules.keys():
        return
    if any(path.parent.name == name.partition(".")[2] for path in preload.horovod_libraries()):
        _refuse_both(name)


def _refuse_both(other: str | None) -> None:
    if other is not None:
        raise LaunchError(
            f"this program imports both horovod.torch, which is hsgd.torch, and {other}, which is "
            f"Horovod's; {_OTHER_WAY}"
        )


@functools.cache
def announce(ignored: tuple[str, ...]) -> None:
    """Print, once, that horovod.torch is hsgd.torch, and its `ignored` variables; local."""
    if _TORCH not in sys.modules or not is_on():
        return
    if by_plugin():
        print(f"hsgd: horovod.torch is hsgd.torch; {_OTHER_WAY}", file=sys.stderr)
    if ignored:
        print(
            f"hsgd: {', '.join(ignored)}: ignored, because hsgd.torch does not read them",
            file=sys.stderr,
        )
