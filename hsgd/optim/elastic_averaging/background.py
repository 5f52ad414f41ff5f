"""Work beside the training, in the one thread of a pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["submit"]

_T = TypeVar("_T")


def submit(pool: ThreadPoolExecutor, work: Callable[..., _T], *arguments: object) -> Future[_T]:
    """pool.submit(); local, not blocking.

    Where Ctrl-C comes while the pool starts its thread, Python knows nothing of that thread and
    waits for it for ever at the end of the program: so the thread is told to end.
    """
    try:
        return pool.submit(work, *arguments)
    except BaseException:
        pool.shutdown(wait=False)
        raise
