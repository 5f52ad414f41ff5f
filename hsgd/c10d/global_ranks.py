"""Ranks of a group, and what the whole job calls them.

Owns the translation of errors. Never raises them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hsgd.errors import HsgdError, SignatureMismatch

__all__ = ["in_global_ranks"]


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
