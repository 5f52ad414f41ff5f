"""Ranks that run the programs of this folder: with CUDA tensors, or with tensors in host memory.

Owns the processes; after one that died there are new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import core_programs
from ranks import RankDied, Ranks, meeting_point

__all__ = ["MOST", "Pool", "lose_one"]

MOST = 4
HEARD_S = 10.0
LIMIT_S = 120.0  # importing torch and starting CUDA in four processes at once is in it


class Pool:
    """Ranks that run programs with tensors of one kind of a Place."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._ranks: Ranks | None = None

    def run(self, program: Callable[..., Any], size: int, *words: Any) -> list[Any]:
        """What program(seat, path, size, kind, *words) returns on ranks 0..size-1."""
        self._ranks = self._ranks or self.fresh(MOST)
        on: Sequence[int] = range(size)
        point = meeting_point()
        try:
            outcomes = self._ranks.outcomes(
                program, point, size, self.kind, *words, on=on, limit_s=LIMIT_S
            )
        except RankDied:
            self.close()
            raise
        traces = [f"rank {rank}: {each.trace}" for rank, each in enumerate(outcomes) if each.error]
        if traces:  # of all: the first one may only have waited for another
            self.close()
            raise AssertionError("\n".join(traces))
        return [each.value for each in outcomes]

    def fresh(self, count: int) -> Ranks:
        """Ranks for one test alone."""
        return Ranks(count, fresh=self.kind != "cpu")

    def close(self) -> None:
        """End the ranks."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()


def lose_one(kind: str) -> None:
    """Kill one of three ranks in the middle of collectives; the others hear of it and end well."""
    victim, others = 1, (0, 2)
    with Pool(kind).fresh(3) as ranks:
        ranks.start(core_programs.until_lost, meeting_point(), 3, kind, victim)
        for outcome in ranks.finish(on=others, limit_s=LIMIT_S):
            assert outcome.error is None, outcome.trace
            text, seconds = outcome.value
            assert f"rank {victim}" in text
            assert seconds < HEARD_S, seconds
        assert [ranks.end(rank) for rank in others] == [0, 0]
