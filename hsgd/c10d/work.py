"""Work: what the methods of a process group return, and the thread that executes them in order.

Owns the order: a group's collectives run one at a time, in the order of the calls, which is the
same on all ranks. A call that may block runs in its caller's thread where nothing is under way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hsgd.errors import CollectiveTimeout, HsgdError

__all__ = ["HsgdWork", "Worker"]


class HsgdWork(dist.Work):
    """One collective of a process group, under way or ended."""

    def __init__(
        self, what: str, call: Callable[[], None], tensors: list[torch.Tensor], worker: Worker
    ) -> None:
        super().__init__()
        self._worker = worker
        self._what = what
        self._call: Callable[[], None] | None = call
        self._tensors = tensors
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._future: Any = None
        self._unresolved: Any = None

    def execute(self) -> None:
        """Run the collective in this thread; never raises."""
        call, self._call = self._call, None
        assert call is not None
        try:
            call()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._ended.set()
            self._unresolved = self._future  # one that is asked for later is done from the start

    def announce(self) -> None:
        """Resolve its future, whose callbacks run here."""
        if self._unresolved is not None:
            self._resolve(self._unresolved)

    def _resolve(self, future: Any) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the collective has ended; blocking. Raises what it raised.

        timeout: None, 0 or less waits until it ends, at the latest by the group's timeout. Raises
        CollectiveTimeout when it passes before; the collective goes on.
        """
        self._worker.help(self)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._ended.wait(seconds if seconds > 0 else None):
            raise CollectiveTimeout(
                f"{self._what}: not done within {seconds:g} s; it goes on, wait for it again"
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """wait() without a limit of its own."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the collective has ended, in whatever way; never blocks."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether the collective has ended without an error; never blocks."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What the collective raised, or None; never blocks."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._tensors

    def get_future(self) -> Any:
        """A torch.futures.Future of the result tensors; done already where a callback of another
        future asks, which may wait for it.
        """
        self._worker.help(self)
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            ended = self._ended.is_set()
        if ended:
            self._resolve(self._future)
        return self._future


class Worker:
    """Executes works one at a time, in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Condition()
        self._waiting: deque[HsgdWork] = deque()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, work: HsgdWork, *, blocking: bool, limit_s: float | None = None) -> HsgdWork:
        """Have `work` executed: `blocking` returns when it has ended, and raises what it raised.

        limit_s: of the wait, where it is shorter than the group's.
        """
        with self._turn:
            if self._closed:
                raise HsgdError(f"{self._name}: the process group was destroyed; make a new one")
            inline = blocking and limit_s is None and not self._busy and not self._waiting
            if inline:
                self._busy = True
            else:
                self._waiting.append(work)
                self._start()
                self._turn.notify_all()
        if inline:
            self._execute(work)
        if blocking:
            work.wait(timedelta(seconds=limit_s or 0.0))
        return work

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _execute(self, work: HsgdWork) -> None:
        work.execute()
        with self._turn:
            self._busy = False
            self._turn.notify_all()
        work.announce()

    def _serve(self) -> None:
        while (work := self._next(lambda: self._closed)) is not None:
            self._execute(work)
            del work  # or its tensors would live until the next one

    def _next(self, ended: Callable[[], bool]) -> HsgdWork | None:
        """Wait for a work to execute, and take it; None when there is none and `ended` is true."""
        with self._turn:
            self._turn.wait_for(lambda: not self._busy and (self._waiting or ended()))
            if not self._waiting:
                return None
            self._busy = True
            return self._waiting.popleft()

    def help(self, work: HsgdWork) -> None:
        """Execute what comes before `work`, and it, where this is the worker's own thread: a
        callback that it runs asks for another collective, which nobody else would execute.
        """
        if threading.current_thread() is not self._thread:
            return
        while not work.is_completed():
            before = self._next(work.is_completed)
            if before is not None:
                self._execute(before)

    def close(self) -> None:
        """Finish what was called, and end the thread; blocking, until the last deadline at most.

        A second call does nothing.
        """
        with self._turn:
            self._closed = True
            self._turn.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._turn:
            self._turn.wait_for(lambda: not self._busy)
