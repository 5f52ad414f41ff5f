"""Closing of connections in forked children, so that peers notice the death of the parent."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Protocol

__all__ = ["Connected", "watch"]


class Connected(Protocol):
    """Object with connections to other nodes."""

    def descriptor(self) -> int:
        """Return an epoll descriptor that watches all of them; -1 if there are none."""


_connected: weakref.WeakKeyDictionary[object, Connected] = weakref.WeakKeyDictionary()


def watch(owner: object, connected: Connected) -> None:
    """Make children close the connections of `connected` as long as `owner` lives; local."""
    if connected.descriptor() >= 0:
        _connected[owner] = connected


def _leave() -> None:
    all_connected = list(_connected.values())
    _connected.clear()
    for connected in all_connected:
        with contextlib.suppress(OSError):  # without /proc they stay open
            listed = Path(f"/proc/self/fdinfo/{connected.descriptor()}").read_text()
            for line in listed.splitlines():
                if line.startswith("tfd:"):
                    os.close(int(line.split()[1]))


os.register_at_fork(after_in_child=_leave)
