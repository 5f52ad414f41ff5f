"""Ranks without MPI: forked processes that run functions of the tests together.

Owns the processes and the pipe to each. Ranks are forked by multiprocessing's fork server, a
process without threads that has loaded the heavy modules, so one costs some 30 ms. A rank that
hangs or dies is reported and ended; the tests' own process is never at risk. Never runs under
mpirun.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hsgd import Comm
from hsgd.config import Config

__all__ = [
    "LIMIT_S",
    "PATIENT",
    "Outcome",
    "RankDied",
    "Ranks",
    "Seat",
    "meeting_point",
    "switch_points",
    "until_asleep",
]

LIMIT_S = 60.0  # of one call; a test that needs longer says so
PATIENT = Config(
    timeout_s=30.0
)  # a deadlock becomes a CollectiveTimeout that names somebody, not the end of a rank

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["ranks", "numpy", "torch", "torch._dynamo", "hypothesis", "pytest"]
)
_serial = itertools.count()


def meeting_point() -> str:
    """A fresh name for Comm.local that needs no file system."""
    return f"@hsgd-test-{os.getpid()}-{next(_serial)}"


def switch_points(config: Config) -> list[int]:
    """Payloads, in bytes, around which communicators of one node change what they do."""
    points = [256 << k for k in range(11)]  # where measured ones may lie
    if config.oneshot_bytes >= 0:
        points.append(config.oneshot_bytes)
    if config.chunk_bytes >= 0:
        points += [config.chunk_bytes, 3 * config.chunk_bytes]
    return points


class RankDied(RuntimeError):
    """A rank ended, or did not answer, while a test waited for it."""


@dataclass
class Seat:
    """What a function sees of the rank that runs it; lasts from call to call."""

    rank: int
    pipe: Connection
    kept: dict[Any, Any] = field(default_factory=dict)

    def tell(self, what: Any) -> None:
        """Say how far this rank has come; Ranks.hear() listens."""
        self.pipe.send(("said", what))

    def wait_for_all(self) -> None:
        """Return when Ranks.let_go() was called: from here on all ranks are awake."""
        self.tell("here")
        assert self.pipe.recv() == "go"

    def comm(self, path: str, size: int, config: Config = PATIENT) -> Comm:
        """This rank's communicator of the ranks 0..size-1 at `path`, made at the first call."""
        if path not in self.kept:
            self.kept[path] = Comm.local(path, self.rank, size, config)
        return self.kept[path]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0


class Ranks:
    """`count` processes, each with a Seat; a context manager that leaves none of them.

    fresh: each starts Python anew, some seconds, as whatever uses CUDA must.
    """

    def __init__(self, count: int, *, fresh: bool = False) -> None:
        context = multiprocessing.get_context("spawn") if fresh else _context
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(Seat(rank, there),), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        pid: int = self._processes[rank].pid
        return pid

    def is_alive(self, rank: int) -> bool:
        """Whether the process of a rank has not ended."""
        return bool(self._processes[rank].is_alive())

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.pid(rank), number)

    def stop(self, rank: int, limit_s: float = LIMIT_S) -> None:
        """SIGSTOP; returns when no thread of the rank runs any more."""
        self.signal(rank, signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid(rank)}/task")
        deadline = time.monotonic() + limit_s
        while any(_state(thread / "stat") != "T" for thread in threads.iterdir()):
            if time.monotonic() > deadline:
                raise RankDied(f"rank {rank} (pid {self.pid(rank)}) did not stop in time")
            time.sleep(1e-3)

    def start(
        self, function: Callable[..., Any], *args: Any, on: Iterable[int] | None = None
    ) -> None:
        """Have ranks (all, or those named) call function(seat, *args); finish() waits for them."""
        for rank in range(len(self)) if on is None else on:
            self._pipes[rank].send((function, args))

    def hear(self, rank: int, limit_s: float = LIMIT_S) -> Any:
        """What the rank said next with Seat.tell()."""
        kind, what = self._receive(rank, time.monotonic() + limit_s)
        if kind != "said":
            raise RankDied(
                f"rank {rank} ended its call and said nothing: {what.trace or what.value}"
            )
        return what

    def send(self, rank: int, what: Any) -> None:
        """Give a rank something to take from `seat.pipe.recv()` within its call."""
        self._pipes[rank].send(what)

    def let_go(self) -> None:
        """Wait until all ranks are in Seat.wait_for_all(), and let them go on."""
        assert [self.hear(rank) for rank in range(len(self))] == ["here"] * len(self)
        for rank in range(len(self)):
            self.send(rank, "go")

    def finish(self, on: Iterable[int] | None = None, limit_s: float = LIMIT_S) -> list[Outcome]:
        """Wait until the ranks have ended their calls; what they said unheard is dropped."""
        deadline = time.monotonic() + limit_s
        outcomes = []
        for rank in range(len(self)) if on is None else on:
            kind, what = "said", None
            while kind == "said":
                kind, what = self._receive(rank, deadline)
            assert isinstance(what, Outcome)
            outcomes.append(what)
        return outcomes

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        on: Sequence[int] | None = None,
        limit_s: float = LIMIT_S,
    ) -> list[Outcome]:
        """start() and finish(): how function(seat, *args) ended on each rank."""
        self.start(function, *args, on=on)
        return self.finish(on, limit_s)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        on: Sequence[int] | None = None,
        limit_s: float = LIMIT_S,
    ) -> list[Any]:
        """The values of function(seat, *args) by rank; raises the first error, with its trace."""
        outcomes = self.outcomes(function, *args, on=on, limit_s=limit_s)
        for outcome in outcomes:
            if outcome.error is not None:
                raise AssertionError(f"a rank failed:\n{outcome.trace}") from outcome.error
        return [outcome.value for outcome in outcomes]

    def end(self, rank: int) -> int | None:
        """The exit code of a rank that is asked to end; None where it does not in time."""
        self._pipes[rank].send(None)
        self._processes[rank].join(LIMIT_S)
        code: int | None = self._processes[rank].exitcode
        return code

    def close(self) -> None:
        """End all ranks: politely, then not."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def _receive(self, rank: int, deadline: float) -> tuple[str, Any]:
        process, pipe = self._processes[rank], self._pipes[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            process.kill()
            raise RankDied(f"rank {rank} (pid {process.pid}) did not answer in time and was ended")
        try:
            return pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            process.join(5)
            raise RankDied(
                f"rank {rank} (pid {process.pid}) ended: exit code {process.exitcode}"
            ) from None


def until_asleep(pid: int) -> None:
    """Return when a process sleeps, and still does some time slices later: it waits in its call."""
    in_a_row = 0
    while in_a_row < 5:
        in_a_row = in_a_row + 1 if _state(Path(f"/proc/{pid}/stat")) == "S" else 0
        time.sleep(2e-3)


def _state(stat: Path) -> str:
    """The letter behind the name of a thread, which may have blanks and brackets."""
    return stat.read_text().rpartition(")")[2].split()[0]


def _portable(error: BaseException) -> BaseException:
    """The error, or its name and line where its class does not travel, as pytest's do not."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _serve(seat: Seat) -> None:
    """The loop of a rank's process."""
    gc.freeze()  # what the fork server had loaded
    faulthandler.enable()
    # A shell lets its background jobs ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            order = seat.pipe.recv()
        except EOFError:
            return
        if order is None:
            break
        function, args = order
        begin = time.monotonic()
        try:
            outcome = Outcome(value=function(seat, *args), seconds=time.monotonic() - begin)
        except BaseException as error:
            outcome = Outcome(
                error=_portable(error),
                trace=traceback.format_exc(),
                seconds=time.monotonic() - begin,
            )
        seat.pipe.send(("ended", outcome))
    for comm in seat.kept.values():
        if isinstance(comm, Comm):
            comm.close()
