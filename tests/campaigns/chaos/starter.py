"""What starts the ranks of cases: forks on this machine, forks on virtual nodes, or mpirun.

Owns the interface alone.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Starter", "StarterError"]


class StarterError(RuntimeError):
    """The ranks of a case could not be started."""


class Starter(Protocol):
    """Serves one case after another. `fileno()` is readable when a rank has ended.

    A rank has a number that its starter knows it by: its pid, perhaps in another PID namespace.
    store: host and port of a TCPStore that all ranks reach. leaving_s: how long what is started
    may outlive the ranks.
    """

    store: tuple[str, int]
    leaving_s: float

    def fileno(self) -> int:
        """To poll."""

    def start(self, orders: Sequence[dict[str, Any]]) -> list[int]:
        """Start a rank for each order; their numbers. Raises StarterError."""

    def send(self, rank: int, number: signal.Signals) -> bool:
        """A signal to the rank of this number; False where it has ended."""

    def ended(self) -> tuple[int, int] | None:
        """Number and wait status of a rank that has ended; None where no other has."""

    def left(self) -> list[str]:
        """Processes that are left of the case, in words."""

    def end_case(self) -> None:
        """End what is left of it."""

    def set_link(self, node: int, state: str) -> None:
        """Of a virtual node: "up", "down", or "slow"."""
