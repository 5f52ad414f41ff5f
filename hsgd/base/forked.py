"""What forked children do at once: they close connections, and leave what is the parent's.

Connections are closed so that peers notice the death of the parent.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

__all__ = ["Connected", "in_forked_child", "watch"]

_Owner = TypeVar("_Owner")


class Connected(Protocol):
    """Object with connections to other nodes."""

    def descriptor(self) -> int:
        """Return an epoll descriptor that watches all of them; -1 if there are none."""


_connected: weakref.WeakKeyDictionary[object, Connected] = weakref.WeakKeyDictionary()
_calls: weakref.WeakKeyDictionary[object, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def watch(owner: object, connected: Connected) -> None:
    """Make children close the connections of `connected` as long as `owner` lives; local."""
    if connected.descriptor() >= 0:
        _connected[owner] = connected


def in_forked_child(owner: _Owner, call: Callable[[_Owner], object]) -> None:
    """Let each forked child call `call(owner)` first of all, as long as `owner` lives; local."""
    _calls[owner] = call


def _leave() -> None:
    all_connected = list(_connected.values())
    _connected.clear()
    for connected in all_connected:
        with contextlib.suppress(OSError):  # without /proc they stay open
            listed = Path(f"/proc/self/fdinfo/{connected.descriptor()}").read_text()
            for line in listed.splitlines():
                if line.startswith("tfd:"):
                    os.close(int(line.split()[1]))
    for owner, call in list(_calls.items()):
        call(owner)


os.register_at_fork(after_in_child=_leave)
