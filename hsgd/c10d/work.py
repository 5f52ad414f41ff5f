"""HsgdWork: one collective of a process group, which the core's queue executes in its turn."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hsgd.c10d import NAME
from hsgd.c10d.diagnostics import tracing
from hsgd.c10d.torch_versions import keep_from_dynamo
from hsgd.errors import CollectiveTimeout, HsgdError

if TYPE_CHECKING:
    from hsgd.comm.communicator import Comm
    from hsgd.comm.handle import Request

__all__ = ["HsgdWork"]

_GIVING_UP_S = 1.0  # most seconds until running works have failed: waits check every 20 ms
_WITH_LIMIT_S = 1e9  # a wait with a limit executes nothing in its own thread


class _Unreadable:
    """The value of a failed future.

    C++ pickles it to look for tensors, and gets a RuntimeError with the error's text. In an
    exception, torch's own choice, C++ finds no tensors and crashes.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> str:
        raise copy.copy(self._error)


class _Announcing(threading.local):
    work: HsgdWork | None = None  # whose future's callbacks this thread runs


_announcing = _Announcing()


@keep_from_dynamo
class HsgdWork(dist.Work):
    """One collective of a process group, running or ended.

    Collectives called in a future's callback come next, before those that the program called
    meanwhile. So the order is the same on all ranks, whenever the callbacks run.

    Args:
        what: its name in errors.
        tensors: those of the result.
        comm: the communicator of the group.
        call: makes the collective, which then begins with start(); None if `request` is one that
            the core executes without Python.
    """

    def __init__(
        self,
        what: str,
        tensors: list[torch.Tensor],
        comm: Comm | None,
        call: Callable[[], object] | None = None,
        request: Request | None = None,
    ) -> None:
        super().__init__()
        self._what, self._tensors = what, tensors
        self._comm = comm
        self._call = call
        self._request = request
        self.is_native = request is not None
        self._error: BaseException | None = None
        self._threaded = False
        self._ended = False
        self._lock = threading.Lock()
        self._future: Any = None
        self._unresolved: Any = None
        self._follower: HsgdWork | None = None
        self.traced: Any = None  # its range in a profile, until it has ended
        self.limit_s = 0.0  # limit of a wait without a timeout; 0: none
        # Its caller in a backward pass, and the other works of that pass: see backward.py.
        self.asker = ""
        self.siblings: list[HsgdWork] | None = None
        self.raised_in_backward = False  # a wait raised its error in the thread of a pass

    @staticmethod
    def announcing() -> HsgdWork | None:
        """Return the work whose future's callback makes this call, or None; local."""
        return _announcing.work

    def start(self, *, blocking: bool, threaded: bool = False) -> HsgdWork:
        """Execute it in its turn; `blocking` returns when it has ended, and raises its error.

        With `threaded`, or a limit of its own, it never runs in the thread of the caller.
        """
        if self._comm is None:
            raise HsgdError(f"{NAME}: the process group was destroyed; make a new one")
        self._threaded = threaded
        if blocking and not threaded and not self.limit_s:
            self._comm.run_function(self.execute)
        else:
            self._request = self._comm.start_function(self.execute)
        if blocking:
            self.wait()
        return self

    def execute(self) -> None:
        """Make the collective in this thread, and run the callbacks; raises only Ctrl-C."""
        call, self._call = self._call, None
        assert call is not None
        try:
            call()
        except BaseException as error:
            self._error = error
        del call
        if self.traced is not None:
            tracing.end(self.traced)
            self.traced = None
        with self._lock:
            self._ended = True
            self._unresolved = self._future  # a future requested later is done from the start
        outer, _announcing.work = _announcing.work, self
        try:
            if self._unresolved is not None:
                self._resolve(self._unresolved)
        finally:
            _announcing.work = outer

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

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has ended; blocking. Raises the error of the collective.

        Ctrl-C ends the wait and breaks the group, as in a blocking collective.

        Args:
            timeout: None, 0 or less waits until it ends, at the latest by the group's timeout. If
                it passes before, CollectiveTimeout is raised, and the collective continues; but if
                the group's timeout was set after the group was made, collective and group end.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        own = seconds <= 0 < self.limit_s
        if own:
            seconds = self.limit_s
        if not self._has_ended_within(seconds):
            raise (
                self._given_up(seconds)
                if own
                else self._unfinished(seconds, "it is still running, wait for it again")
            )
        if self._error is not None:
            if _announcing.work is None and torch._C._current_graph_task_id() >= 0:
                self.raised_in_backward = True
            raise self._cause(self._error)
        return True

    def _has_ended_within(self, seconds: float) -> bool:
        """Wait, without a limit if it is not positive."""
        if self._ended or self._request is None:
            return True
        if seconds <= 0:
            seconds = _WITH_LIMIT_S if self._threaded else -1.0
        with tracing.UNTRACED if self._request.done() else tracing.waiting(self._what):
            return self._request.wait(seconds)

    def _unfinished(self, seconds: float, state: str) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{self._what}: not finished within the timeout of {seconds:g} s; {state}"
        )

    def _given_up(self, seconds: float) -> BaseException:
        """End the group, and return the error, which names the late ranks; blocks for a moment."""
        assert self._comm is not None
        self._comm.expire(seconds)
        self._has_ended_within(_GIVING_UP_S)
        return self._error or self._unfinished(seconds, "make a new process group")

    def _cause(self, error: BaseException) -> BaseException:
        """Return the first error of the backward pass that started it, or its own."""
        errors = (sibling.exception() for sibling in self.siblings or ())
        return next((first for first in errors if first is not None), error)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended or (self._request is not None and self._request.done())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        if self.is_native and self.is_completed():
            try:
                self.wait()
            except HsgdError as error:
                return error
        return self._error

    def settle(self) -> None:
        """Wait until callbacks of its future have run, if there is one; blocking."""
        if self._future is not None and self._request is not None:
            self._request.wait(-1.0)

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """Return a Future of the result; done at once if another future's callback requests it."""
        if self.is_native:
            return self._followed().get_future()
        caller = _announcing.work
        if caller is not None and caller._comm is self._comm:
            self._has_ended_within(0.0)
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            ended = self._ended
        if ended:
            self._resolve(self._future)
        return self._future

    def _followed(self) -> HsgdWork:
        """Return a work whose function waits for this one, which has none."""
        if self._follower is None:
            follower = HsgdWork(self._what, self._tensors, self._comm, call=self.wait)
            if self.is_completed():
                follower.execute()
            else:
                follower.start(blocking=False)
            self._follower = follower
        return self._follower
