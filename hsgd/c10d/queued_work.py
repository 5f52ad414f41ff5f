"""QueuedWork: a collective that the core's own queue executes in order, without a Python thread."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hsgd.c10d.diagnostics import tracing
from hsgd.c10d.work import HsgdWork, Worker, unfinished
from hsgd.errors import HsgdError

if TYPE_CHECKING:
    from hsgd import _native

__all__ = ["QueuedWork"]


class QueuedWork(dist.Work):
    """One collective in the queue of the core, running or ended.

    Args:
        what: its name in errors.
        tensors: those of the result.
        worker: the group's; it runs the callbacks of the future.
    """

    def __init__(
        self,
        request: _native.Request,
        what: str,
        tensors: list[torch.Tensor],
        worker: Worker,
    ) -> None:
        super().__init__()
        self._request, self._what, self._tensors = request, what, tensors
        self._worker = worker
        self._followed: HsgdWork | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        if tracing.is_on() and not self._request.done():
            with tracing.waiting(self._what):
                return self._wait(seconds)
        return self._wait(seconds)

    def _wait(self, seconds: float) -> bool:
        if not self._request.wait(seconds if seconds > 0 else -1.0):
            raise unfinished(self._what, seconds)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._request.done()

    def is_success(self) -> bool:
        return self._request.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        if self._request.done():
            try:
                self.wait()
            except HsgdError as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """Return a Future; the group's thread runs its callbacks before later calls."""
        if self._followed is None:
            followed = HsgdWork(self._what, self.wait, self._tensors, self._worker)
            if self._request.done():
                followed.execute()
            else:
                self._worker.submit(followed, blocking=False)
            self._followed = followed
        return self._followed.get_future()
