"""Board: exchange of values through a key-value store, for ranks that are not connected yet.

Every wait has a deadline. Rank 0 gathers the values and publishes them, so that a store serves only
a few requests per rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost, about
from hsgd.jobs.stores.deadline_store import DeadlineStore
from hsgd.jobs.stores.sealed_store import sealed

__all__ = ["Board", "Store"]

_LATE, _UNEQUAL = "late", "unequal"


class Store(Protocol):
    """Methods that a store must have, as torch.distributed's; a process serves it, or a file."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes | str:
        """Return the value of a key that exists."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0, atomically; return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist; never blocks."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys exist; RuntimeError or TimeoutError after `timeout`."""


class Board:
    """The ranks of one exchange, which all use the same store, prefix and size.

    Args:
        members: numbers of the ranks in errors, in rank order.
        prefix: of the keys; it may serve several boards, one after another.
        caller: first word of errors.
    """

    def __init__(
        self,
        store: Any,  # a Store
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        *,
        prefix: str,
        caller: str,
    ) -> None:
        self.store = store
        self._sealed = sealed(store)
        self._bounded = DeadlineStore(self._sealed, timeout_s, caller)
        self.rank, self.members, self.timeout_s = rank, members, timeout_s
        self._caller = caller
        number = self._bounded.add(f"{prefix}/meetings/{rank}", 1)  # of this rank
        self.prefix = f"{prefix}/{number - 1}"

    def exchange(self, what: str, value: Any, limit_s: float | None = None) -> list[Any]:
        """Return every rank's value (of JSON), by rank; collective, blocking.

        Within `limit_s`, or `timeout_s`. Raises CollectiveTimeout, which names late members, or
        says that the store does not answer; on all ranks ValueError if they have different sizes.
        """
        key = f"{self.prefix}/{what}"
        limit_s = self.timeout_s if limit_s is None else limit_s
        reason, found = self._bounded.run(limit_s, self._tell, key, value, limit_s)
        if reason == _LATE:
            raise self._late(found, limit_s)
        if reason == _UNEQUAL:
            raise ValueError(found)
        if len(found) != len(self.members):
            raise ValueError(self._unequal(len(found), self.rank, len(self.members)))
        return list(found)

    def _tell(self, key: str, value: Any, limit_s: float) -> tuple[str, Any]:
        self._sealed.set(f"{key}/{self.rank}", json.dumps([len(self.members), value]))
        if self.rank != 0:
            return self._hear(key, limit_s)
        told = self._gather(key, limit_s)
        self._sealed.set(f"{key}/all", json.dumps(told))
        return told

    def _gather(self, key: str, limit_s: float) -> tuple[str, Any]:
        """Return the result of rank 0 for all: the reason of a failure, or the values."""
        end = time.monotonic() + limit_s
        values: list[Any] = []
        for rank in range(len(self.members)):
            if not self._comes(f"{key}/{rank}", end - time.monotonic()):
                return _LATE, self._absent(key)
            size, value = json.loads(self._sealed.get(f"{key}/{rank}"))
            if size != len(self.members):
                return _UNEQUAL, self._unequal(len(self.members), rank, size)
            values.append(value)
        return "", values

    def _hear(self, key: str, limit_s: float) -> tuple[str, Any]:
        if not self._comes(f"{key}/all", limit_s):
            return _LATE, self._absent(key)
        reason, found = json.loads(self._sealed.get(f"{key}/all"))
        return reason, found

    def _comes(self, key: str, limit_s: float) -> bool:
        try:
            self._sealed.wait([key], timedelta(seconds=max(limit_s, 0.001)))
        except PeerLost:
            raise
        except (RuntimeError, TimeoutError):
            return bool(self._sealed.check([key]))  # it may have come at the last moment
        return True

    def _absent(self, key: str) -> list[int]:
        absent = [
            member
            for rank, member in enumerate(self.members)
            if not self._sealed.check([f"{key}/{rank}"])
        ]
        return absent or [self.members[0]]

    def _late(self, absent: list[int], limit_s: float) -> HsgdError:
        return about(
            absent[0],
            CollectiveTimeout(
                f"{self._caller}: rank {', '.join(map(str, absent))} did not join within "
                f"{limit_s:g} s; check that all ranks make this call"
            ),
        )

    def _unequal(self, size: int, rank: int, other: int) -> str:
        return (
            f"{self._caller}: rank {self.members[0] if self.members else 0} has size {size}, rank "
            f"{self.members[rank]} has size {other}; give all ranks the same"
        )
