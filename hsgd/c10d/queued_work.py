"""QueuedWork: a collective that the core's own queue executes, without a thread of Python.

Owns the translation of a request of the core into what torch asks of a Work. The core keeps the
order: a blocking call comes after what was queued before it, and who waits executes what is next
himself where the core's thread has not begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import torch
from hsgd.c10d.diagnostics import tracing
from hsgd.c10d.global_ranks import in_global_ranks
from hsgd.c10d.work import HsgdWork, Worker, unfinished
from hsgd.errors import HsgdError

if TYPE_CHECKING:
    from hsgd import _native

__all__ = ["QueuedWork"]


class QueuedWork(dist.Work):
    """One collective in the queue of the core, under way or ended.

    what: its name in errors. tensors: of the result. members: global ranks, by group rank. worker:
    of the group, which runs the callbacks of its future.
    """

    def __init__(
        self,
        request: _native.Request,
        what: str,
        tensors: list[torch.Tensor],
        members: Sequence[int],
        worker: Worker,
    ) -> None:
        super().__init__()
        self._request, self._what, self._tensors = request, what, tensors
        self._members, self._worker = members, worker
        self._followed: HsgdWork | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See HsgdWork.wait."""
        seconds = timeout.total_seconds() if timeout else 0.0
        if tracing.is_on() and not self._request.done():
            with tracing.waiting(self._what):
                return self._wait(seconds)
        return self._wait(seconds)

    def _wait(self, seconds: float) -> bool:
        try:
            if not self._request.wait(seconds if seconds > 0 else -1.0):
                raise unfinished(self._what, seconds)
        except HsgdError as error:
            raise in_global_ranks(error, self._members) from None
        return True

    def synchronize(self) -> None:
        """wait() without a limit of its own."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the collective has ended, in whatever way; never blocks."""
        return self._request.done()

    def is_success(self) -> bool:
        """Whether the collective has ended without an error; never blocks."""
        return self._request.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the collective raised, or None; never blocks."""
        if self._request.done():
            try:
                self.wait()
            except HsgdError as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._tensors

    def get_future(self) -> Any:
        """A torch.futures.Future of the result tensors. Its callbacks run in the group's thread,
        and what they call comes before what the program calls from now on.
        """
        if self._followed is None:
            followed = HsgdWork(self._what, self.wait, self._tensors, self._worker)
            if self._request.done():
                followed.execute()
            else:
                self._worker.submit(followed, blocking=False)
            self._followed = followed
        return self._followed.get_future()
