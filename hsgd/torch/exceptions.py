"""The exception names of Horovod that scripts catch.

Owns the classes, and the way from the core's errors to them. HorovodInternalError is Horovod's word
for "a collective failed"; what the core raised is its __cause__. With HOROVOD_PLUGIN=hsgd they are
the classes of the installed Horovod, which a script may have from horovod.common.exceptions.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from hsgd.errors import HsgdError, ReplicasDiffer
from hsgd.jobs.launch import as_horovod

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "core_errors_as_horovods",
]


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


@contextlib.contextmanager
def core_errors_as_horovods() -> Iterator[None]:
    """Raise HorovodInternalError in place of an HsgdError; local.

    ReplicasDiffer stays, since to restore and go on would not end it.
    """
    try:
        yield
    except ReplicasDiffer:
        raise
    except HsgdError as error:
        raise HorovodInternalError(str(error)) from error


if as_horovod.by_plugin():
    _theirs = importlib.import_module("horovod.common.exceptions")
    globals().update({name: getattr(_theirs, name) for name in __all__ if name[0].isupper()})
