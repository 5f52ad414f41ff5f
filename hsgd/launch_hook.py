"""Start-up hook: a .pth line runs it as the top-level module `hsgd_horovod_hook`.

It serves programs that know nothing of hsgd:
- `horovodrun` gets its --plugin option.
- A worker with HOROVOD_PLUGIN set gets the interposer before Horovod's MPI library is loaded.
- A program with HSGD_AS_GLOO=1 gets hsgd's process groups if it asks for gloo.
- One with HSGD_AS_HOROVOD=1 or HOROVOD_PLUGIN=hsgd gets hsgd.torch if it imports horovod.torch.

At start-up it only adds one finder to sys.meta_path: it imports no module (not even hsgd) and never
raises. The work is done when a watched module is imported, by horovodrun, preload and as_horovod of
hsgd.jobs.launch and by hsgd.c10d.as_gloo.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["Finder", "install"]

LAUNCHER = "horovod.runner.launch"
SERVED = ("horovod.torch", "horovod.common.process_sets")  # with HOROVOD_PLUGIN=hsgd
FRAMEWORKS = ("horovod.torch", "horovod.tensorflow", "horovod.mxnet")
C10D = "torch.distributed.distributed_c10d"
OPERATIONS = tuple(
    name + ".mpi_ops" for name in FRAMEWORKS
)  # once loaded, Horovod's MPI library is bound


class Finder:
    """Finder that asks the other finders, and acts before or after a watched module runs."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "horovod" and (spec := self._stand_in(name)) is not None:
            return spec
        if name == LAUNCHER:
            return self._watch(name, path, target, after=_add_plugin_option)
        if name in FRAMEWORKS:
            return self._watch(name, path, target, before=_load_plugin)
        if name in OPERATIONS:
            return self._watch(name, path, target, after=_verify_plugin)
        if name == C10D and _serves_gloo():
            return self._watch(name, path, target, after=_serve_gloo)
        return None

    def _watch(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None,
        before: Callable[[ModuleType], None] | None = None,
        after: Callable[[ModuleType], None] | None = None,
    ) -> ModuleSpec | None:
        spec = self._elsewhere(name, path, target)
        if spec is None:
            return None
        run = getattr(spec.loader, "exec_module", None)
        if run is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            if before is not None:
                before(module)
            run(module)
            if after is not None:
                after(module)

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec

    def _elsewhere(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                return spec
        return None

    def _stand_in(self, name: str) -> ModuleSpec | None:
        """Return the replacement for a module of Horovod, or None if no setting asks for one."""
        import os

        by_plugin = _plugin() == "hsgd" and name.startswith(SERVED)
        if not os.environ.get("HSGD_AS_HOROVOD") and not by_plugin:
            return None
        theirs = self._elsewhere("horovod")
        try:
            from hsgd.jobs.launch import as_horovod

            place = None if theirs is None else theirs.origin or "an unknown place"
            return as_horovod.find(name, place)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                raise
            raise SystemExit(f"hsgd: error: {error}") from None


def install() -> None:
    """Put one Finder in front; local, at most once per interpreter."""
    if not any(
        type(finder).__name__ == "Finder" and type(finder).__module__ == __name__
        for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, Finder())


def _add_plugin_option(launcher: ModuleType) -> None:
    try:
        from hsgd.jobs.launch import horovodrun

        horovodrun.extend(launcher)
    except Exception as error:  # plain horovodrun must work, whatever state hsgd is in
        print(f"hsgd: warning: horovodrun has no --plugin option: {error}", file=sys.stderr)


def _plugin() -> str:
    import os

    return os.environ.get("HOROVOD_PLUGIN", "").strip()


def _load_plugin(module: ModuleType) -> None:
    if _plugin():
        _or_exit("as_horovod", "refuse_beside", module, module.__name__)
        _or_exit("preload", "load_for_plugin", module)


def _verify_plugin(module: ModuleType) -> None:
    if _plugin():
        _or_exit("preload", "verify_horovod", module)


def _serves_gloo() -> bool:
    import os

    return os.environ.get("HSGD_AS_GLOO", "0") not in ("", "0")


def _serve_gloo(module: ModuleType) -> None:
    """Install hsgd's gloo replacement or exit: never train over gloo if hsgd was requested."""
    try:
        from hsgd.config import Config

        if Config.from_env().as_gloo:
            from hsgd.c10d import as_gloo

            as_gloo.install(module)
    except Exception as error:
        raise SystemExit(f"hsgd: error: {error}") from None


def _or_exit(owner: str, step: str, module: ModuleType, *arguments: str) -> None:
    """Run `step`, or exit with one line and code 1: never train flat if asked for two levels."""
    try:
        import importlib

        getattr(importlib.import_module(f"hsgd.jobs.launch.{owner}"), step)(*arguments)
    except Exception as error:
        raise SystemExit(
            f"hsgd: error: HOROVOD_PLUGIN={_plugin()}, {module.__name__}: {error}"
        ) from None


install()
