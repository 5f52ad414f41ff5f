"""MadeOnce: objects that each process makes once, by key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from hsgd.base.forked import in_forked_child

__all__ = ["MadeOnce"]

_Key = TypeVar("_Key")
_Made = TypeVar("_Made")


class MadeOnce(Generic[_Key, _Made]):
    """Objects by key, for several threads; a forked child has none of its parent's."""

    def __init__(self) -> None:
        self._forget()
        in_forked_child(self, MadeOnce._forget)  # the parent's threads may hold the lock

    def get(self, key: _Key, make: Callable[[], _Made]) -> _Made:
        """Return the object of a key, which is made if there is none."""
        with self._lock:
            if key not in self.made:
                self.made[key] = make()
            return self.made[key]

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self.made: dict[_Key, _Made] = {}
