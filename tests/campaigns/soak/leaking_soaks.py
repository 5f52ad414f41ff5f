"""Programs that leak, for each kind of measure one: a judge that lets them pass proves nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from campaigns.soak.sampled_seat import SampledSeat

__all__ = ["descriptors", "memory", "threads"]


def _run(seat: SampledSeat, each: Callable[[], object], last: Callable[[], object]) -> None:
    """last: done once, before the last tenth."""
    for number in seat.operations():
        each()
        if number + 1 == seat.count * 3 // 4:
            last()


def memory(seat: SampledSeat) -> None:
    """A page each time."""
    kept: list[bytes] = []
    _run(seat, lambda: kept.append(b"x" * (4096 + len(kept) % 2)), lambda: None)


def descriptors(seat: SampledSeat) -> None:
    """One in the end."""
    kept: list[int] = []
    _run(seat, lambda: None, lambda: kept.append(os.open("/dev/null", os.O_RDONLY)))
    os.close(kept[0])


def threads(seat: SampledSeat) -> None:
    """One in the end."""
    over = threading.Event()
    _run(seat, lambda: None, threading.Thread(target=over.wait).start)
    over.set()
