"""preempted() and save_and_exit(): all ranks save together before their job is stopped.

A rank that got a signal tells the others in the headers of collectives that they call anyway (see
Comm.request_stop). preempted() communicates only if the program has called none since.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from hsgd.config import Config
from hsgd.errors import HsgdError, LaunchError, PeerLost
from hsgd.jobs.environment import agent_link, ending, time_limit
from hsgd.jobs.environment.launched_once import launched_once

if TYPE_CHECKING:
    from hsgd.comm.communicator import Comm

__all__ = ["FrontEnd", "OverComm", "add_comm", "preempted", "register", "save_and_exit"]

_LOOK_S = 1.0  # between looks whether another handler was installed
_PULSE_S = 1.0  # between two signs of life of ranks that save
_UNKNOWN = "another rank was told"
_SAVED, _FAILED, _SAVING = range(3)  # the highest of all ranks counts


class FrontEnd(Protocol):
    """An interface by which a program trains, such as hsgd.torch."""

    @property
    def rank(self) -> int:
        """This process's rank in the job."""

    def carriers(self) -> Sequence[Comm]:
        """Return communicators of all ranks on which only the program itself calls; local."""

    def any_rank(self, mine: bool) -> bool:
        """Return whether `mine` is true on any rank; collective, blocking."""

    def split(self) -> Comm:
        """Return a new communicator of all ranks, for save_and_exit(); collective, blocking."""


class OverComm:
    """The front end of a program whose ranks `comm` connects; local to make.

    `carriers` are all communicators of these ranks on which the program calls; None: `comm` alone.
    """

    def __init__(self, comm: Comm, carriers: Sequence[Comm] | None = None) -> None:
        self._comm, self._carriers = comm, carriers or [comm]

    @property
    def rank(self) -> int:
        return self._comm.rank

    def carriers(self) -> Sequence[Comm]:
        return self._carriers

    def any_rank(self, mine: bool) -> bool:
        value = np.array([mine], np.uint8)
        self._comm.allreduce(value, "max", value, "preempted")
        return bool(value[0])

    def split(self) -> Comm:
        made = self._comm.split(0, self._comm.rank)
        assert made is not None
        return made


class _Comms:
    """Communicators of programs that make a Comm themselves, or call hsgd.init()."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Comm]] = []
        self.first: Comm | None = None  # held until it is closed: ranks collect garbage apart
        self.size: int | None = None  # ranks that the launcher started; 0: not known

    def find(self) -> OverComm | None:
        """Return a front end over those of the whole job, if there are any; local.

        They are as large as the launcher says, or the largest.
        """
        comms = [comm for made in self.made if (comm := made()) is not None and not comm.closed]
        if len(comms) < len(self.made):
            self.made = [weakref.ref(comm) for comm in comms]
        if self.first is not None and self.first.closed:
            self.first = None
        if not comms:
            return None
        if self.first is None:
            by = launched_once(os.environ)
            self.size = 0 if by is None or by.size is None else by.size
        size = self.size or max(comm.size for comm in comms)
        comms = [comm for comm in comms if comm.size == size]
        if self.first is None and comms:
            self.first = comms[0]
        return None if self.first is None else OverComm(self.first, comms)


class _Preemption:
    """What this process knows of the end of its job."""

    def __init__(self) -> None:
        self.comms = _Comms()
        self.reason = ""  # why this rank asks all to stop; empty: it does not
        self.is_short = False  # whether the whole time of the job is less than asked for
        self.numbers: list[signal.Signals] | None = None  # those that have our handler
        self.look_s = 0.0  # when to look at the handlers next
        self.end_s: float | None = None  # of the job, of time.monotonic()
        self.has_asked = self.is_alone = False
        self.calls: weakref.WeakKeyDictionary[Comm, int] = weakref.WeakKeyDictionary()

    def front_end(self) -> FrontEnd | None:
        for find in reversed(_front_ends):
            if (found := find()) is not None:
                return found
        if (found := self.comms.find()) is not None:
            return found
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
        """Take the signals, again if another handler was installed since; local."""
        if threading.current_thread() is not threading.main_thread():
            if self.numbers is None:
                raise HsgdError("preempted: call it in the main thread first, for its signals")
            return
        if time.monotonic() < self.look_s:
            return
        self.look_s = time.monotonic() + _LOOK_S
        if self.numbers is None:
            names = Config.from_env().preempt_signals
            self.numbers = [
                signal.Signals[f"SIG{name}"] for name in names.split(",") if name != "none"
            ]
            os.register_at_fork(after_in_child=self._forget_signals)
            if (agent := agent_link.link()) is not None:
                agent.when_preempted(self._note)
        for number in self.numbers:
            signal.signal(number, lambda number, _: self._note(signal.Signals(number).name))

    def _note(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _forget_signals(self) -> None:
        """In a forked child, which is no rank: SIGTERM ends it, the others do nothing."""
        for number in self.numbers or ():
            is_term = number == signal.SIGTERM
            signal.signal(number, signal.SIG_DFL if is_term else signal.SIG_IGN)

    def watch_clock(self, within_s: float) -> None:
        """Ask to stop if the job ends within `within_s`; local, asks the scheduler twice."""
        if self.reason:
            return
        is_near = self.end_s is not None and self.end_s - time.monotonic() < within_s
        if not self.has_asked or is_near:  # it may have been extended meanwhile
            is_first, self.has_asked = not self.has_asked, True
            try:
                left = time_limit.left_s(os.environ)
            except LaunchError as error:
                if self.end_s is None:
                    _say(f"preempted(): this job's end is unknown, only signals count: {error}")
                left = None if self.end_s is None else self.end_s - time.monotonic()
            self.end_s = None if left is None else time.monotonic() + left
            if left is not None and left < within_s:
                self.reason = f"the job's time ends in {max(left, 0):.0f} s"
                self.is_short = is_first

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


def add_comm(comm: Comm) -> None:
    """Let preempted() use a communicator that the program has made; local."""
    _state.comms.made.append(weakref.ref(comm))


def preempted(within_s: float = 0.0) -> bool:
    """Return whether the job is to save and end; the same on all ranks in the same step.

    True, from then on, once a rank got one of the signals in HSGD_PREEMPT_SIGNALS (SIGTERM,
    SIGUSR1, SIGUSR2), or rank 0's scheduler ends the job within `within_s` seconds. Collective: all
    ranks call it equally often at the same place, usually after each step. It waits for the
    asynchronous collectives so far. A signal travels with the next collectives of the job's
    communicator: that of hsgd.torch's DistributedOptimizer, the default group of torch.distributed,
    or an hsgd.Comm. Only if none was called since the last time, preempted() calls one of one byte.

    The first call takes the signals for itself, in the main thread, and asks the scheduler. Other
    handlers of these signals, such as Lightning's, are not called any more. In forked children
    SIGTERM has its default action again, the others are ignored. From the first True on, no rank
    aborts the job because others take long to end.

    Raises:
        LaunchError: several ranks were started, and no communicator connects all of them yet.
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

    Collective, blocking; does not return. Ranks wait for `save` as long as those that save live,
    beyond HSGD_TIMEOUT_S, too, unless MPI allows one thread only.

    Args:
        save: writes the checkpoint; called on rank 0 only, so without collectives.
        on_all: call it on all ranks, for instance for a sharded checkpoint.
        requeue: under Slurm, run `scontrol requeue` on rank 0, unless the job was cancelled, or all
            of its time is less than preempted() was given.
        exit_code: of all ranks. torchrun and elastic jobs take any other than 0 for a failure.

    Raises:
        SystemExit: as sys.exit(exit_code) does, on all ranks.
        HsgdError: another rank failed to save; the job is not requeued. The rank itself raises the
            error of `save`.
    """
    front = _state.front_end()
    ending.never_abort()
    rank = 0 if front is None else front.rank
    if front is None:
        save()
    else:
        lost = _save_together(save if on_all or rank == 0 else None, front)
        if lost is not None and (rank > 0 or on_all):
            raise lost
        if lost is not None:
            _say(f"saved, although {lost}")
    if rank == 0:
        saved = f"{_state.reason or 'save_and_exit'}: saved"
        if requeue:
            _requeue(saved)
        else:
            _say(saved)
    sys.exit(exit_code)


def _save_together(save: Callable[[], object] | None, front: FrontEnd) -> RuntimeError | None:
    """Save on this rank, if at all, and wait until all have; return the loss of a rank, if any.

    Raises what `save` does, and HsgdError if another rank failed to save.
    """
    try:
        meeting = _Meeting(front.split(), _SAVED if save is None else _SAVING)
    except RuntimeError as error:  # HsgdError, HorovodInternalError
        if save is not None:
            save()
        return error
    if save is None:
        meeting.wait()
    else:
        # MPI may allow no second thread: then others wait until their deadline only.
        thread = threading.Thread(target=meeting.wait, name="hsgd save", daemon=True)
        thread.start()
        try:
            save()
        except BaseException:
            meeting.end(_FAILED)
            thread.join()
            raise
        meeting.end(_SAVED)
        thread.join()
        if meeting.error is not None and not isinstance(meeting.error, PeerLost):
            meeting.wait()
    if meeting.worst == _FAILED:
        raise HsgdError("save_and_exit: another rank failed to save; its error says why")
    return meeting.error


class _Meeting:
    """All ranks, some of which save: they meet now and then, so that no wait passes a deadline."""

    def __init__(self, comm: Comm, state: int) -> None:
        self.comm, self.state = comm, state
        self.worst = state
        self.error: HsgdError | None = None
        self._ended = threading.Event()

    def end(self, state: int) -> None:
        """Say that this rank saves no longer; local."""
        self.state = state
        self._ended.set()

    def wait(self) -> None:
        """Wait until no rank saves; collective, blocking. Sets `error` if a rank is lost."""
        self.error = None
        value = np.empty(1, np.uint8)
        try:
            while True:
                value[0] = self.state
                self.comm.allreduce(value, "max", value, "save_and_exit")
                self.worst = int(value[0])
                if self.worst != _SAVING:
                    return
                self._ended.wait(min(_PULSE_S, self.comm.timeout_s / 4))
        except HsgdError as error:
            self.error = error


def _requeue(saved: str) -> None:
    """Put this job back into Slurm's queue, and say so after `saved`; local.

    It says so first: Slurm may cut off what a requeued job still writes.
    """
    job = time_limit.slurm_job(os.environ)
    if not job:
        _say(saved)
        return
    if _state.is_short:
        _say(
            f"{saved}, but job {job} is not requeued: it would be as short again; give preempted() "
            "less than the job's time"
        )
        return
    try:
        # A job that Slurm ends is "completing", whether its time is over or scancel was called.
        facts = time_limit.scheduler_says("scontrol", "show", "job", "-o", job).split()
        if "JobState=COMPLETING" in facts and "Reason=TimeLimit" not in facts:
            _say(f"{saved}, and job {job} is not requeued: it was cancelled")
            return
        _say(f"{saved}, job {job} is requeued")
        time_limit.scheduler_says("scontrol", "requeue", job)
    except LaunchError as error:
        _say(f"{saved}, but job {job} is not requeued: {error}")


def _say(words: str) -> None:
    print(f"hsgd: {words}", file=sys.stderr, flush=True)
