"""DeadlineStore: a store that is waited for no longer than a deadline, whatever becomes of the way
to it. torch's TCPStore has one for wait() alone: when the link is cut, its other requests stay in
the kernel for the quarter of an hour that TCP takes to give up.

Owns the threads that ask, one for a request, or for all that a caller asks in a row: a thread costs
70 us. What was given up stays with its thread, which ends with it; the store is not asked again.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hsgd.errors import CollectiveTimeout

__all__ = ["DeadlineStore"]

_T = TypeVar("_T")
_LAST_WAIT_S = 1.0
_ROUNDS_UP_S = 2.0  # wait() of a FileStore counts whole seconds


class DeadlineStore:
    """A Store whose requests raise CollectiveTimeout, about no rank, when it does not answer.

    store: as board.Store, which a store of torch.distributed is. limit_s: how long an answer may
    take. caller: who asks, for errors.
    """

    def __init__(self, store: Any, limit_s: float, caller: str) -> None:
        self._store, self._limit_s, self._caller = store, limit_s, caller
        self._is_silent = False

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        self._ask(self._limit_s, self._store.set, key, value)

    def get(self, key: str) -> bytes | str:
        """The value of a key that is there."""
        found: bytes | str = self._ask(self._limit_s, self._store.get, key)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0, in one step; what it then is."""
        number: int = self._ask(self._limit_s, self._store.add, key, amount)
        return number

    def append(self, key: str, text: str) -> None:
        """Add to the end of a value, which begins empty."""
        self._ask(self._limit_s, self._store.append, key, text)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there; at once."""
        are_there: bool = self._ask(self._limit_s, self._store.check, keys)
        return are_there

    def run(self, wait_s: float, work: Callable[..., _T], *arguments: Any) -> _T:
        """What `work` returns, which asks the store itself, and may wait for `wait_s` in it."""
        return self._ask(wait_s + max(self._limit_s, _ROUNDS_UP_S), work, *arguments)

    def _ask(self, limit_s: float, request: Callable[..., _T], *arguments: Any) -> _T:
        if self._is_silent:
            raise self._silence(limit_s)
        answers: list[_T] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(request(*arguments))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask, name="hsgd-store", daemon=True)
        thread.start()
        thread.join(limit_s)
        if errors:
            error = errors.pop()  # its traceback names this frame, which is not to hold it
            try:
                raise error
            finally:
                del error
        if not answers:
            self._is_silent = True
            # A thread that comes back while the interpreter ends would be ended inside of C++.
            atexit.register(thread.join, _LAST_WAIT_S)
            raise self._silence(limit_s)
        return answers[0]

    def _silence(self, limit_s: float) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{self._caller}: the store in which ranks meet did not answer within {limit_s:g} s; "
            f"its process hangs, or the network to its host is cut"
        )
