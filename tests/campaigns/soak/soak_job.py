"""SoakJob: one soak on one layout, whose ranks say again and again what they hold.

Owns the patience with ranks that make no progress. Never judges.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from campaigns.job import Job
from campaigns.soak.soaks import LAYOUTS, Soak
from campaigns.zygotes import Zygotes

__all__ = ["SoakJob"]

STALLED_S = 180.0  # without a sample of any rank
_WORDS_S = 1.0  # in which the others tell what they think of a rank that failed


class SoakJob(Job):
    """A soak; run() ends when no rank has taken a sample for STALLED_S.

    extent: how much of the long form is run: "scale" of the operations, "seconds" of soaks that run
    for a time, and "width", things that are open at once. samples: by rank, rows of the measures of
    a footprint.
    """

    def __init__(self, starter: Zygotes, soak: Soak, layout: str, extent: dict[str, Any]) -> None:
        place, wanted = LAYOUTS[layout], soak.counts[layout]
        order = {
            "program": f"soak.{soak.program}",
            "seat": "soak.sampled_seat:SampledSeat",
            "nodes": place.nodes,
            "meets": place.by,
            "needs_store": place.by == "store" or soak.uses_torch,
            "pretends": True,
            "fresh": True,  # memory that ranks share is nobody's
            "timeout_s": 120.0,
            "outlives": False,
            "has_deadlines": False,
            "count": max(soak.least, int(wanted * extent["scale"])) if wanted else 0,
            "samples": soak.samples,
            "seconds": extent["seconds"],
            "width": extent["width"],
        }
        super().__init__(starter, order)
        self.samples: list[list[list[int]]] = [[] for _ in place.nodes]
        self.operations = 0
        self._name, self._wanted = f"{soak.name} {layout}", soak.samples
        self._limit = time.monotonic() + STALLED_S

    def heard(self, rank: int, told: dict[str, Any]) -> None:
        """Keep a sample: it is progress."""
        if told["what"] == "sample":
            self.samples[rank].append(told["row"])
            self.operations = max(self.operations, told["done"])
            self._limit = time.monotonic() + STALLED_S
            if rank == 0 and sys.stderr.isatty():
                done, passed = len(self.samples[0]) / self._wanted, time.monotonic() - self.begin
                text = f"{self._name}: {self.operations} operations, {done:.0%}, {passed:.0f} s "
                print(f"\r{text if done < 1 else ''}\x1b[K", end="", file=sys.stderr, flush=True)

    def act(self, now: float) -> float:
        """Wait for nobody when a rank has failed."""
        if any(rank.status for rank in self.ranks):
            self._limit = min(self._limit, now + _WORDS_S)
        return super().act(now)

    def limit(self) -> float:
        """Return the time at which ranks that have not ended are overdue."""
        return self._limit

    def told_in_the_end(self, what: str, otherwise: Any) -> Any:
        """Return something of the report of rank 0."""
        return self.ranks[0].told.get("done", {}).get(what, otherwise)

    def problems(self) -> list[str]:
        """Name what went wrong besides leaks, with the last words of a rank."""
        found = []
        has_failed = any(rank.status and not rank.overdue for rank in self.ranks)
        if not has_failed and any(rank.overdue for rank in self.ranks):
            found.append(f"no sample for {STALLED_S:g} s after {self.operations} operations")
        for number, rank in enumerate(self.ranks):
            if rank.status or "done" not in rank.told:
                found.append(f"rank {number} did not end well: status {rank.status}")
        if found:
            in_turn = sorted(self.ranks, key=lambda rank: rank.overdue)
            found += next(filter(None, (rank.output for rank in in_turn)), "").splitlines()[-12:]
        return [*found, *(f"left {what}" for what in self.left)]
