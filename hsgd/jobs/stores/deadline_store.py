"""DeadlineStore: a store with a deadline for each request, even if the network is cut.

torch's TCPStore has one only for wait(): after a cut, its other requests stay in the kernel for the
15 minutes until TCP gives up. So a thread makes each request, or all requests that a caller makes
in a row: a thread costs 70 us. A thread that was given up keeps its request; the store gets no
further ones.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, TypeVar

from hsgd.base.call_in_thread import call_in_thread
from hsgd.errors import CollectiveTimeout

__all__ = ["DeadlineStore"]

_T = TypeVar("_T")
_LAST_WAIT_S = 1.0
_ROUNDS_UP_S = 2.0  # wait() of a FileStore counts whole seconds


class DeadlineStore:
    """A Store whose requests raise CollectiveTimeout, about no rank, if it does not answer.

    Args:
        store: as board.Store, which a store of torch.distributed is.
        limit_s: deadline of an answer.
        caller: first word of errors.
    """

    def __init__(self, store: Any, limit_s: float, caller: str) -> None:
        self._store, self._limit_s, self._caller = store, limit_s, caller
        self._is_silent = False

    def set(self, key: str, value: str) -> None:
        self._ask(self._limit_s, self._store.set, key, value)

    def get(self, key: str) -> bytes | str:
        found: bytes | str = self._ask(self._limit_s, self._store.get, key)
        return found

    def add(self, key: str, amount: int) -> int:
        number: int = self._ask(self._limit_s, self._store.add, key, amount)
        return number

    def append(self, key: str, text: str) -> None:
        """Append to a value, which begins empty."""
        self._ask(self._limit_s, self._store.append, key, text)

    def check(self, keys: list[str]) -> bool:
        are_there: bool = self._ask(self._limit_s, self._store.check, keys)
        return are_there

    def run(self, wait_s: float, work: Callable[..., _T], *arguments: Any) -> _T:
        """Return the result of `work`, which calls the store and may wait there for `wait_s`."""
        return self._ask(wait_s + max(self._limit_s, _ROUNDS_UP_S), work, *arguments)

    def _ask(self, limit_s: float, request: Callable[..., _T], *arguments: Any) -> _T:
        if self._is_silent:
            raise self._silence(limit_s)
        answer = call_in_thread("hsgd-store", request, *arguments)
        if wait([answer], limit_s).not_done:
            self._is_silent = True
            # If its request returned during the interpreter's end, the thread would be killed
            # within C++.
            atexit.register(wait, [answer], _LAST_WAIT_S)
            raise self._silence(limit_s)
        return answer.result()

    def _silence(self, limit_s: float) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{self._caller}: the store in which ranks meet did not answer within {limit_s:g} s; "
            f"its process hangs, or the network to its host is cut"
        )
