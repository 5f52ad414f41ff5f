"""Work: what the methods of a process group return, and the thread that executes them in order.

Owns the order: a group's collectives run one at a time, in the order of the calls, which is the
same on all ranks. A call that may block runs in its caller's thread where nothing is under way.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import torch
from hsgd.c10d.diagnostics import tracing
from hsgd.errors import CollectiveTimeout, HsgdError

__all__ = ["HsgdWork", "Worker", "unfinished"]

GIVING_UP_S = 1.0  # at most, until what is under way has failed: a wait looks after 20 ms


def unfinished(what: str, seconds: float) -> CollectiveTimeout:
    """The error of a wait that ends before the collective does; local."""
    return CollectiveTimeout(
        f"{what}: not finished within the timeout of {seconds:g} s; it is still running, wait for "
        "it again"
    )


class _Unreadable:
    """The value of a failed future. C++ looks for tensors in it by pickling it, and gets a
    RuntimeError with the error's text; in an exception, torch's own choice, it finds none and dies.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> str:
        raise copy.copy(self._error)


class HsgdWork(dist.Work):
    """One collective of a process group, under way or ended."""

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
        self.limit_s = 0.0  # of a wait that gives no timeout; 0: none of its own
        # Who asked for it in a backward pass, and what else that pass watches: see backward.py.
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
            self._unresolved = self._future  # one that is asked for later is done from the start

    def announce(self) -> None:
        """Resolve its future, whose callbacks run here."""
        if self._unresolved is not None:
            self._resolve(self._unresolved)
        self.announced = True

    def _resolve(self, future: Any) -> None:
        """Python's value() and wait() raise the error. To C++ it is a value: see _Unreadable."""
        if self._error is None:
            future.set_result(self._tensors)
            return
        # Without the frames through which it passes: they lead back to the future, and what C++
        # holds no collection of garbage would find.
        error = copy.copy(self._error)

        def unwrap(_: Any) -> None:
            raise copy.copy(error)

        future._set_unwrap_func(unwrap)
        spared = self.asker == "reducer"  # backward() raises when the reducer is done
        future.set_result(self._tensors if spared else _Unreadable(error))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the collective has ended; blocking. Raises what it raised.

        timeout: None, 0 or less waits until it ends, at the latest by the group's timeout. Raises
        CollectiveTimeout when it passes before; the collective goes on. Where the timeout was set
        after the group was made, it ends, and the group with it.
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
        """Ends the group, and gives the error, which names who was waited for; blocking, for a
        moment.
        """
        self._worker.give_up(seconds)
        self._ended.wait(GIVING_UP_S)
        return self._error or CollectiveTimeout(
            f"{self._what}: not finished within the timeout of {seconds:g} s; make a new process "
            "group"
        )

    def _cause(self, error: BaseException) -> BaseException:
        """The first error of the backward pass that asked for it, or its own."""
        errors = (sibling.exception() for sibling in self.siblings or ())
        return next((first for first in errors if first is not None), error)

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

    def settle(self) -> None:
        """Wait until callbacks of its future have run, if there is one; blocking."""
        if self._future is not None:
            self._worker.wait_for(lambda: self.announced)

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
    """Executes works one at a time, in the order of the calls. What a callback of a future calls
    comes next, before what the program has called meanwhile: the order is then the same on all
    ranks, whenever the callbacks run.
    """

    def __init__(self, name: str, expire: Callable[[], Callable[[float], None] | None]) -> None:
        self._name = name
        self._expire = expire
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self.is_unused = True  # nothing was submitted that another thread may execute
        self._waiting: deque[HsgdWork] = deque()
        self._urgent: deque[HsgdWork] = deque()  # of callbacks
        self._busy = False  # until the callbacks of what was executed have run
        self._closed = False
        self._thread: threading.Thread | None = None
        self._announcing: HsgdWork | None = None  # whose callbacks run

    def give_up(self, seconds: float) -> None:
        """Have what is under way fail, as after a timeout of `seconds`, and all that waits behind
        it; local, never blocks.
        """
        if (expire := self._expire()) is not None:
            expire(seconds)

    def submit(self, work: HsgdWork, *, blocking: bool, threaded: bool = False) -> HsgdWork:
        """Have `work` executed: `blocking` returns when it has ended, and raises what it raised.

        threaded: never in the thread of the caller, nor is what has a limit of its own.
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
        """call(*arguments) in this thread, where nothing is under way; False where something is."""
        with self._lock:  # the condition's, without its Python
            if self._busy or self._waiting or self._urgent or self._closed:
                return False
            self._busy = True
        try:
            return call(*arguments)
        finally:
            self._let_go()

    def parent(self) -> HsgdWork | None:
        """The work whose callback calls this; None where none does."""
        return self._announcing if self._is_own_thread() else None

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _start(self) -> None:
        if self._thread is None:
            self.is_unused = False
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _execute(self, work: HsgdWork) -> None:
        """Execute it and run its callbacks, in the thread that holds the turn."""
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
            del work  # or its tensors would live until the next one
            self._let_go()

    def _next(self) -> HsgdWork | None:
        """Wait for a work to execute, and take it; None when there is none and none may come."""
        with self._turn:
            self._turn.wait_for(
                lambda: not self._busy and (self._urgent or self._waiting or self._closed)
            )
            if not self._urgent and not self._waiting:
                return None
            self._busy = True
            return (self._urgent or self._waiting).popleft()

    def help(self, work: HsgdWork) -> None:
        """Execute what comes before `work`, and it, where this is the worker's own thread: a
        callback that it runs asks for another collective, which nobody else would execute.
        """
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
        """Finish what was called, and end the thread; blocking, until the last deadline at most.

        A second call does nothing.
        """
        with self._turn:
            self._closed = True
            self.is_unused = False
            self._turn.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._turn:
            self._turn.wait_for(lambda: not self._busy)
