"""preempted() and save_and_exit(): all ranks save together before their job is stopped.

A rank that got a signal tells the others in the headers of collectives that they call anyway (see
Comm.request_stop). preempted() communicates only if the program has called none since.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from hsgd.config import Config
from hsgd.errors import HsgdError, LaunchError
from hsgd.jobs.environment import ending, time_limit
from hsgd.jobs.environment.launched_once import launched_once

if TYPE_CHECKING:
    from hsgd.comm.communicator import Comm

__all__ = ["FrontEnd", "any_rank", "carry", "preempted", "register", "save_and_exit"]

_LOOK_S = 1.0  # between looks whether the program has installed other handlers
_PULSE_S = 1.0  # between two signs of life of a rank that saves
_NAME = "preempted"
_UNKNOWN = "another rank"


class FrontEnd(Protocol):
    """An interface by which a program trains, such as hsgd.torch."""

    @property
    def rank(self) -> int:
        """This process's rank in the job."""

    def carriers(self) -> Sequence[Comm]:
        """Return communicators of all ranks on which only the program itself calls; local."""

    def any_rank(self, mine: bool) -> bool:
        """Return whether `mine` is true on any rank; collective, blocking."""


def any_rank(comm: Comm, mine: bool) -> bool:
    """Return whether `mine` is true on any rank of `comm`; collective, blocking."""
    value = np.array([mine], np.uint8)
    comm.allreduce(value, "max", value, _NAME)
    return bool(value[0])


class _Comms:
    """The front end of a program that makes a Comm itself, or calls hsgd.init()."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Comm]] = []

    def carriers(self) -> Sequence[Comm]:
        comms = [comm for made in self.made if (comm := made()) is not None and not comm.closed]
        self.made = [weakref.ref(comm) for comm in comms]
        return [comm for comm in comms if comm.size == max(each.size for each in comms)]

    @property
    def rank(self) -> int:
        return self.carriers()[0].rank

    def any_rank(self, mine: bool) -> bool:
        return any_rank(self.carriers()[0], mine)


class _Preemption:
    """What this process knows of the end of its job."""

    def __init__(self) -> None:
        self.comms = _Comms()
        self.reason = ""  # why this rank asks all to stop; empty: it does not
        self.handlers: dict[int, Callable[[int, FrameType | None], None] | None] = {}
        self.look_s = 0.0  # when to look at the handlers next
        self.end_s: float | None = None  # of the job, of time.monotonic()
        self.has_asked = self.is_alone = False
        self.calls: weakref.WeakKeyDictionary[Comm, int] = weakref.WeakKeyDictionary()

    def front_end(self) -> FrontEnd | None:
        for find in reversed(_front_ends):
            if (found := find()) is not None:
                return found
        if self.comms.carriers():
            return self.comms
        if not self.is_alone:
            by = launched_once(os.environ)
            if by is not None and not by.is_alone:
                raise LaunchError(
                    f"preempted: {by.what} started {by.size or 'several'} ranks, and nothing of "
                    "hsgd connects them: call hsgd.init(), hvd.init() or init_process_group "
                    '("hsgd", or "cpu:hsgd,cuda:nccl") first'
                )
            self.is_alone = True
        return None

    def watch_signals(self) -> None:
        """Install our handlers, also before those that a program has installed since; local."""
        if threading.current_thread() is not threading.main_thread():
            if not self.handlers:
                raise HsgdError("preempted: call it in the main thread first, for its signals")
            return
        if time.monotonic() < self.look_s:
            return
        self.look_s = time.monotonic() + _LOOK_S
        if not self.handlers:
            names = Config.from_env().preempt_signals.split(",")
            self.handlers = dict.fromkeys(signal.Signals[f"SIG{name}"] for name in names)
        for number, handler in self.handlers.items():
            earlier = signal.getsignal(number)
            if handler is None or earlier is not handler:
                self.handlers[number] = handler = self._noting(earlier)
                signal.signal(number, handler)

    def _noting(self, earlier: object) -> Callable[[int, FrameType | None], None]:
        def note(number: int, frame: FrameType | None) -> None:
            self.reason = self.reason or signal.Signals(number).name
            if callable(earlier):
                earlier(number, frame)

        return note

    def watch_clock(self, within_s: float) -> None:
        """Ask to stop if the job ends within `within_s`; local, asks the scheduler twice."""
        if self.reason:
            return
        is_near = self.end_s is not None and self.end_s - time.monotonic() < within_s
        if not self.has_asked or is_near:  # it may have been extended meanwhile
            self.has_asked = True
            try:
                left = time_limit.left_s(os.environ)
            except LaunchError as error:
                if self.end_s is None:
                    _say(f"preempted(): this job's end is unknown, only signals count: {error}")
                left = None if self.end_s is None else self.end_s - time.monotonic()
            self.end_s = None if left is None else time.monotonic() + left
            if left is not None and left < within_s:
                self.reason = f"the job's time ends in {max(left, 0):.0f} s"

    def agreed(self, front: FrontEnd) -> bool:
        """Return whether a rank had asked all to stop; the same on all ranks."""
        is_requested, has_sent = False, False
        for comm in front.carriers():
            if self.reason:
                comm.request_stop()
            is_requested |= comm.stop_requested()
            calls = comm.metrics().calls
            has_sent |= calls > self.calls.get(comm, 0)
            self.calls[comm] = calls
        if is_requested or has_sent:
            return is_requested
        is_requested = front.any_rank(bool(self.reason))
        for comm in front.carriers():
            self.calls[comm] = comm.metrics().calls
        return is_requested


_state = _Preemption()
_front_ends: list[Callable[[], FrontEnd | None]] = []


def register(find: Callable[[], FrontEnd | None]) -> None:
    """Add a front end; the last one is used that `find` returns, before communicators."""
    if find not in _front_ends:
        _front_ends.append(find)


def carry(comm: Comm) -> None:
    """Let preempted() use a communicator that the program has made; local."""
    _state.comms.made.append(weakref.ref(comm))


def preempted(within_s: float = 0.0) -> bool:
    """Return whether the job is to save and end; the same on all ranks in the same step.

    True once a rank got one of the signals in HSGD_PREEMPT_SIGNALS (SIGTERM, SIGUSR1, SIGUSR2), or
    rank 0's scheduler ends the job within `within_s` seconds. Collective: all ranks call it at the
    same place, usually once after each step. It waits for the asynchronous collectives so far. A
    signal travels with the next collectives of the job's communicator: those of hsgd.torch's
    DistributedOptimizer, the default group of torch.distributed, or an hsgd.Comm. Only if none was
    called since the last time, preempted() calls one of one byte.

    The first call installs handlers for the signals, in the main thread, and asks the scheduler.
    Handlers that the program has installed are called, too. From the first True on, no rank aborts
    the job because others take long to end.

    Raises:
        LaunchError: several ranks were started, and nothing connects them yet.
        HsgdError: the first call is not in the main thread.
        PeerLost, CollectiveTimeout: from the collective of one byte.
    """
    _state.watch_signals()
    front = _state.front_end()
    if within_s > 0 and (front is None or front.rank == 0):
        _state.watch_clock(within_s)
    if not (bool(_state.reason) if front is None else _state.agreed(front)):
        return False
    _state.reason = _state.reason or _UNKNOWN
    ending.never_abort()
    return True


def save_and_exit(
    save: Callable[[], object], *, on_all: bool = False, requeue: bool = True, exit_code: int = 0
) -> NoReturn:
    """Save while all ranks wait, put the job back into Slurm's queue, and end the program.

    Collective, blocking; does not return. The other ranks wait for `save` as long as rank 0 lives,
    beyond HSGD_TIMEOUT_S, too.

    Args:
        save: writes the checkpoint; called on rank 0 only.
        on_all: call it on all ranks, for instance for a sharded checkpoint.
        requeue: under Slurm, run `scontrol requeue` for this job on rank 0.
        exit_code: of all ranks.

    Raises:
        SystemExit: as sys.exit(exit_code) does, on all ranks.
        HsgdError: another rank failed to save; the job is not requeued. Where `save` itself
            raised, its error.
    """
    front = _state.front_end()
    ending.never_abort()
    rank = 0 if front is None else front.rank
    if front is None:
        save()
    else:
        _save_together(save, front, saves=on_all or rank == 0, waits=on_all)
    if rank == 0:
        why = "" if _state.reason in ("", _UNKNOWN) else f"{_state.reason}: "
        _say(f"{why}saved{_requeued() if requeue else ''}")
    sys.exit(exit_code)


def _save_together(
    save: Callable[[], object], front: FrontEnd, *, saves: bool, waits: bool
) -> None:
    """Save on this rank, or wait until another has; HsgdError if another failed to."""
    failure: BaseException | None = None
    if saves:
        with contextlib.nullcontext() if waits else _pulses(front):
            try:
                save()
            except BaseException as error:
                failure = error
    try:
        while not waits and not front.any_rank(saves):
            pass
        has_failed = front.any_rank(failure is not None)
    except RuntimeError as error:  # HsgdError, HorovodInternalError
        if failure is not None or not saves or waits:
            raise failure or error from None
        _say(f"saved, although {error}")
        return
    if failure is not None:
        raise failure
    if has_failed:
        raise HsgdError("save_and_exit: another rank failed to save; its error says why")


@contextlib.contextmanager
def _pulses(front: FrontEnd) -> Iterator[None]:
    """Call any_rank(False) now and then in a thread, so that no rank waits beyond its deadline."""
    ends = threading.Event()

    def pulse() -> None:
        with contextlib.suppress(RuntimeError):  # the thread may not communicate; others wait
            while not ends.wait(_PULSE_S):
                front.any_rank(False)

    thread = threading.Thread(target=pulse, name="hsgd save", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _requeued() -> str:
    """Put this job back into Slurm's queue and return what happened, in words; local."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return ""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f", but job {job} is not requeued: {error}"
    if done.returncode:
        said = done.stderr.strip() or f"scontrol ended with {done.returncode}"
        return f", but job {job} is not requeued: {said}"
    return f", job {job} is requeued"


def _say(words: str) -> None:
    print(f"hsgd: {words}", file=sys.stderr, flush=True)
