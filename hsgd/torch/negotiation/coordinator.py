"""Coordinator: runs the operations of a process set in one order on all its ranks.

Every collective of the core compares what its ranks call before data moves. So ranks simply call
what they submitted, in their order; if all submitted the same, the usual case, no negotiation is
needed. If not, all get SignatureMismatch from that call and start rounds: they exchange what they
have submitted (one allgather), each derives the same plan, and they run it together. Rounds
continue, at growing intervals, until no operation waits for a rank.

Operations that are one collective each are queued in the core, which runs them without Python. When
ranks start rounds, operations still queued meet other calls and either succeed or mismatch; no rank
begins a round before its own queue has ended. A rank without operations lets the others wait, as
their next operation needs it anyway, and joins the rounds with its next one.
"""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hsgd.comm.communicator import Comm
from hsgd.comm.handle import Handle
from hsgd.errors import CollectiveTimeout, HsgdError, SignatureMismatch
from hsgd.torch.exceptions import HorovodInternalError
from hsgd.torch.negotiation.round_plan import RoundPlan, Table
from hsgd.torch.negotiation.signature import Signature

__all__ = ["ROUND", "Coordinator", "Operation"]

_SHORTEST_S, _LONGEST_S = 1e-4, 5e-3  # between rounds while operations wait for a rank
_LOOK_S = 0.1  # between checks whether the job was ended
ROUND = "hsgd.torch round"
"""Name of the collective in which ranks exchange what they have submitted."""


class Operation(abc.ABC):
    """An operation to submit; hsgd.torch.operations has the kinds.

    Ranks match operations by `name`; synchronize() returns `result`.
    """

    kind = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.submitted_s = self.begun_s = self.ended_s = 0.0
        self.done = False
        self.error: BaseException | None = None
        self.handle: Handle[Any] | None = None
        """Set while the operation is in the core's queue."""
        self.background = False  # whether it runs without a call of wait()
        self.queued = False  # whether the core has run it, or will, without Python
        self.result: Any = None

    @property
    def payload_bytes(self) -> int:
        return 0

    @property
    def signature(self) -> Signature:
        """What must be equal on all ranks; read only if ranks differ."""
        return Signature(self.kind)

    @abc.abstractmethod
    def run(self, comm: Comm) -> None:
        """Call the core; blocking. SignatureMismatch leaves the operation unchanged."""

    def start(self, comm: Comm) -> Handle[Any] | None:
        """Queue it in the core, not blocking; None if run() is more than one collective."""
        return None

    def finish(self, comm: Comm) -> None:  # noqa: B027  most kinds have nothing to make
        """Make the result after the core has run it; local."""


class Coordinator:
    """Runs operations over `comm`, which it owns; thread-safe.

    Args:
        label: names the process set in threads and reports.
        threaded: other threads may call the core; else operations run in wait().
        endable: end() may be called while ranks wait for a missing one, and ends their waits.
            Otherwise the core's deadline counts, and a wait costs a little less.
        fused: runs operations that may be reduced together.
        stand_in: makes an operation with zeros for a rank that has joined.
    """

    def __init__(
        self,
        comm: Comm,
        label: str,
        fused: Callable[[Sequence[Operation], Comm], None],
        stand_in: Callable[[str, Signature], Operation],
        *,
        threaded: bool = True,
        endable: bool = False,
    ) -> None:
        self.comm = comm
        self.label = label
        self.observer: Callable[[Operation], None] | None = None
        """Called with each operation that succeeded."""
        self._fused = fused
        self._stand_in = stand_in
        self._threaded = threaded
        self._endable = endable
        self._changed = threading.Condition()  # guards all that follows
        self._pending: dict[str, Operation] = {}
        self._negotiating = False
        self._news = False  # whether operations were submitted since the last round
        self._interval_s = _SHORTEST_S
        self._busy = False  # whether a thread is in _step()
        self._sleepers = 0  # threads that wait for an operation that another thread runs
        self._ended: str | None = None  # why no more operations are accepted
        self._thread: threading.Thread | None = None

    def submit(self, operation: Operation, *, wake: bool = True) -> None:
        """Add an operation; local, returns at once.

        With `wake` the thread runs it; else wait() must be called for it next. Raises ValueError
        for a name in use, HorovodInternalError after the end.
        """
        operation.submitted_s = time.monotonic()
        with self._changed:
            if self._ended is not None:
                raise HorovodInternalError(self._ended)
            if operation.name in self._pending:
                raise ValueError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name "
                    "as another tensor that is currently being processed. If you want to request "
                    f"another tensor, use a different tensor name: {operation.name}"
                )
            wake = wake or self._endable  # the waiting thread must not be inside the core
            operation.background = wake
            self._pending[operation.name] = operation
            self._news = True
            if wake:
                self._start()
            if wake or self._negotiating:
                self._changed.notify_all()

    def wait(self, operation: Operation) -> None:
        """Wait until the operation is done; blocking. Its error is stored in it."""
        if operation.background and not operation.done:
            self._hand_over()
            self._settle(operation)
        if not operation.done:
            self._work(lambda: operation.done, sleeper=True)

    def poll(self, operation: Operation) -> bool:
        """Return whether the operation is done; local."""
        if (handle := operation.handle) is not None and handle.done():
            self._settle(operation)
        return operation.done

    def pending(self) -> list[tuple[str, float]]:
        """Return names and submission times (time.monotonic()) of open operations; local."""
        with self._changed:
            return [(op.name, op.submitted_s) for op in self._pending.values()]

    @property
    def ended(self) -> str | None:
        """Why no more operations are accepted; None while they are. Local."""
        return self._ended

    def end(self, reason: str) -> None:
        """Fail open operations and accept no more; local. A running collective continues."""
        self._fail(HorovodInternalError(reason))

    def close(self, reason: str) -> None:
        """Fail open operations and close the communicator, which other ranks notice; local."""
        self.end(reason)
        thread = self._thread
        self.comm.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _hand_over(self) -> None:
        """Queue new operations in the core, up to the first that it cannot run by itself."""
        with self._changed:
            if self._negotiating or not self._threaded:
                return
            new: list[Operation] = []
            for operation in reversed(self._pending.values()):
                if operation.handle is not None:
                    break
                new.append(operation)
            for operation in reversed(new):
                if not operation.background:
                    return
                try:
                    operation.handle = operation.start(self.comm)
                except HsgdError as error:
                    self._break(error)
                    return
                if operation.handle is None:
                    return
                operation.queued = True
                operation.begun_s = operation.submitted_s

    def _settle(self, operation: Operation) -> None:
        """Wait for an operation that the core runs; blocking, thread-safe."""
        handle = operation.handle
        if handle is None:
            return
        meets = True
        try:
            if not self._wait_for(handle, operation):
                return
        except SignatureMismatch:
            meets = False
        except Exception as error:
            for earlier in self._in_queue():  # these have ended before, and may have succeeded
                if earlier is operation:
                    break
                self._settle(earlier)
            self._break(error)
            return
        except BaseException as error:
            self._break(error)
            raise
        with self._changed:
            if operation.handle is None or operation.done:
                return
            operation.handle = None
            if not meets:
                operation.queued = False
                self._negotiate()
                return
            try:
                operation.finish(self.comm)
            except Exception as error:  # out of memory, which does not affect other ranks
                operation.error = error
            self._finish([operation])
        self._tell([operation])

    def _wait_for(self, handle: Handle[Any], operation: Operation) -> bool:
        """Wait as Handle.wait(); return False if end() was called meanwhile."""
        while True:
            try:
                handle.wait(_LOOK_S if self._endable else None)
            except CollectiveTimeout:
                raise
            except TimeoutError:
                if operation.done:
                    return False
            else:
                return True

    def _in_queue(self) -> list[Operation]:
        with self._changed:
            return [op for op in self._pending.values() if op.handle is not None]

    def _negotiate(self) -> None:
        self._negotiating = self._news = True
        self._interval_s = _SHORTEST_S
        self._start()  # the other ranks need this one in the rounds
        self._changed.notify_all()

    def _start(self) -> None:
        if self._threaded and self._thread is None:
            self._thread = threading.Thread(
                target=self._work,
                args=(lambda: self._ended is not None,),
                name=f"hsgd.torch {self.label}",
                daemon=True,
            )
            self._thread.start()

    def _work(self, ended: Callable[[], bool], *, sleeper: bool = False) -> None:
        """Take steps until `ended`, one thread at a time while others sleep."""
        with self._changed:
            while not ended():
                if self._busy or not (self._pending or self._negotiating):
                    self._sleepers += sleeper
                    self._changed.wait()
                    self._sleepers -= sleeper
                    continue
                self._busy = True
                self._changed.release()
                try:
                    self._step()
                finally:
                    self._changed.acquire()
                    self._busy = False
                    if self._sleepers or self._pending or self._negotiating:
                        self._changed.notify_all()

    def _step(self) -> None:
        """Run the operation that was submitted first, or one round."""
        try:
            if self._negotiating:
                self._round()
            else:
                self._run_first()
        except Exception as error:
            self._break(error)
        except BaseException as error:  # Ctrl-C breaks the communicator
            self._break(error)
            raise

    def _run_first(self) -> None:
        self._hand_over()
        if given := self._in_queue():
            handle = given[-1].handle
            with contextlib.suppress(HsgdError):  # each operation gets its error below
                if handle is not None:
                    handle.wait()
            for operation in given:
                self._settle(operation)
            return
        with self._changed:
            first = next(iter(self._pending.values()), None)
        if first is None:
            return
        first.begun_s = time.monotonic()
        try:
            first.run(self.comm)
        except SignatureMismatch:
            with self._changed:
                self._negotiate()
        else:
            self._finish([first])
            self._tell([first])

    def _round(self) -> None:
        """Run one round; all ranks join it when their core's queues have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._news, self._interval_s)
            self._news = False
        for operation in self._in_queue():
            self._settle(operation)
        with self._changed:
            held = dict(self._pending)
        mine: Table = [(operation.name, operation.signature) for operation in held.values()]
        try:
            tables = self.comm.allgather_object(mine, ROUND)
        except SignatureMismatch:  # another rank's core still ran its queue
            self._news = True
            return
        plan = RoundPlan(tables)
        self._interval_s = _SHORTEST_S if plan.ready else min(2 * self._interval_s, _LONGEST_S)
        for names in plan.batches():
            own = [held[name] for name in names if name in held]
            for operation in own:
                operation.begun_s = time.monotonic()
            if (words := plan.error(names[0])) is not None:
                for operation in own:
                    operation.error = HorovodInternalError(words)
            else:
                self._run_planned(
                    [held.get(name) or self._stand_in(name, plan.signature(name)) for name in names]
                )
            self._finish(own)
            self._tell(own)
        with self._changed:
            self._negotiating = plan.leftover

    def _run_planned(self, operations: Sequence[Operation]) -> None:
        if len(operations) > 1:
            self._fused(operations, self.comm)
        else:
            operations[0].run(self.comm)

    def _finish(self, operations: Sequence[Operation]) -> None:
        now = time.monotonic()
        with self._changed:
            for operation in operations:
                self._pending.pop(operation.name, None)
                operation.ended_s = now
                operation.done = True
            if self._sleepers:
                self._changed.notify_all()

    def _tell(self, operations: Sequence[Operation]) -> None:
        if self.observer is not None:
            for operation in operations:
                self.observer(operation)

    def _break(self, error: BaseException) -> None:
        """End after an error, since a communicator that failed is unusable."""
        failure = HorovodInternalError(str(error) or type(error).__name__)
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, error: HorovodInternalError) -> None:
        with self._changed:
            if self._ended is None:
                self._ended = str(error)
            for operation in self._pending.values():
                operation.error, operation.done, operation.handle = error, True, None
            self._pending.clear()
            self._negotiating = False
            self._changed.notify_all()
