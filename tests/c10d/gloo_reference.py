"""What gloo gives for the same calls, for the tests of the torch.distributed backend.

Owns processes of its own, which are ended by force once they have told their results: torch 2.13
with gloo hangs now and then (one in eight with Python hooks of DDP) when a process group and the
futures of Python callbacks are torn down, and that is not what is tested.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from backend_programs import group
from ranks import Ranks, Seat

__all__ = ["over_gloo"]


def _tell(seat: Seat, path: str, size: int, function: Callable[[int, int], Any]) -> None:
    with group(seat.rank, size, path, "gloo"):
        seat.tell(function(seat.rank, size))
        seat.pipe.recv()  # stays as it is until it is ended


def over_gloo(size: int, path: str, function: Callable[[int, int], Any]) -> list[Any]:
    """What function(rank, size) returns on each of `size` ranks of a gloo process group."""
    with Ranks(size) as pool:
        pool.start(_tell, path, size, function)
        reports = [pool.hear(rank) for rank in range(size)]
        for rank in range(size):
            pool.signal(rank, signal.SIGKILL)
    return reports
