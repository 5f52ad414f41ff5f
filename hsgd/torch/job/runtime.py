"""The job as hsgd.torch sees it, between init() and shutdown().

Owns the only module state of the package: the Runtime with its process sets, their coordinators,
and the stall inspector. Never looks into tensors.
"""

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

__all__ = [
    "RankPosition",
    "Runtime",
    "current",
    "is_initialized",
    "latest",
    "start",
    "stop",
]

UNINITIALIZED = "Horovod has not been initialized; use hvd.init()."


@dataclass(frozen=True)
class RankPosition:
    """Where a rank is, in Horovod's terms: cross ranks count the nodes that have its local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


class Unnamed:
    """Numbers for operations without a name, which ranks count alike as long as they call alike.
    Several threads may take them.
    """

    def __init__(self) -> None:
        self.used = 0
        self._lock = threading.Lock()

    def take(self) -> int:
        """Return the next number."""
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
    """Makes the communicator of a process set, in an order that all ranks agree on."""

    kind = "process_set"

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        super().__init__(name)
        self.ranks = list(ranks)

    @property
    def signature(self) -> Signature:
        return Signature(self.kind, detail=str(self.ranks))

    def run(self, comm: Comm) -> None:
        meet(comm, self.name)  # split() itself is not compared with other calls
        included = comm.rank in self.ranks
        self.result = comm.split(0 if included else None, key=comm.rank)


class Runtime:
    """Collective, blocking: all ranks of `comm` make it together.

    comm: closed by close(). threaded: whether other threads may call the core.
    """

    def __init__(self, comm: Comm, settings: HorovodSettings, threaded: bool) -> None:
        self.comm = comm
        self.settings = settings
        self.threaded = threaded
        self.watched: list[Callable[[], list[tuple[str, float]]]] = []
        """What else has operations open over all ranks: names, and since when."""
        self.joining: list[Callable[[], None]] = []
        """What join() runs, each in a thread of its own: returns when all ranks have joined."""
        self._privates: list[Comm] = []
        self.observer: Callable[[Operation, Sequence[Record]], None] | None = None
        """Told of operations that ended, and of what their collectives spent time on."""
        self.endings: list[Callable[[], None]] = []
        self.on_abort: list[Callable[[], None]] = []  # local, from any thread
        """Called when the job ends, before anything is closed."""
        self.tracer: Callable[..., None] | None = None
        """Told of what else took time, as Timeline.add()."""
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
        """Return the global ranks of a process set; local.

        Raises ValueError for one that is not there.
        """
        found = self._sets.get(number)
        if found is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return found.ranks

    def process_sets(self) -> dict[int, list[int]]:
        """Return number and global ranks of each process set; local."""
        return {number: known.ranks for number, known in self._sets.items()}

    def coordinator(self, number: int | None, what: str) -> Coordinator:
        """Return that of a process set that this rank is in; local.

        Raises ValueError in Horovod's words, and TypeError for a set without a number, as Horovod
        does.
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
        """Return a number for an operation without a name, alike on the ranks of a set; local."""
        found = None if number is None else self._sets.get(number)
        return -1 if found is None else found.unnamed.take()

    def unnamed(self, number: int | None) -> Unnamed:
        """Return the numbers of operations without a name of a process set; local."""
        return self._sets[number or 0].unnamed

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Make a process set after init(), as register() does."""
        self._refuse_static("adding")
        return self.register(ranks)

    def register(self, ranks: Sequence[int]) -> int | None:
        """Make a process set, and return its number, or None if these ranks form one already;
        collective over all ranks, blocking.
        """
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
        """Return whether it was there, and take it away; collective over all ranks, blocking."""
        self._refuse_static("removing")
        if number not in self._sets:
            return False
        self._run(Barrier(f"process_set.remove.{number}"), self.coordinator(0, "process set"))
        gone = self._sets.pop(number)
        if gone.coordinator is not None:
            gone.coordinator.close("the process set was removed")
        return True

    def metrics(self) -> Counters:
        """Return what this rank did in the job, the stall inspector aside; local."""
        return sum((comm.metrics() for comm in self._comms()), Counters.none())

    def keep_records(self, capacity: int) -> None:
        """Keep records in all communicators of the job, as Comm.keep_records() does; local."""
        self._kept_records = capacity
        self._records.clear()
        for comm in self._comms():
            comm.keep_records(capacity)

    def register_own(self, ranks: Sequence[int]) -> tuple[int | None, list[int]]:
        """Register sets of which each rank names the one that it is in; collective over all ranks.

        Returns the number and the ranks of this rank's.
        """
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
        """Return a communicator of a process set for one user, closed with the job; collective over
        the set, blocking.
        """
        coordinator = self.coordinator(number, what)
        operation = _NewSet(f"{what}.{next(self._private)}", range(coordinator.comm.size))
        self._run(operation, coordinator)
        comm: Comm = operation.result
        comm.keep_records(self._kept_records)
        self._privates.append(comm)
        return comm

    def abort(self) -> None:
        """End what waits in the job's communicators with an error; local, from any thread."""
        with contextlib.suppress(HsgdError, RuntimeError):  # closed just now, or a set comes
            for comm in self._comms():
                comm.abort()
            for function in self.on_abort:
                function()

    def close(self, reason: str) -> None:
        """Fail what is open and close all communicators; local."""
        while self.endings:
            self.endings.pop()()
        if self._inspector is not None:
            self._inspector.close()
        failed = program_failed()
        with contextlib.ExitStack() as stack:  # all of them, also when one fails
            for number in sorted(self._sets):
                coordinator = self._sets[number].coordinator
                if coordinator is not None:
                    stack.callback(coordinator.close, reason)
            for comm in self._privates:
                comm.left_by_error |= failed
                stack.callback(comm.close)
            self._privates.clear()

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
        # What the core ran by itself is one collective, after which more may have ended.
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
    """Set up the job; collective, blocking. `comm` as for hsgd.world.init(); threaded(comm) as for
    Runtime.
    """
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
    """Close the job; local. Does nothing when there is none."""
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
    """Return the job; local. Raises ValueError before init()."""
    if not _jobs:
        raise ValueError(UNINITIALIZED)
    return _jobs[0]


def latest() -> Runtime | None:
    """Return the job, or None before init() and after shutdown(); local."""
    return _jobs[0] if _jobs else None


def is_initialized() -> bool:
    """Return whether there is a job; local."""
    return bool(_jobs)
