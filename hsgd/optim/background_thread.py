"""BackgroundThread: runs tasks in one thread, beside the training."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["BackgroundThread"]

_T = TypeVar("_T")


class BackgroundThread:
    """A thread that runs submitted tasks one after another; the first task starts it.

    `interrupt` ends the running task from another thread. It is called if the program ends without
    shutdown(), because Python joins such threads before anything else.
    """

    def __init__(self, name: str, interrupt: Callable[[], None] | None = None) -> None:
        self._name = name
        self._interrupt = interrupt
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        if interrupt is not None:
            _interruptible.add(self)

    def submit(self, work: Callable[..., _T], *arguments: object) -> Future[_T]:
        """Run `work(*arguments)` in the thread; local, not blocking."""
        try:
            return self._pool.submit(work, *arguments)
        except BaseException:
            # If Ctrl-C arrives while the pool starts its thread, Python would wait for that thread
            # forever at the end of the program, unless the pool is shut down.
            self._pool.shutdown(wait=False)
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            raise

    def shutdown(self, wait: bool = True) -> None:
        """End the thread; wait for all submitted tasks, or drop those not yet begun."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)
        if wait:
            _interruptible.discard(self)

    def interrupt(self) -> None:
        if self._interrupt is not None:
            self._interrupt()


_interruptible: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()


def _interrupt_all() -> None:
    for thread in list(_interruptible):
        thread.interrupt()


# Called before concurrent.futures, which registers itself in the same way, joins its threads.
threading._register_atexit(_interrupt_all)  # type: ignore[attr-defined]
