"""Board: what the ranks of one process group tell one another through torch's store.

Owns the keys. Never carries data of collectives. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hsgd.errors import CollectiveTimeout, HsgdError, SignatureMismatch
from hsgd.job import launcher_variables

__all__ = ["Board", "in_global_ranks"]


@dataclasses.dataclass
class Board:
    """What the ranks of one group tell one another through its store."""

    store: Any
    rank: int
    members: Sequence[int]  # global ranks, by group rank
    timeout_s: float
    prefix: str = ""

    def __post_init__(self) -> None:
        """A store may serve a second group of the same name, after the first was destroyed.

        torchrun's serves the workers that it starts again, too: perhaps not all before them came.
        """
        attempt = f"hsgd/{launcher_variables.restarts()}"
        arrived = self.store.add(f"{attempt}/arrived", 1)
        self.prefix = f"{attempt}/{(arrived - 1) // len(self.members)}"

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Everybody's value of `what`, by group rank; collective, blocking."""
        keys = [f"{self.prefix}/{what}/{rank}" for rank in range(len(self.members))]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError:
            absent = [
                str(member)
                for member, key in zip(self.members, keys, strict=True)
                if not self.store.check([key])
            ]
            raise CollectiveTimeout(
                f"init_process_group: rank {', '.join(absent) or '?'} did not come within "
                f"{self.timeout_s:g} s; see whether all ranks make this group"
            ) from None
        return [json.loads(self.store.get(key)) for key in keys]

    def break_off(self, text: str) -> None:
        """Leave the error that ended the group's work for ranks that notice only its effects.

        The first is kept: it is the cause, and later ones may follow from it.
        """
        with contextlib.suppress(RuntimeError):  # the process that kept the store may be gone
            self.store.compare_set(f"{self.prefix}/broken", "", text)

    def broken(self, limit_s: float) -> str:
        """What break_off() left, waiting for it at most `limit_s`; "" where nothing came."""
        key = f"{self.prefix}/broken"
        with contextlib.suppress(RuntimeError):
            self.store.wait([key], timedelta(seconds=limit_s))
            return str(self.store.get(key), "utf-8")
        return ""


def in_global_ranks(error: HsgdError, members: Sequence[int]) -> HsgdError:
    """The same error with the ranks of a communicator replaced by those of the whole job."""

    def renamed(match: re.Match[str]) -> str:
        rank = int(match[1])
        return f"rank {members[rank]}" if rank < len(members) else match[0]

    def member(rank: int) -> int:
        return members[rank] if 0 <= rank < len(members) else rank

    renumbered = type(error)(re.sub(r"\brank (\d+)\b", renamed, str(error)))
    renumbered.rank = member(error.rank)
    if isinstance(error, SignatureMismatch) and isinstance(renumbered, SignatureMismatch):
        renumbered.ranks = (member(error.ranks[0]), member(error.ranks[1]))
        renumbered.names = error.names
    return renumbered
