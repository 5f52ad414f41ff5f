"""The ranks that an optimizer was given, and the communicators that it splits off them.

Owns these communicators. Never moves weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hsgd.optim.process_groups import comm_of
from hsgd.optim.split_comms import SplitComms

__all__ = ["OptimizerRanks"]


class OptimizerRanks:
    """Collective over a process group, else local. given: a Comm, a process group, or None: this
    rank alone. what: the optimizer, for errors.

    comm: of all ranks.
    """

    def __init__(self, given: Any, what: str) -> None:
        self.comm, self._owned = comm_of(given, what)
        self._split_off = SplitComms(self.comm)
        self._made = self._split_off.made
        self._made += [self.comm] if self._owned else []

    def before_close(self, method: Callable[[], object]) -> None:
        """Have the communicator that was given call a method before it closes, unless leave() comes
        first; local. Does not keep the method's object.
        """
        if not self._owned:
            self._split_off.before_close(method)

    def abort(self) -> None:
        """End what waits in the communicators that were made here; local, from any thread."""
        self._split_off.abort()

    def leave(self, abort: bool) -> None:
        """Close what was made; `abort`: so that nobody waits for this rank."""
        self._split_off.leave(abort=abort)
