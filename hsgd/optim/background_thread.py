"""Work beside the training, in one thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["BackgroundThread"]

_T = TypeVar("_T")


class BackgroundThread:
    """A thread, started by the first work, that does one work after the other.

    interrupt: ends what it is at, from another thread, where the program ends without shutdown():
        Python waits for such threads before anything else.
    """

    def __init__(self, name: str, interrupt: Callable[[], None] | None = None) -> None:
        self._name = name
        self._interrupt = interrupt
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        if interrupt is not None:
            _interruptible.add(self)

    def submit(self, work: Callable[..., _T], *arguments: object) -> Future[_T]:
        """Have it call `work`; local, not blocking."""
        try:
            return self._pool.submit(work, *arguments)
        except BaseException:
            # Where Ctrl-C comes while the pool starts its thread, Python knows nothing of that
            # thread, and waits for it for ever at the end of the program unless it is told to end.
            self._pool.shutdown(wait=False)
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            raise

    def shutdown(self, wait: bool = True) -> None:
        """Let it end: after what was submitted, blocking, or without what has not begun."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)
        if wait:
            _interruptible.discard(self)

    def interrupt(self) -> None:
        """End what it is at; local, never blocks."""
        if self._interrupt is not None:
            self._interrupt()


_interruptible: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()


def _interrupt_all() -> None:
    for thread in list(_interruptible):
        thread.interrupt()


# Called before concurrent.futures, which registers itself in the same way, joins its threads.
threading._register_atexit(_interrupt_all)  # type: ignore[attr-defined]
