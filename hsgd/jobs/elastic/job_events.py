"""Events of agents in the job's store; they poll one key, which changes with every event."""

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
# Of a world, whose number follows.
_LATE = "hsgd/agent/late/"
_LEFT = "hsgd/agent/left/"
_UPDATE = "hsgd/agent/update/"


class JobEvents:
    """Events in `store`, a sealed store of torch.distributed that no other thread waits on."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen: str | None = None

    def changed(self) -> bool:
        """Return whether an event came since the last call; True at the first call."""
        seen, self._seen = self._seen, self._read(_MARK)
        return seen != self._seen

    def tell_broken(self, world: int, rank: int, text: str) -> None:
        """Publish the loss of a rank of a world; -1 if it is unknown. The first report stays."""
        if not self._store.check([broken_key(world)]):
            self._tell(broken_key(world), f"{rank} {text}")

    def broken(self, world: int) -> str:
        """Describe what a world has lost; empty if nothing."""
        return self._read(broken_key(world)).partition(" ")[2]

    def tell_late(self, world: int, rank: int) -> None:
        """Publish that other ranks gave up waiting for this rank."""
        self._store.append(f"{_LATE}{world}", f"{rank} ")

    def late(self, world: int) -> list[int]:
        """Return the ranks that others gave up waiting for."""
        return [int(rank) for rank in self._read(f"{_LATE}{world}").split()]

    def tell_update(self, world: int) -> None:
        """Ask for a new world once all ranks reached a commit: ranks want to join or leave."""
        self._tell(f"{_UPDATE}{world}", "1")

    def update(self, world: int) -> bool:
        """Return whether a new world was asked for."""
        return bool(self._store.check([f"{_UPDATE}{world}"]))

    def tell_begun(self) -> int:
        """Publish that a world has begun; return how many have."""
        return int(self._store.add(_BEGUN, 1))

    def begun(self) -> bool:
        """Return whether a world has begun."""
        return bool(self._store.check([_BEGUN]))

    def tell_seated(self, node: str) -> None:
        """Publish that ranks of this node are in a world."""
        self._store.append(_SEATED, f"{node} ")

    def seated(self) -> set[str]:
        """Return the nodes with ranks that were ever in a world."""
        return set(self._read(_SEATED).split())

    def tell_left(self, world: int) -> None:
        """Publish that a rank has left a world, so that the others leave it too."""
        self._tell(f"{_LEFT}{world}", "1")

    def left(self, world: int) -> bool:
        """Return whether a rank has left the world."""
        return bool(self._store.check([f"{_LEFT}{world}"]))

    def tell_held(self) -> None:
        """Publish that a rank has the state of the training."""
        self._store.set(_HELD, "1")

    def held(self) -> bool:
        """Return whether any rank ever had the state."""
        return bool(self._store.check([_HELD]))

    def tell_finished(self) -> None:
        """Publish that a rank has finished the training."""
        self._tell(_FINISHED, "1")

    def finished(self) -> bool:
        """Return whether a rank has finished."""
        return bool(self._store.check([_FINISHED]))

    def tell_failed(self, text: str) -> None:
        """Publish that the job cannot continue; the first report stays."""
        if not self._store.check([_FAILED]):
            self._tell(_FAILED, text)

    def failed(self) -> str:
        """Return why the job cannot continue; empty if it can."""
        return self._read(_FAILED)

    def tell_ended(self, node: str, *, lost: bool) -> None:
        """Publish the end of a node's agent; `lost` if it was early, and its ranks are lost too."""
        self._store.append(_ENDED, f"{node} ")
        if lost:
            self._store.append(_LOST, f"{node} ")
            self._mark()

    def ended(self) -> set[str]:
        """Return the nodes whose agent has ended."""
        return set(self._read(_ENDED).split())

    def lost(self) -> set[str]:
        """Return the nodes whose agent has ended early."""
        return set(self._read(_LOST).split())

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _tell(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._mark()

    def _mark(self) -> None:
        """Set the mark to a new random value, by which agents notice an event.

        Of two simultaneous writes the last one stays, and is new to every agent.
        """
        self._store.set(_MARK, secrets.token_hex(8))
