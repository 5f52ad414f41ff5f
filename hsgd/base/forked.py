"""What a child of fork, as a DataLoader's worker is, lets go of: connections to other nodes.

Owns the list of those who have some. As long as a child had the connections, the peers would not
learn that its parent, which is a rank, has died. Never touches what the parent has.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Protocol

__all__ = ["Connected", "watch"]


class Connected(Protocol):
    """What has connections."""

    def descriptor(self) -> int:
        """An epoll descriptor that watches all of them; -1 where there are none."""


_connected: weakref.WeakKeyDictionary[object, Connected] = weakref.WeakKeyDictionary()


def watch(owner: object, connected: Connected) -> None:
    """Have children close the connections of `connected`, as long as `owner` lives; local."""
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
