"""Translation of group ranks in errors into ranks of the whole job."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hsgd.errors import HsgdError, SignatureMismatch

__all__ = ["in_global_ranks"]


def in_global_ranks(error: HsgdError, members: Sequence[int]) -> HsgdError:
    """Return the error with the ranks of a communicator replaced by global ranks."""

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
