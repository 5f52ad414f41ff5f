"""Runtime: the job of hsgd.torch between init() and shutdown(), with its process sets."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsgd import world
from hsgd.base.closing import program_failed
from hsgd.comm.communicator import Comm
from hsgd.comm.record import Record
from hsgd.errors import HsgdError
from hsgd.metrics import Counters
from hsgd.torch.negotiation.coordinator import ROUND, Coordinator, Operation
from hsgd.torch.negotiation.signature import Signature
from hsgd.torch.negotiation.stall_inspector import Open, StallInspector, ages
from hsgd.torch.operations.operation import Barrier, meet
from hsgd.torch.operations.reductions import run_fused, stand_in
from hsgd.torch.settings import HorovodSettings

__all__ = ["RankPosition", "Runtime", "current", "is_initialized", "latest", "start", "stop"]

UNINITIALIZED = "Horovod has not been initialized; use hvd.init()."


@dataclass(frozen=True)
class RankPosition:
    """A rank's position in Horovod's terms; a cross rank counts nodes that have the local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


class Unnamed:
    """Numbers for unnamed operations, equal on all ranks that make the same calls; thread-safe."""

    def __init__(self) -> None:
        self.used = 0
        self._lock = threading.Lock()

    def take(self) -> int:
        with self._lock:
            self.used += 1
            return self.used - 1


@dataclass
class _Set:
    """A process set; `coordinator` is None on ranks outside of it."""

    ranks: list[int]
    coordinator: Coordinator | None
    unnamed: Unnamed = field(default_factory=Unnamed)


class _NewSet(Operation):
    """An operation that makes a process set's communicator, in an order that all ranks share."""

    kind = "process_set"

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        super().__init__(name)
        self.ranks = list(ranks)

    @property
    def signature(self) -> Signature:
        return Signature(self.kind, detail=str(self.ranks))

    def run(self, comm: Comm) -> None:
        meet(comm, self.name)  # ranks do not compare split() with other calls
        included = comm.rank in self.ranks
        self.result = comm.split(0 if included else None, key=comm.rank)


class Runtime:
    """The job; made collectively by all ranks of `comm`, blocking.

    `comm` is closed by close(). `threaded`: other threads may call the core.
    """

    def __init__(self, comm: Comm, settings: HorovodSettings, threaded: bool) -> None:
        self.comm = comm
        self.settings = settings
        self.threaded = threaded
        self.watched: list[Callable[[], list[tuple[str, float]]]] = []
        """Further sources of open operations over all ranks: names and start times."""
        self.joining: list[Callable[[], None]] = []
        """Functions that join() runs in threads; each returns when all ranks have joined."""
        self.carriers: list[Comm] = []
        """Communicators of all ranks on which only the program's own thread calls."""
        self._privates: list[Comm] = []
        self.observer: Callable[[Operation, Sequence[Record]], None] | None = None
        """Called with each finished operation and the records of its collectives."""
        self.endings: list[Callable[[], None]] = []  # called when the job ends, before it closes
        self.on_abort: list[Callable[[], None]] = []
        """Called by abort(); each must be local, and may run in any thread."""
        self.tracer: Callable[..., None] | None = None
        """Called with other durations, as Timeline.add()."""
        self._kept_records = 0
        self._records: dict[str, list[Record]] = {}
        self._numbers = itertools.count(1)
        self._private = itertools.count()
        self.place = _place(comm)
        self._sets = {0: _Set(list(range(comm.size)), self._coordinator(comm, "global"))}
        self._inspector: StallInspector | None = None
        if settings.stall_check and threaded and comm.size > 1:
            control = comm.split(0, key=comm.rank)
            assert control is not None
            self._inspector = StallInspector(control, settings, self._open, self.members, self._end)

    def members(self, number: int) -> list[int]:
        """Return the global ranks of a process set, or raise ValueError if it is unknown; local."""
        found = self._sets.get(number)
        if found is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return found.ranks

    def process_sets(self) -> dict[int, list[int]]:
        return {number: known.ranks for number, known in self._sets.items()}

    def coordinator(self, number: int | None, what: str) -> Coordinator:
        """Return the coordinator of a process set that this rank is in; local.

        As Horovod, raises ValueError for unknown sets, TypeError for a set without a number.
        """
        if number is None:
            raise TypeError(
                f"{what}: the process set is not registered; give it to init() or add_process_set()"
            )
        found = self._sets.get(number)
        if found is None:
            raise ValueError(
                f"{what}: Process set provided does not exist, or has not been registered."
            )
        if found.coordinator is None:
            raise ValueError(
                f"{what}: Rank {self.comm.rank} is not a member of the provided process set."
            )
        return found.coordinator

    def next_unnamed(self, number: int | None) -> int:
        """Return a number for an unnamed operation, equal on the ranks of a set; local."""
        found = None if number is None else self._sets.get(number)
        return -1 if found is None else found.unnamed.take()

    def unnamed(self, number: int | None) -> Unnamed:
        """Return the numbers of a process set's unnamed operations; local."""
        return self._sets[number or 0].unnamed

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Make a process set after init(), as register() does."""
        self._refuse_static("adding")
        return self.register(ranks)

    def register(self, ranks: Sequence[int]) -> int | None:
        """Make a process set and return its number, None for a duplicate; collective, blocking."""
        wanted = sorted(ranks)
        if not wanted or wanted[0] < 0 or wanted[-1] >= self.comm.size:
            raise ValueError(f"process set {wanted}: give ranks from 0 to {self.comm.size - 1}")
        if any(known.ranks == wanted for known in self._sets.values()):
            return None
        operation = _NewSet("process_set.add." + ".".join(map(str, wanted)), wanted)
        self._run(operation, self.coordinator(0, "process set"))
        number = next(self._numbers)
        comm: Comm | None = operation.result
        self._sets[number] = _Set(
            wanted, None if comm is None else self._coordinator(comm, f"set {number}")
        )
        return number

    def remove_process_set(self, number: int) -> bool:
        """Remove a process set and return whether it existed; collective, blocking."""
        self._refuse_static("removing")
        if number not in self._sets:
            return False
        self._run(Barrier(f"process_set.remove.{number}"), self.coordinator(0, "process set"))
        gone = self._sets.pop(number)
        if gone.coordinator is not None:
            gone.coordinator.close("the process set was removed")
        return True

    def metrics(self) -> Counters:
        """Return this rank's counters in the job, without the stall inspector's; local."""
        return sum((comm.metrics() for comm in self._comms()), Counters.none())

    def keep_records(self, capacity: int) -> None:
        """Keep records in all communicators of the job, as Comm.keep_records() does; local."""
        self._kept_records = capacity
        self._records.clear()
        for comm in self._comms():
            comm.keep_records(capacity)

    def register_own(self, ranks: Sequence[int]) -> tuple[int | None, list[int]]:
        """Register sets if each rank names only its own; collective. Returns number and ranks."""
        wanted = sorted(ranks)
        octets = hashlib.blake2b(repr(wanted).encode(), digest_size=8).digest()
        digests = self.comm.allgather(np.frombuffer(octets, np.int64)).tolist()
        # The first rank of each set names it for all: a set of N ranks travels once, not N times.
        mine = wanted if digests.index(digests[self.comm.rank]) == self.comm.rank else None
        named = filter(None, self.comm.allgather_object(mine, "hsgd.torch process sets"))
        numbers = {}
        for one in sorted({tuple(other) for other in named}):
            numbers[one] = self.register(one)
        return numbers[tuple(wanted)], wanted

    def private_comm(self, number: int | None, what: str) -> Comm:
        """Return a communicator of a process set until the job closes; collective, blocking."""
        coordinator = self.coordinator(number, what)
        operation = _NewSet(f"{what}.{next(self._private)}", range(coordinator.comm.size))
        self._run(operation, coordinator)
        comm: Comm = operation.result
        comm.keep_records(self._kept_records)
        self._privates.append(comm)
        return comm

    def abort(self) -> None:
        """Fail waits in the job's communicators; local, from any thread."""
        with contextlib.suppress(HsgdError, RuntimeError):  # just closed, or a set is added
            for comm in self._comms():
                comm.abort()
            for function in self.on_abort:
                function()

    def close(self, reason: str) -> None:
        """Fail open operations and close all communicators; local."""
        while self.endings:
            self.endings.pop()()
        if self._inspector is not None:
            self._inspector.close()
        failed = program_failed()
        with contextlib.ExitStack() as stack:  # close all, even if one fails
            for number in sorted(self._sets):
                coordinator = self._sets[number].coordinator
                if coordinator is not None:
                    stack.callback(coordinator.close, reason)
            for comm in self._privates:
                comm.left_by_error |= failed
                stack.callback(comm.close)
            self._privates.clear()
            self.carriers.clear()

    def _comms(self) -> list[Comm]:
        comms = [known.coordinator.comm for known in list(self._sets.values()) if known.coordinator]
        return comms + self._privates

    def _refuse_static(self, verb: str) -> None:
        if not self.settings.dynamic_process_sets:
            raise ValueError(
                f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {verb} process sets after Horovod "
                "initialization."
            )

    def _run(self, operation: Operation, coordinator: Coordinator) -> None:
        coordinator.submit(operation, wake=False)
        coordinator.wait(operation)
        if operation.error is not None:
            raise operation.error

    def _coordinator(self, comm: Comm, label: str) -> Coordinator:
        coordinator = Coordinator(
            comm,
            label,
            run_fused,
            stand_in,
            threaded=self.threaded,
            endable=self.threaded and self.settings.stall_shutdown_s > 0,
        )
        coordinator.observer = lambda operation: self._observe(operation, comm, label)
        comm.keep_records(self._kept_records)
        return coordinator

    def _observe(self, operation: Operation, comm: Comm, label: str) -> None:
        if self.observer is None:
            return
        there = self._records.setdefault(label, [])
        there += [record for record in comm.take_records() if record.name != ROUND]
        # An operation that the core ran has one collective; records of later ones may follow.
        own = there[:1] if operation.queued else there[:]
        del there[: len(own)]
        if operation.queued and own:
            operation.begun_s, operation.ended_s = own[0].call.begin_s, own[0].call.end_s
        self.observer(operation, own)

    def _open(self) -> Open:
        table: Open = {}
        for number, known in list(self._sets.items()):
            if known.coordinator is not None:
                table |= ages(known.coordinator.pending(), number)
        for watched in list(self.watched):
            table |= ages(watched(), 0)
        return table

    def _end(self, reason: str) -> None:
        for known in list(self._sets.values()):
            if known.coordinator is not None:
                known.coordinator.end(reason)


def _place(comm: Comm) -> RankPosition:
    own = (comm.cross_rank, comm.local_rank, comm.local_size)
    everybody: list[tuple[int, int, int]] = comm.allgather_object(own, "hsgd.torch init")
    peers = sorted(node for node, local_rank, _ in everybody if local_rank == comm.local_rank)
    return RankPosition(
        comm.local_rank,
        comm.local_size,
        peers.index(comm.cross_rank),
        len(peers),
        len({local_size for _, _, local_size in everybody}) == 1,
    )


_jobs: list[Runtime] = []


def start(comm: Any, settings: HorovodSettings, threaded: Callable[[Comm], bool]) -> Runtime:
    """Set up the job; collective, blocking. `comm` is as for hsgd.world.init()."""
    if not _jobs:
        world.init(comm)
        try:
            _jobs.append(Runtime(world.comm(), settings, threaded(world.comm())))
        except BaseException:
            world.shutdown()
            raise
    return _jobs[0]


@atexit.register
def stop() -> None:
    """Close the job, if there is one; local."""
    while _jobs:
        try:
            _jobs.pop().close(
                "Horovod has been shut down. This was caused by an exception on one of the ranks "
                "or an attempt to allreduce, allgather or broadcast a tensor after one of the "
                "ranks finished execution."
            )
        finally:
            world.shutdown()


def current() -> Runtime:
    """Return the job, or raise ValueError before init(); local."""
    if not _jobs:
        raise ValueError(UNINITIALIZED)
    return _jobs[0]


def latest() -> Runtime | None:
    """Return the job, or None before init() and after shutdown(); local."""
    return _jobs[0] if _jobs else None


def is_initialized() -> bool:
    """Return whether there is a job; local."""
    return bool(_jobs)
