"""CaseJob: the job of a case, in which the fault happens.

Owns the moment of the fault, and how long ranks may take after it. Never judges.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.chaos.cases import FAULTS, LINK_STATES, TIMEOUT_S, Case
from campaigns.chaos.layers import LAYERS
from campaigns.job import Job, RankSeen
from campaigns.zygotes import Zygotes

__all__ = ["CaseJob", "Observed"]

SETUP_S, STEPS_S = 30.0, 40.0  # longest that a job may take without any fault
END_S = 3 * TIMEOUT_S + 6.0  # from a fault to the end of all ranks but the victim
WAKE_S = 2 * TIMEOUT_S + 4.0  # from SIGCONT to the end of a victim that was stopped
_SIGNALS = {
    "kill": signal.SIGKILL,
    "abort": signal.SIGABRT,
    "interrupt": signal.SIGINT,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
}


@dataclass
class Observed:
    """A case that was run."""

    case: Case
    ranks: list[RankSeen]
    fault_at: float = 0.0
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def took_place(self) -> bool:
        """Whether the fault hit a process that lived."""
        return self.fault_at > 0


class CaseJob(Job):
    """A job of which one rank comes to harm; run() takes at most some SETUP_S + STEPS_S + END_S."""

    def __init__(self, starter: Zygotes, case: Case) -> None:
        super().__init__(starter, _order(case))
        self._case, self._fault = case, FAULTS[case.fault]
        self._fault_due = self._fault_at = self._woken_at = 0.0
        self._link_state = "up"

    def observed(self) -> Observed:
        """Return what was seen, after run()."""
        return Observed(self._case, self.ranks, self._fault_at, self.left, self.seconds)

    @property
    def _victim(self) -> RankSeen:
        return self.ranks[self._case.victim]

    def end_all(self) -> None:
        """End all ranks that have not ended, whose link is up then."""
        if self._link_state != "up":
            self._set_link("up")
        super().end_all()

    def gather(self, folder: Path) -> None:
        """Read the outputs of ranks, and how many steps they made."""
        super().gather(folder)
        for rank, seen in enumerate(self.ranks):
            with contextlib.suppress(OSError):
                seen.steps = int.from_bytes((folder / f"steps-{rank}").read_bytes(), sys.byteorder)

    # --- when the fault happens, and what is due after it ---

    def started(self) -> None:
        """Plan a fault of the set-up."""
        self._plan("setup")

    def heard(self, rank: int, told: dict[str, Any]) -> None:
        """Plan a fault of the work when all are ready, one of the end when the victim ends."""
        if told["what"] == "ready" and all("ready" in each.told for each in self.ranks):
            self._plan("work")
        if told["what"] == "ending" and rank == self._case.victim:
            self._plan("end")

    def _plan(self, phase: str) -> None:
        if self._case.phase == phase and not self._fault_at and not self._fault_due:
            self._fault_due = time.monotonic() + self._case.delay_s

    def act(self, now: float) -> float:
        """Let the fault happen, and end it."""
        if 0 < self._fault_due <= now:
            self._strike(now)
        over = self._fault_at + self._case.pause_s
        passes = self._case.fault in ("pause", "slow")
        alone = self._case.fault == "stop" and self.alive() == [self._victim]
        if self._fault_at and not self._woken_at and (alone or (passes and now >= over)):
            self._end_fault(now)
        if self._fault_due:
            return self._fault_due
        waits = passes and self._fault_at and not self._woken_at
        return over if waits else super().act(now)

    def limit(self) -> float:
        """Return the time at which ranks that have not ended are overdue."""
        if not self._fault_at:
            return self.begin + SETUP_S + STEPS_S
        if self._case.fault == "gil" and self.alive() == [self._victim]:
            return 0.0  # it never ends by itself
        if self._fault.hangs and self._woken_at:
            return self._woken_at + WAKE_S
        steps_s = 0.0 if self._fault.ends or self._fault.cuts else STEPS_S
        return self._fault_at + END_S + steps_s

    def _strike(self, now: float) -> None:
        self._fault_due = 0.0
        fault, victim = self._case.fault, self._victim
        if victim.ended_at or "done" in victim.told or victim.error:
            return
        if fault in _SIGNALS:
            if not self.starter.send(victim.number, _SIGNALS[fault]):
                return
        elif fault in LINK_STATES:
            self._set_link(LINK_STATES[fault])
        elif (line := self.line_of(self._case.victim)) is not None:
            try:
                line.sendall(fault.encode())
            except OSError:
                return
        else:
            self._fault_due = now + 1e-3  # it has not come so far
            return
        self._fault_at = now

    def _end_fault(self, now: float) -> None:
        if self._case.fault == "slow":
            self._set_link("up")
        else:
            self.starter.send(self._victim.number, signal.SIGCONT)
        self._woken_at = now

    def _set_link(self, state: str) -> None:
        """Set that of the victim's node."""
        self.starter.set_link(self._case.nodes[self._case.victim], state)
        self._link_state = state


def _order(case: Case) -> dict[str, Any]:
    """Describe the job of a case to its ranks."""
    layer = LAYERS[case.layer]
    order = {
        "program": f"chaos.{layer.program}",
        "seat": "chaos.fault_seat:FaultSeat",
        "nodes": case.nodes,
        "meets": "mpi" if layer.launch else "store" if len(set(case.nodes)) > 1 else "path",
        "needs_store": layer.launch is None,
        "pretends": case.under == "fork",
        "fresh": layer.launch is not None,  # the libraries of these ranks may be others
        "timeout_s": TIMEOUT_S,
        "number": case.number,
        "steps": layer.steps,
        "victim": case.victim,
        "cores": case.cores,
        "has_deadlines": layer.has_setup,  # ranks wait in hsgd's calls alone
    }
    if layer.launch is not None:
        from hsgd.jobs.launch import preload

        # mpirun has another network than the one whose links are cut.
        environment = {"HSGD_TIMEOUT_S": str(TIMEOUT_S), "HSGD_INTERFACES": "eth0"}
        if layer.launch.preload:
            environment |= {"LD_PRELOAD": str(preload.library()), "HSGD_MIN_BYTES": "0"}
        order |= {"outlives": layer.launch.lives_on, "environment": environment}
    return order
