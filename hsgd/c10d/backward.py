"""Errors of collectives that autograd's engine started, raised out of backward().

The reducer of DistributedDataParallel is C++ and reads tensors from the futures of its buckets; a
Python exception in a future is a value to it, not an error. So the engine's final callbacks raise:
only they keep the class of a Python exception.

Without a comm hook the reducer finishes first, so that it is ready for another step. With a hook
the error is raised before the reducer reads the hook's future; but an error that a wait of a hook
has raised is the hook's own: one that catches it, as torchft's does, goes on. Not so if the hook
waits in another thread, in a callback of the work's future, or for that future.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import GradBucket

from hsgd.c10d.work import HsgdWork

if TYPE_CHECKING:
    from types import FrameType


__all__ = ["Backward"]

_REDUCER, _HOOK = "reducer", "hook"


class Backward:
    """The works of the current backward pass; the reducer calls functions of module `caller`."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._pass = -1
        self._works: list[HsgdWork] = []

    def is_of_reducer(self) -> bool:
        """Return whether the reducer of DistributedDataParallel makes this call; local."""
        return torch._C._current_graph_task_id() >= 0 and self._asker() == _REDUCER

    def watch(self, work: HsgdWork) -> None:
        """Make backward() raise the error of `work`; local, called before the work can end."""
        parent = HsgdWork.announcing()
        if parent is not None and parent.siblings is not None:
            work.asker, work.siblings = _HOOK, parent.siblings
            work.siblings.append(work)
            return
        number = torch._C._current_graph_task_id()
        if number < 0 or not (asker := self._asker()):
            return
        if number != self._pass:  # forgets works of an aborted pass
            self._pass, self._works = number, []
            _queue(lambda works=self._works: self._check(works))
        work.asker, work.siblings = asker, self._works
        self._works.append(work)

    def _asker(self) -> str:
        """Return who calls in this pass: torch gives no other sign of it than the stack."""
        frame = _called_by_engine(sys._getframe(1))
        if frame.f_globals.get("__name__") == self._caller:
            return _REDUCER
        found = (isinstance(each, GradBucket) for each in frame.f_locals.values())
        return _HOOK if any(found) else ""

    def _check(self, works: list[HsgdWork]) -> None:
        """Raise errors before the reducer reads its futures: those of hooks must be valid."""
        self._pass, self._works = -1, []
        for work in works:  # grows: callbacks of a hook's future call collectives
            if work.asker == _HOOK:
                work.settle()
                _raise_error_of(work)

        def check_buckets() -> None:
            for work in works:
                _raise_error_of(work)

        _queue(check_buckets)


def _raise_error_of(work: HsgdWork) -> None:
    error = work.exception()
    if error is not None and not (work.asker == _HOOK and work.raised_in_backward):
        raise error


def _called_by_engine(frame: FrameType) -> FrameType:
    """Return the outermost frame of the Python code that the engine runs."""
    engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
    code = getattr(engine, "__code__", None)
    while frame.f_back is not None and frame.f_back.f_code is not code:
        frame = frame.f_back
    return frame


def _queue(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
