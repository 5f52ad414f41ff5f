"""What agents tell one another while a world lasts, through the job's store.

Owns the keys. One mark changes with every event, so that an agent that looks reads one key. Each
agent looks for itself: nobody waits for anybody here.
"""

from __future__ import annotations

import secrets
from typing import Any

from hsgd.jobs.stores.agent_store import broken_key

__all__ = ["JobEvents"]

_MARK = "hsgd/agent/events"
_BEGUN = "hsgd/agent/begun"
_SEATED = "hsgd/agent/seated"
_HELD = "hsgd/agent/held"
_ENDED = "hsgd/agent/ended"
_LOST = "hsgd/agent/lost"
_FINISHED = "hsgd/agent/finished"
_FAILED = "hsgd/agent/failed"


class JobEvents:
    """store: one of torch.distributed, sealed, which nothing else waits at."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen: str | None = None

    def changed(self) -> bool:
        """Whether something was told since the last call; the first time always."""
        seen, self._seen = self._seen, self._read(_MARK)
        return seen != self._seen

    def tell_broken(self, world: int, rank: int, text: str) -> None:
        """A rank of a world was lost; -1: it is not known which. The first to tell is kept."""
        if not self._store.check([broken_key(world)]):
            self._tell(broken_key(world), f"{rank} {text}")

    def broken(self, world: int) -> str:
        """What was lost of a world, in words; empty: nothing."""
        return self._read(broken_key(world)).partition(" ")[2]

    def tell_late(self, world: int, rank: int) -> None:
        """Others gave up waiting for this rank."""
        self._store.append(_late(world), f"{rank} ")

    def late(self, world: int) -> list[int]:
        """The ranks that others gave up waiting for."""
        return [int(rank) for rank in self._read(_late(world)).split()]

    def tell_update(self, world: int) -> None:
        """Ranks wait to join, or want to go: form a new world when all have come to a commit."""
        self._tell(_update(world), "1")

    def update(self, world: int) -> bool:
        """Whether one is to be formed."""
        return bool(self._store.check([_update(world)]))

    def tell_begun(self) -> int:
        """A world has begun; how many have."""
        return int(self._store.add(_BEGUN, 1))

    def begun(self) -> bool:
        """Whether one has."""
        return bool(self._store.check([_BEGUN]))

    def tell_seated(self, node: str) -> None:
        """Ranks of this node are in a world."""
        self._store.append(_SEATED, f"{node} ")

    def seated(self) -> set[str]:
        """The nodes of which ranks were ever in a world."""
        return set(self._read(_SEATED).split())

    def tell_left(self, world: int) -> None:
        """A rank has left a world: so are the others to."""
        self._tell(_left(world), "1")

    def left(self, world: int) -> bool:
        """Whether one has."""
        return bool(self._store.check([_left(world)]))

    def tell_held(self) -> None:
        """A rank has the state of the training."""
        self._store.set(_HELD, "1")

    def held(self) -> bool:
        """Whether one ever had it."""
        return bool(self._store.check([_HELD]))

    def tell_finished(self) -> None:
        """A rank has come to the end of the training."""
        self._tell(_FINISHED, "1")

    def finished(self) -> bool:
        """Whether one has."""
        return bool(self._store.check([_FINISHED]))

    def tell_failed(self, text: str) -> None:
        """The job cannot go on; the first to tell is kept."""
        if not self._store.check([_FAILED]):
            self._tell(_FAILED, text)

    def failed(self) -> str:
        """Why the job cannot go on; empty: it can."""
        return self._read(_FAILED)

    def tell_ended(self, node: str, *, lost: bool) -> None:
        """The agent of a node has ended. lost: before its time, and its ranks with it."""
        self._store.append(_ENDED, f"{node} ")
        if lost:
            self._store.append(_LOST, f"{node} ")
            self._mark()

    def ended(self) -> set[str]:
        """The nodes whose agent has ended."""
        return set(self._read(_ENDED).split())

    def lost(self) -> set[str]:
        """The nodes whose agent has ended before its time."""
        return set(self._read(_LOST).split())

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _tell(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._mark()

    def _mark(self) -> None:
        """Two at a time may: the later one stays, and nobody has seen it."""
        self._store.set(_MARK, secrets.token_hex(8))


def _late(world: int) -> str:
    return f"hsgd/agent/late/{world}"


def _left(world: int) -> str:
    return f"hsgd/agent/left/{world}"


def _update(world: int) -> str:
    return f"hsgd/agent/update/{world}"
