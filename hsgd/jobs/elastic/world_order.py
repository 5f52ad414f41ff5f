"""Who gets which rank in a new world, from what the agents of all nodes say; pure.

Owns the order and the reasons for which a job cannot go on. All agents compute the same from the
same rows.
"""

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
    """A rank that waits for a world. slot: its place on its node. held: the last world in which it
    had the state of the training, 0: it is new. rank: in the world before, -1: it is new.
    """

    slot: int
    held: int
    rank: int


@dataclass(frozen=True)
class NodeRow:
    """What the agent of a node says. begun: whether the job ever had a world. held: whether a rank
    of it ever had the state. patient: whether the first world is to wait for all ranks that were
    asked for. leaving: its ranks are to go when others have the state.
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


def staying(rows: Sequence[NodeRow], least: int) -> list[NodeRow]:
    """The rows without the ranks that are to leave, but for one that has the state, where none of
    those that stay has it, and for as many as these lack of `least`."""
    stay = [replace(row, candidates=()) if row.leaving else row for row in rows]
    lacking = max(least - sum(len(row.candidates) for row in stay), int(lost_state(stay)))
    leaving = [(_age(one), i, one) for i, row in enumerate(rows) for one in row.candidates]
    for _, index, one in sorted(
        (each for each in leaving if rows[each[1]].leaving), key=lambda each: each[:2]
    )[:lacking]:
        stay[index] = replace(stay[index], candidates=(*stay[index].candidates, one))
    return stay


def _age(candidate: Candidate) -> tuple[int, bool, int, int]:
    """In the order of who held the state last, and otherwise as they were before."""
    return (-candidate.held, candidate.rank < 0, candidate.rank, candidate.slot)


def arrange(rows: Sequence[NodeRow], most_ranks: int) -> list[dict[int, Seat]]:
    """Per row the seats by slot; of nodes without ranks none.

    Ranks of a node stand together. Rank 0 has the state: nodes and ranks come in the order of who
    held it last, and otherwise as they were before. Beyond `most_ranks` the last get none.
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
    """Whether there was a world, and none of those that are left has the state of the training.

    Where no rank ever had one, as before the first sync(), any rank of a world will do.
    """
    candidates = [one for row in rows for one in row.candidates]
    if any(row.held for row in rows):
        return not any(one.held for one in candidates)
    return any(row.begun for row in rows) and all(one.rank < 0 for one in candidates)


def least_ranks(rows: Sequence[NodeRow], least: int, wanted: int) -> int:
    """That a new world needs: `wanted` at the start of a job, while any node is patient."""
    first = not any(row.begun for row in rows)
    return max(least, wanted) if first and any(row.patient for row in rows) else least


def row_to(row: NodeRow) -> dict[str, Any]:
    """For JSON."""
    return asdict(row)


def row_from(found: dict[str, Any]) -> NodeRow:
    """From row_to()."""
    candidates = tuple(Candidate(**one) for one in found["candidates"])
    return NodeRow(**{**found, "candidates": candidates})
