"""Ranks of a new world, computed by all agents from the same rows; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = [
    "Candidate",
    "NodeRow",
    "Seat",
    "arrange",
    "least_ranks",
    "lost_state",
    "row_from",
    "row_to",
    "staying",
]


@dataclass(frozen=True)
class Candidate:
    """A rank that waits for a world.

    Attributes:
        slot: its place on its node.
        held: the last world in which it had the state of the training; 0 if it is new.
        rank: in the previous world; -1 if it is new.
    """

    slot: int
    held: int
    rank: int


@dataclass(frozen=True)
class NodeRow:
    """The report of a node's agent.

    Attributes:
        begun: whether the job ever had a world.
        held: whether a rank of the job ever had the state.
        patient: whether the first world should wait for all requested ranks.
        leaving: its ranks should leave once others have the state.
    """

    node: str
    begun: bool
    held: bool
    patient: bool
    leaving: bool
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Seat:
    """A rank of the new world."""

    rank: int
    local_rank: int
    local_size: int
    node_rank: int

    def variables(self, world: int, size: int) -> dict[str, str]:
        """Return the variables of torch.distributed for this rank of `size`."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "TORCHELASTIC_RESTART_COUNT": str(world),
        }


def staying(rows: Sequence[NodeRow], least: int) -> list[NodeRow]:
    """Return the rows without the ranks that should leave, except those that are still needed.

    One with the state stays if no other rank has it, and as many as are missing for `least`.
    """
    stay = [replace(row, candidates=()) if row.leaving else row for row in rows]
    lacking = max(least - sum(len(row.candidates) for row in stay), int(lost_state(stay)))
    leaving = [(_age(one), i, one) for i, row in enumerate(rows) for one in row.candidates]
    for _, index, one in sorted(
        (each for each in leaving if rows[each[1]].leaving), key=lambda each: each[:2]
    )[:lacking]:
        stay[index] = replace(stay[index], candidates=(*stay[index].candidates, one))
    return stay


def _age(candidate: Candidate) -> tuple[int, bool, int, int]:
    """Return the sort key: last holders of the state first, else in the previous order."""
    return (-candidate.held, candidate.rank < 0, candidate.rank, candidate.slot)


def arrange(rows: Sequence[NodeRow], most_ranks: int) -> list[dict[int, Seat]]:
    """Return for each row the seats by slot; none for nodes without ranks.

    Ranks of a node are consecutive. Rank 0 has the state: nodes and ranks are sorted by who held it
    last, and otherwise in the previous order. Beyond `most_ranks` the last ones get no seat.
    """
    kept: list[list[Candidate]] = [[] for _ in rows]
    waiting = [(_age(one), index, one) for index, row in enumerate(rows) for one in row.candidates]
    for _, index, one in sorted(waiting, key=lambda each: each[:2])[:most_ranks]:
        kept[index].append(one)
    order = sorted(
        (index for index, ones in enumerate(kept) if ones), key=lambda i: _age(kept[i][0])
    )
    seats: list[dict[int, Seat]] = [{} for _ in rows]
    rank = 0
    for node_rank, index in enumerate(order):
        for local_rank, one in enumerate(kept[index]):
            seats[index][one.slot] = Seat(rank, local_rank, len(kept[index]), node_rank)
            rank += 1
    return seats


def lost_state(rows: Sequence[NodeRow]) -> bool:
    """Return whether there was a world, and no rank that is left has the state of the training.

    If no rank ever had it, as before the first sync(), any rank of a world suffices.
    """
    candidates = [one for row in rows for one in row.candidates]
    if any(row.held for row in rows):
        return not any(one.held for one in candidates)
    return any(row.begun for row in rows) and all(one.rank < 0 for one in candidates)


def least_ranks(rows: Sequence[NodeRow], least: int, wanted: int) -> int:
    """Return the ranks that a new world needs; `wanted` at the start, while a node is patient."""
    first = not any(row.begun for row in rows)
    return max(least, wanted) if first and any(row.patient for row in rows) else least


def row_to(row: NodeRow) -> dict[str, Any]:
    """Convert a row for JSON."""
    return asdict(row)


def row_from(found: dict[str, Any]) -> NodeRow:
    """Convert back from row_to()."""
    candidates = tuple(Candidate(**one) for one in found["candidates"])
    return NodeRow(**{**found, "candidates": candidates})
