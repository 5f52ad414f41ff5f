"""HSGD_AS_GLOO=1: hsgd serves process groups that a program makes with gloo.

The start-up hook calls install() when torch.distributed is loaded; from then on a group that has
gloo for CPU tensors is replaced by a GlooGroup, wherever torch stores it. Without the variable
torch is not touched.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hsgd.c10d import NAME
from hsgd.c10d.diagnostics.call_counts import CallCounts
from hsgd.config import Config
from hsgd.errors import LaunchError
from hsgd.jobs.stores.sealed_store import sealed

__all__ = ["install", "is_installed"]

_GLOO = "gloo"
_OTHERS = (NAME, "fake", "undefined")  # other valid backends on the CPU
_LAZY = "TORCH_GLOO_LAZY_INIT"  # torch's variable: gloo connects at the first message
_ARGUMENTS = {
    *("backend", "global_ranks_in_group", "group_name", "group_rank", "group_size"),
    *("store", "timeout"),
}


def install(c10d: ModuleType) -> None:
    """Serve the groups that torch.distributed.distributed_c10d makes from now on; local.

    A second call does nothing. Raises LaunchError if this torch makes groups in another way.
    """
    if is_installed(c10d):
        return
    make = getattr(c10d, "_new_process_group_helper", None)
    parameters = inspect.signature(make) if make is not None else None
    if make is None or parameters is None or not set(parameters.parameters) >= _ARGUMENTS:
        import torch

        raise LaunchError(
            f"HSGD_AS_GLOO=1 does not know how torch {torch.__version__} makes process groups; "
            f"unset HSGD_AS_GLOO and use the backend {NAME!r}"
        )
    counts = CallCounts() if Config.from_env().report else None

    @functools.wraps(make)
    def helper(*arguments: Any, **named: Any) -> Any:
        request = _Request(c10d, parameters.bind(*arguments, **named).arguments)
        if not request.is_for_gloo():
            return make(*arguments, **named)
        from hsgd.c10d import torch_versions  # imports torch, which is not loaded yet at install()

        torch_versions.refuse_old()
        request.announce()
        try:
            made = [*make(*arguments, **named)]
        except RuntimeError:
            request.refuse_mixed()  # other ranks refused, which ends gloo's connections
            raise
        return request.serve(made, counts)

    helper.serves_gloo = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = helper  # type: ignore[attr-defined]


def is_installed(c10d: ModuleType) -> bool:
    """Return whether install() was called for this module; local."""
    return hasattr(getattr(c10d, "_new_process_group_helper", None), "serves_gloo")


class _Request:
    """A request to torch for a group; `given` are arguments of _new_process_group_helper."""

    def __init__(self, c10d: Any, given: Mapping[str, Any]) -> None:
        self._c10d, self._given = c10d, given
        self._ranks = list(given["global_ranks_in_group"]) or list(range(given["group_size"]))
        self._is_default = not given["global_ranks_in_group"]

    def is_for_gloo(self) -> bool:
        """Return whether this rank's CPU tensors would go to gloo; local.

        Raises LaunchError if the program asks for a third backend on the CPU.
        """
        if self._c10d.get_debug_level() == self._c10d.DebugLevel.DETAIL:
            return False  # torch wraps these groups to check each call
        devices = self._c10d.BackendConfig(self._given["backend"]).get_device_backend_map()
        name = str(devices.get("cpu", _GLOO))
        if self._is_default and name not in (_GLOO, *_OTHERS):
            raise LaunchError(
                f"HSGD_AS_GLOO=1 serves programs with the backend gloo, and this one uses {name!r} "
                "on the CPU; leave out --gloo or HSGD_AS_GLOO, or change the backend"
            )
        rank = self._given["group_rank"]
        return devices.get("cpu") == _GLOO and rank is not None and rank >= 0

    def announce(self) -> None:
        """Announce to the other ranks that hsgd serves this one; local."""
        sealed(self._given["store"]).set(self._key(self._given["group_rank"]), NAME)

    def _key(self, group_rank: int) -> str:
        return f"{NAME}/as_gloo/{self._given['group_name']}/{group_rank}"

    def serve(self, made: list[Any], counts: CallCounts | None) -> tuple[Any, Any]:
        """Replace a group by a GlooGroup wherever torch stores it; collective, blocking.

        `made`, torch's group and store, is emptied on errors, so that gloo's connections end and
        other ranks notice.
        """
        group, store = made
        backend = group._get_backend(self._c10d.torch.device("cpu"))
        is_torchs = type(group) is self._c10d.ProcessGroup
        if not is_torchs or not isinstance(backend, self._c10d.ProcessGroupGloo):
            return group, store
        from hsgd.c10d.gloo_group import GlooGroup

        try:
            self.refuse_mixed()
            new = GlooGroup(group, store, self._ranks, self._given["timeout"], counts)
        except BaseException as error:
            self._replace(group, None)
            group.shutdown()
            made.clear()
            del group, backend
            traceback.clear_frames(error.__traceback__)
            raise
        self._replace(group, new)
        if counts is not None:
            counts.print_at_exit(self._ranks[new.rank()])
        return new, store

    def refuse_mixed(self) -> None:
        """Raise LaunchError if other ranks have not announced hsgd.

        gloo has connected all ranks, so they will not announce it later. If gloo connects lazily,
        this does nothing, and the group's deadline finds them.
        """
        if os.environ.get(_LAZY, "0") not in ("", "0"):
            return
        store, keys = sealed(self._given["store"]), [*map(self._key, range(len(self._ranks)))]
        if store.check(keys):
            return
        missing = [
            rank for rank, key in zip(self._ranks, keys, strict=True) if not store.check([key])
        ]
        raise LaunchError(
            f"HSGD_AS_GLOO=1 is set here, and rank {', '.join(map(str, missing[:8]))}"
            f"{' ...' if missing[8:] else ''} made the group without it, or has ended; set it on "
            "all ranks, or on none"
        )

    def _replace(self, old: Any, new: Any) -> None:
        """Replace `old` by `new` wherever torch stores it; remove it if `new` is None; local."""
        world, name = self._c10d._world, old.group_name
        for kept in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
        ):
            if old in kept:
                value = kept.pop(old)
                if new is not None:
                    kept[new] = value
        for groups in world.tags_to_pg.values():
            if old in groups:
                at = groups.index(old)
                groups[at : at + 1] = [] if new is None else [new]
        self._c10d._unregister_process_group(name)
        if new is not None:
            self._c10d._register_process_group(name, new)
