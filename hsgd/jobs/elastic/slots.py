"""Slots: the places for workers on a node; workers that fail restart ever later."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hsgd.config import Config
from hsgd.jobs.elastic.worker import Standing, Worker

__all__ = ["PASSED_ON", "Slots", "save_limit_s"]

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MOST_FAILURES = 5  # in a row, before a worker had the state of the training
PASSED_ON = ("SIGUSR1", "SIGUSR2")
"""Signals to a job that its ranks get."""


def save_limit_s() -> float:
    """Return the seconds that ranks get to save after SIGTERM: HSGD_ABORT_AFTER_S; local."""
    return Config.from_env().abort_after_s or math.inf


@dataclass
class _Slot:
    worker: Worker | None = None
    failures: int = 0
    not_before: float = 0.0


class Slots:
    """The `count` slots of a node, and the command and environment of each worker."""

    def __init__(self, count: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._command, self._environment = command, environment

    @property
    def workers(self) -> list[Worker]:
        """Workers with a running process."""
        return [slot.worker for slot in self._slots if slot.worker is not None]

    def standing(self, *standings: Standing) -> list[Worker]:
        """Return the workers with one of these standings."""
        return [worker for worker in self.workers if worker.standing in standings]

    @property
    def exhausted(self) -> bool:
        """Whether no worker runs, and none will be started."""
        return not self.workers and all(slot.failures >= _MOST_FAILURES for slot in self._slots)

    def fill(self) -> list[Worker]:
        """Start a worker in each usable empty slot, and return them; local. Raises LaunchError."""
        now, started = time.monotonic(), []
        for number, slot in enumerate(self._slots):
            usable = slot.failures < _MOST_FAILURES and now >= slot.not_before
            if slot.worker is None and usable:
                slot.worker = Worker(number, self._command, self._environment)
                started.append(slot.worker)
        return started

    def empty(self, worker: Worker, code: int) -> None:
        """Empty the slot of a worker that has ended."""
        slot = self._slots[worker.slot]
        slot.worker = None
        if code == 0:
            return
        slot.failures = 1 if worker.held else slot.failures + 1
        pause_s = min(_FIRST_PAUSE_S * 2 ** (slot.failures - 1), _LONGEST_PAUSE_S)
        slot.not_before = time.monotonic() + pause_s

    def tell_preempted(self, number: int) -> None:
        """Tell running workers that call hsgd.preempted() of a signal; local."""
        for worker in self.workers:
            if worker.watches:
                worker.tell_preempted(number)
