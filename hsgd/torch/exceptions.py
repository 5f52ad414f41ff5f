"""The exception names of Horovod that scripts catch.

Owns the classes only. HorovodInternalError is Horovod's word for "a collective failed"; what the
core raised is its __cause__. With HOROVOD_PLUGIN=hsgd they are the classes of the installed
Horovod, which a script may have from horovod.common.exceptions.
"""

from __future__ import annotations

import importlib

from hsgd.jobs.launch import as_horovod

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """A collective failed on this rank or on another; elastic training restores and goes on."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed.

    skip_sync: whether the state is the same on all ranks, so that it need not be sent again.
    """

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework is not the one that was built for. Never raised by hsgd, which builds for none;
    kept for scripts that catch it.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} was built for, {installed_version} is installed")
        self.name = name
        self.version = version
        self.installed_version = installed_version


if as_horovod.by_plugin():
    _theirs = importlib.import_module("horovod.common.exceptions")
    globals().update({name: getattr(_theirs, name) for name in __all__})
