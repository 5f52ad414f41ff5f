"""Work: the result of a group's methods, and the thread that runs works in the order of calls."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hsgd.c10d.diagnostics import tracing
from hsgd.errors import CollectiveTimeout, HsgdError

__all__ = ["HsgdWork", "Worker", "unfinished"]

GIVING_UP_S = 1.0  # most seconds until running works have failed: waits check every 20 ms


def unfinished(what: str, seconds: float) -> CollectiveTimeout:
    """Return the error of a wait that ends before the collective does; local."""
    return CollectiveTimeout(
        f"{what}: not finished within the timeout of {seconds:g} s; it is still running, wait for "
        "it again"
    )


class _Unreadable:
    """The value of a failed future.

    C++ pickles it to look for tensors, and gets a RuntimeError with the error's text. In an
    exception, torch's own choice, C++ finds no tensors and crashes.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> str:
        raise copy.copy(self._error)


class HsgdWork(dist.Work):
    """One collective of a process group, running or ended."""

    def __init__(
        self, what: str, call: Callable[[], object], tensors: list[torch.Tensor], worker: Worker
    ) -> None:
        super().__init__()
        self._worker = worker
        self._what = what
        self._call: Callable[[], object] | None = call
        self._tensors = tensors
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._future: Any = None
        self._unresolved: Any = None
        self.announced = False  # its callbacks have run
        self.traced: Any = None  # its range in a profile, until it has ended
        self.limit_s = 0.0  # limit of a wait without a timeout; 0: none
        # Its caller in a backward pass, and the other works of that pass: see backward.py.
        self.asker = ""
        self.siblings: list[HsgdWork] | None = None

    def execute(self) -> None:
        """Run the collective in this thread; never raises."""
        call, self._call = self._call, None
        assert call is not None
        try:
            call()
        except BaseException as error:
            self._error = error
        if self.traced is not None:
            tracing.end(self.traced)
            self.traced = None
        with self._lock:
            self._ended.set()
            self._unresolved = self._future  # a future requested later is done from the start

    def announce(self) -> None:
        """Resolve its future, whose callbacks run in this thread."""
        if self._unresolved is not None:
            self._resolve(self._unresolved)
        self.announced = True

    def _resolve(self, future: Any) -> None:
        """Set the result: value() and wait() of Python raise the error; for C++ see _Unreadable."""
        if self._error is None:
            future.set_result(self._tensors)
            return
        # A copy without traceback: its frames lead back to the future, and the garbage collector
        # cannot find objects that C++ holds.
        error = copy.copy(self._error)

        def unwrap(_: Any) -> None:
            raise copy.copy(error)

        future._set_unwrap_func(unwrap)
        spared = self.asker == "reducer"  # backward() raises when the reducer is done
        future.set_result(self._tensors if spared else _Unreadable(error))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the collective has ended; blocking. Raises the error of the collective.

        Args:
            timeout: None, 0 or less waits until it ends, at the latest by the group's timeout. If
                it passes before, CollectiveTimeout is raised, and the collective continues; but if
                the group's timeout was set after the group was made, collective and group end.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        own = seconds <= 0 < self.limit_s
        if own:
            seconds = self.limit_s
        if not self._ended.is_set():
            with tracing.waiting(self._what):
                self._worker.help(self)
                self._ended.wait(seconds if seconds > 0 else None)
        if own and not self._ended.is_set():
            raise self._given_up(seconds)
        if not self._ended.is_set():
            raise unfinished(self._what, seconds)
        if self._error is not None:
            raise self._cause(self._error)
        return True

    def _given_up(self, seconds: float) -> BaseException:
        """End the group, and return the error, which names the late ranks; blocks for a moment."""
        self._worker.give_up(seconds)
        self._ended.wait(GIVING_UP_S)
        return self._error or CollectiveTimeout(
            f"{self._what}: not finished within the timeout of {seconds:g} s; make a new process "
            "group"
        )

    def _cause(self, error: BaseException) -> BaseException:
        """Return the first error of the backward pass that started it, or its own."""
        errors = (sibling.exception() for sibling in self.siblings or ())
        return next((first for first in errors if first is not None), error)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def settle(self) -> None:
        """Wait until callbacks of its future have run, if there is one; blocking."""
        if self._future is not None:
            self._worker.wait_for(lambda: self.announced)

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """Return a Future of the result; done at once if another future's callback requests it."""
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
    """Executor of works, one at a time, in the order of the calls.

    Collectives called in a future's callback come next, before those that the program called
    meanwhile. So the order is the same on all ranks, whenever the callbacks run.
    """

    def __init__(self, name: str, expire: Callable[[], Callable[[float], None] | None]) -> None:
        self._name = name
        self._expire = expire
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self.is_unused = True  # no work was submitted that another thread may execute
        self._waiting: deque[HsgdWork] = deque()
        self._urgent: deque[HsgdWork] = deque()  # works of callbacks
        self._busy = False  # until the callbacks of the executed work have run
        self._closed = False
        self._thread: threading.Thread | None = None
        self._announcing: HsgdWork | None = None  # its callbacks are running

    def give_up(self, seconds: float) -> None:
        """Fail running and waiting works, as after a timeout of `seconds`; local, never blocks."""
        if (expire := self._expire()) is not None:
            expire(seconds)

    def submit(self, work: HsgdWork, *, blocking: bool, threaded: bool = False) -> HsgdWork:
        """Execute `work`; `blocking` returns when it has ended, and raises its error.

        With `threaded`, or a limit of the work's own, it never runs in the thread of the caller.
        """
        with self._turn:
            if self._closed:
                raise HsgdError(f"{self._name}: the process group was destroyed; make a new one")
            free = not (self._busy or self._waiting or self._urgent)
            inline = blocking and not work.limit_s and free and not threaded
            if inline:
                self._busy = True
            else:
                (self._urgent if self._is_own_thread() else self._waiting).append(work)
                self._start()
                self._turn.notify_all()
        if inline:
            self._execute(work)
            self._let_go()
        if blocking:
            work.wait()
        return work

    def run_if_free(self, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Return call(*arguments) in this thread, or False if another work runs or waits."""
        with self._lock:  # the condition's lock, without its Python code
            if self._busy or self._waiting or self._urgent or self._closed:
                return False
            self._busy = True
        try:
            return call(*arguments)
        finally:
            self._let_go()

    def parent(self) -> HsgdWork | None:
        """Return the work whose callback makes this call, or None."""
        return self._announcing if self._is_own_thread() else None

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _start(self) -> None:
        if self._thread is None:
            self.is_unused = False
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _execute(self, work: HsgdWork) -> None:
        work.execute()
        outer, self._announcing = self._announcing, work
        work.announce()
        self._announcing = outer

    def _let_go(self) -> None:
        with self._turn:
            self._busy = False
            self._turn.notify_all()

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            self._execute(work)
            del work  # frees its tensors before the next one
            self._let_go()

    def _next(self) -> HsgdWork | None:
        with self._turn:
            self._turn.wait_for(
                lambda: not self._busy and (self._urgent or self._waiting or self._closed)
            )
            if not self._urgent and not self._waiting:
                return None
            self._busy = True
            return (self._urgent or self._waiting).popleft()

    def help(self, work: HsgdWork) -> None:
        """Execute works up to `work`, if this thread would otherwise wait for itself."""
        if not self._is_own_thread():
            return
        while not work.is_completed():
            with self._turn:
                before = (self._urgent or self._waiting).popleft()
            self._execute(before)

    def wait_for(self, ended: Callable[[], bool]) -> None:
        """Wait until the execution of a work has made `ended` true; blocking."""
        with self._turn:
            self._turn.wait_for(ended)

    def close(self) -> None:
        """Finish started works and end the thread; blocking, until the last deadline at most."""
        with self._turn:
            self._closed = True
            self.is_unused = False
            self._turn.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._turn:
            self._turn.wait_for(lambda: not self._busy)
