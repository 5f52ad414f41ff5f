"""The ranks that an optimizer was given, and the communicators that it splits off them.

Owns these communicators. Never moves weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hsgd.comm.agree import agree
from hsgd.optim.process_groups import comm_of
from hsgd.optim.split_comms import SplitComms

__all__ = ["OptimizerRanks", "Terms", "refusals_told"]

Terms = Callable[[], Mapping[str, object]]
"""What must be equal on all ranks, by name."""


class OptimizerRanks:
    """Collective, blocking. given: a Comm, a process group, or None: this rank alone, local. what:
    the optimizer, for errors. terms: what its ranks agree on before anything else.

    comm: of all ranks. Raises what agree() raises.
    """

    def __init__(self, given: Any, what: str, terms: Terms) -> None:
        self.comm, self._owned = comm_of(given, what)
        self._split_off = SplitComms(self.comm)
        self._made = self._split_off.made
        self._made += [self.comm] if self._owned else []
        try:
            agree(self.comm, what, terms)
        except BaseException:
            self.leave(abort=False)
            raise

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


@contextlib.contextmanager
def refusals_told(given: Any, what: str) -> Iterator[None]:
    """Within it arguments of OptimizerRanks' owner are checked: the other ranks, which agree then,
    are told of what it raises; local, but collective and blocking if it raises.
    """
    try:
        yield
    except Exception as error:
        refusal = error  # `error` is gone when the block ends

        def refuse() -> Mapping[str, object]:
            raise refusal

        if given is not None:
            OptimizerRanks(given, what, refuse)
        raise
