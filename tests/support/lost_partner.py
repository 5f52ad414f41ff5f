"""Three ranks that train, of which one is killed: what the others make of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from ranks import Ranks, meeting_point

__all__ = ["without_rank_1"]


def without_rank_1(program: Callable[..., Any]) -> tuple[int, list[Any]]:
    """The process that was killed, and what `program` returned on the two other ranks.

    It tells "trains", then, without rank 1, "goes on", and ends when it hears "enough".
    """
    with Ranks(3) as pool:
        pool.start(program, meeting_point())
        assert [pool.hear(rank) for rank in range(3)] == ["trains"] * 3
        pid = pool.pid(1)
        pool.signal(1, signal.SIGKILL)
        assert [pool.hear(rank) for rank in (0, 2)] == ["goes on"] * 2
        for rank in (0, 2):
            pool.send(rank, "enough")
        outcomes = pool.finish(on=(0, 2))
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    return pid, [outcome.value for outcome in outcomes]
