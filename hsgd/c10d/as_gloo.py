"""HSGD_AS_GLOO=1: process groups that a program makes with gloo are served by hsgd.

Owns the switch. The start-up hook calls install() when torch.distributed is loaded; from then on a
group that has gloo for CPU tensors is replaced by a GlooGroup on top of it, wherever torch keeps
it. Where the variable is not set nothing of torch is touched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hsgd.c10d import NAME
from hsgd.c10d.call_counts import CallCounts
from hsgd.config import Config
from hsgd.errors import LaunchError

__all__ = ["install"]

_SERVED, _ALLOWED = "gloo", (NAME, "fake", "undefined")


def install(c10d: ModuleType) -> None:
    """Serve the groups that the module torch.distributed.distributed_c10d makes from now on; local.

    A second call does nothing. Raises LaunchError where this torch makes groups in another way.
    """
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        import torch

        raise LaunchError(
            f"torch {torch.__version__} makes process groups in a way that is not known; leave out "
            f"HSGD_AS_GLOO and ask for the backend {NAME!r}"
        )
    if hasattr(make, "__wrapped__"):
        return
    parameters = inspect.signature(make)
    counts = CallCounts() if Config.from_env().report else None

    @functools.wraps(make)
    def helper(*arguments: Any, **named: Any) -> Any:
        request = _Request(c10d, parameters.bind(*arguments, **named).arguments)
        if not request.is_for_gloo():
            return make(*arguments, **named)
        request.say_so()
        group, store = make(*arguments, **named)
        return request.served(group, store, counts), store

    c10d._new_process_group_helper = helper  # type: ignore[attr-defined]


class _Request:
    """A group that torch is asked for. given: arguments of _new_process_group_helper."""

    def __init__(self, c10d: Any, given: Mapping[str, Any]) -> None:
        self._c10d, self._given = c10d, given
        self._ranks = list(given["global_ranks_in_group"]) or list(range(given["group_size"]))
        self._is_default = not given["global_ranks_in_group"]

    def is_for_gloo(self) -> bool:
        """Whether this rank is of it and torch will make gloo for CPU tensors; local.

        Raises LaunchError where the program asks for a third backend on the CPU.
        """
        rank = self._given["group_rank"]
        if rank is None or rank < 0:
            return False
        if self._c10d.get_debug_level() == self._c10d.DebugLevel.DETAIL:
            return False  # what torch wraps to check it
        devices = self._c10d.BackendConfig(self._given["backend"]).get_device_backend_map()
        name = str(devices.get("cpu", _SERVED))
        if self._is_default and name not in (_SERVED, *_ALLOWED):
            raise LaunchError(
                f"HSGD_AS_GLOO=1 serves programs that ask for gloo, and this one asks for {name!r} "
                "on the CPU; leave out --gloo or HSGD_AS_GLOO, or change the backend"
            )
        return bool(devices.get("cpu") == _SERVED)

    def say_so(self) -> None:
        """Tell the other ranks that this one will be served by hsgd; local."""
        self._store().set(str(self._given["group_rank"]), NAME)

    def _store(self) -> Any:
        name = f"{NAME}/as_gloo/{self._given['group_name']}"
        return self._c10d.PrefixStore(name, self._given["store"])

    def served(self, group: Any, store: Any, counts: CallCounts | None) -> Any:
        """The group in place of `group`, known to torch instead of it; collective, blocking."""
        if type(group) is not self._c10d.ProcessGroup:
            return group
        backend = group._get_backend(self._c10d.torch.device("cpu"))
        if not isinstance(backend, self._c10d.ProcessGroupGloo):
            return group
        from hsgd.c10d.gloo_group import GlooGroup

        try:
            self._refuse_mixed()
            new = GlooGroup(group, store, self._ranks, self._given["timeout"], counts)
        except BaseException:
            self._replace(group, None)
            group.shutdown()
            raise
        self._replace(group, new)
        if self._is_default and counts is not None:
            counts.print_at_exit(group.rank())
        return new

    def _refuse_mixed(self) -> None:
        """gloo has met: who has not said so by now never will."""
        store = self._store()
        silent = [rank for index, rank in enumerate(self._ranks) if not store.check([str(index)])]
        if silent:
            raise LaunchError(
                f"HSGD_AS_GLOO=1 is set here but not on rank {', '.join(map(str, silent[:8]))}"
                f"{' ...' if silent[8:] else ''}; set it on all ranks, or on none"
            )

    def _replace(self, old: Any, new: Any) -> None:
        """Wherever torch knows `old` it knows `new` then, or nothing if that is None; local."""
        world, name = self._c10d._world, old.group_name
        for known in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
        ):
            if old in known:
                value = known.pop(old)
                if new is not None:
                    known[new] = value
        for groups in world.tags_to_pg.values():
            if old in groups:
                at = groups.index(old)
                groups[at : at + 1] = [] if new is None else [new]
        self._c10d._unregister_process_group(name)
        if new is not None:
            self._c10d._register_process_group(name, new)
