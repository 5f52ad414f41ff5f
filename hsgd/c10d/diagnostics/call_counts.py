"""Counts of torch.distributed's collectives that hsgd served in this process or left to torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from multiprocessing.util import Finalize

import torch

__all__ = ["CallCounts"]


class CallCounts:
    """Calls and bytes by the name of a collective; local, thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._printed = False
        self._calls: dict[tuple[bool, str], list[int]] = {}

    def add(self, served: bool, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count one call, served or left to torch, with the tensors that this rank puts in."""
        size = sum(each.numel() * each.element_size() for each in tensors)
        with self._lock:
            counts = self._calls.setdefault((served, what), [0, 0])
            counts[0] += 1
            counts[1] += size

    def line(self) -> str:
        """Return the counts, on one line."""
        with self._lock:
            parts = {served: self._listed(served) for served in (True, False)}
        return f"served by hsgd: {parts[True]}; left to torch: {parts[False]}"

    def _listed(self, served: bool) -> str:
        found = sorted((what, *each) for (by, what), each in self._calls.items() if by == served)
        return ", ".join(f"{what} {calls} calls {size} B" for what, calls, size in found) or "none"

    def print_at_exit(self, rank: int) -> None:
        """Print the line on stderr, with the rank in the job, at the end of the process; once."""
        if not self._printed:
            self._printed = True
            # Children of multiprocessing run this, but not atexit.
            Finalize(
                None,
                lambda: print(f"hsgd: rank {rank}: {self.line()}", file=sys.stderr, flush=True),
                exitpriority=0,
            )
