"""A bounded queue from the reading thread to the training loop; either end can break it off.

Owns one deque and one condition. queue.Queue has no close (before Python 3.13), so a producer
blocked in put would outlive a loop that breaks off. Never copies items and never starts a thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Channel"]

T = TypeVar("T")


class Channel(Generic[T]):
    """One producer, one consumer, at most `depth` items in between."""

    def __init__(self, depth: int) -> None:
        self._items: deque[T] = deque()
        self._depth = depth
        self._changed = threading.Condition()
        self._closed = False
        self._finished = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Wait for room and add an item; False when the consumer has gone.

        No deadline: a training loop may pause as long as it likes, and close() ends the wait.
        """
        with self._changed:
            while len(self._items) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def finish(self, error: BaseException | None = None) -> None:
        """No more items; after the last one get() raises `error`, or returns None without one."""
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def get(self, timeout_s: float) -> T | None:
        """The next item; None at the end. Raises the producer's error, or TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._items:
                if self._error is not None:
                    raise self._error
                if self._finished or self._closed:
                    return None
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError
                self._changed.wait(remaining)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """The consumer has gone: drop what is queued and release the producer."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
