"""Communicators that an optimizer has split off the one that it was given, and that end with it.

Owns them, and what the given one calls before it closes. Never communicates.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from hsgd.comm.communicator import Comm

__all__ = ["SplitComms"]


class SplitComms:
    """Local. made: may be added to; None and the given one itself are left out."""

    def __init__(self, given: Comm, made: Iterable[Comm | None] = ()) -> None:
        self._given = given
        self.made = [comm for comm in made if comm is not None and comm is not given]
        self._forget: weakref.finalize[[Any], Any] | None = None

    def before_close(self, method: Callable[[], object]) -> None:
        """Have the given communicator call a method before it closes, unless leave() comes first.
        Does not keep the method's object, whose end takes this back.
        """
        weak = weakref.WeakMethod(method)

        def call() -> None:
            found = weak()
            if found is not None:
                found()

        self._given.before_close(call)
        owner = method.__self__  # type: ignore[attr-defined]
        self._forget = weakref.finalize(owner, self._given.not_before_close, call)
        self._forget.atexit = False

    def abort(self) -> None:
        """End what waits in them; from any thread."""
        for comm in self.made:
            if not comm.closed:
                comm.abort()

    def leave(self, *, abort: bool = False) -> None:
        """Close them; abort: so that nobody waits for this rank."""
        if self._forget is not None:
            self._forget()
        with contextlib.ExitStack() as last_first:
            for comm in self.made:
                last_first.callback(comm.close)
                if abort and not comm.closed:
                    last_first.callback(comm.abort)
