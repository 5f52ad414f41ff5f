"""Horovod's exceptions, and the conversion of the core's errors to them.

With HOROVOD_PLUGIN=hsgd they are the classes of the installed Horovod, which a script may have
imported from horovod.common.exceptions.
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
    """A collective failed on some rank; its __cause__ is the core's error. elastic.run recovers."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed; with `skip_sync` the state is equal on all ranks."""

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework's version differs from the build's; for scripts, never raised by hsgd."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} was built for, {installed_version} is installed")
        self.name = name
        self.version = version
        self.installed_version = installed_version


@contextlib.contextmanager
def core_errors_as_horovods() -> Iterator[None]:
    """Raise HorovodInternalError in place of an HsgdError, except ReplicasDiffer; local."""
    try:
        yield
    except ReplicasDiffer:
        raise
    except HsgdError as error:
        raise HorovodInternalError(str(error)) from error


if as_horovod.by_plugin():
    _theirs = importlib.import_module("horovod.common.exceptions")
    globals().update({name: getattr(_theirs, name) for name in __all__ if name[0].isupper()})
