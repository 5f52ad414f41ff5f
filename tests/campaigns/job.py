"""Job: some ranks that run one program, from their start to the end of the last.

Owns the folder of the job and its deadlines. Whoever outlives them is ended. Never judges.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.zygotes import StarterError, Zygotes
from toolkit.shared_files import orphaned_files, shared_files

__all__ = ["Job", "RankSeen"]

_INIT_S = 60.0  # of MPI
_LOOK_S = 0.25  # between two looks at what is due


@dataclass
class RankSeen:
    """What was seen of a rank. Times are those of time.monotonic(); 0 is never."""

    number: int
    told: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last of each kind
    status: int | None = None  # of waitpid
    overdue: bool = False  # it had not ended when it had to, and was ended
    ended_at: float = 0.0
    steps: int = 0
    output: str = ""

    @property
    def error(self) -> dict[str, Any] | None:
        """What its program raised."""
        return self.told.get("error")


class Job:
    """Ranks of an order; run() is blocking and may raise StarterError.

    order: program and seat, as "chaos.core_programs:window"; nodes, by rank; meets: how ranks find
    one another ("path", "store" or "mpi"); needs_store; pretends: whether nodes are those of the
    order alone; fresh: whether ranks start Python anew; timeout_s; and what its seat needs.

    A campaign overrides what is heard, what is done, and the limit.
    """

    def __init__(self, starter: Zygotes, order: dict[str, Any]) -> None:
        self.starter, self.order = starter, order
        self.ranks: list[RankSeen] = []
        self.left: list[str] = []
        self.begin = time.monotonic()
        self.seconds = 0.0
        self._lines: dict[socket.socket, int] = {}  # ranks, by their connections
        self._events = selectors.DefaultSelector()

    # --- what a campaign overrides ---

    def started(self) -> None:
        """Note that all ranks were started."""

    def heard(self, rank: int, told: dict[str, Any]) -> None:
        """Note what a rank has said."""

    def act(self, now: float) -> float:
        """Do what is due; return the time of the next call, which may come sooner."""
        return now + _LOOK_S

    def limit(self) -> float:
        """Return the time at which ranks that have not ended are overdue."""
        raise NotImplementedError

    def gather(self, folder: Path) -> None:
        """Read what ranks left in the folder of the job."""
        for rank, seen in enumerate(self.ranks):
            with contextlib.suppress(OSError):
                seen.output = (folder / f"output-{rank}").read_text(errors="replace")[-4000:]

    # --- what it uses ---

    def alive(self) -> list[RankSeen]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if not rank.ended_at]

    def line_of(self, rank: int) -> socket.socket | None:
        """Return the connection of a rank that has said who it is."""
        return next((line for line, of in self._lines.items() if of == rank), None)

    # --- the run ---

    def run(self) -> None:
        """Run it to its end; at most until the limit, and some seconds."""
        self.begin, before = time.monotonic(), shared_files()
        with (
            tempfile.TemporaryDirectory(prefix="hsgd-campaign-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door,
            self._events,
        ):
            door.bind(f"{folder}/controller")
            door.listen(16)
            self._events.register(door, selectors.EVENT_READ, self._welcome)
            self._events.register(self.starter, selectors.EVENT_READ, self._note_ends)
            try:
                self._start(folder)
                self._watch()
                self.end_all()
                self.gather(Path(folder))
                self._note_what_is_left()
            finally:
                self.end_all()
                self.starter.end_job()
        self.left += [f"/dev/shm/{name}" for name in orphaned_files(before, 1.0)]
        self.seconds = time.monotonic() - self.begin

    def _start(self, folder: str) -> None:
        order = {
            "folder": folder,
            "secret": secrets.token_hex(16),
            "environment": {},
            "store": self.starter.store if self.order["needs_store"] else None,
            **self.order,
        }
        size = len(order["nodes"])
        numbers = self.starter.start([{**order, "rank": rank} for rank in range(size)])
        self.ranks = [RankSeen(number) for number in numbers]
        limit = time.monotonic() + _INIT_S
        while self.starter.inits_mpi and not all(rank.told for rank in self.ranks):
            if time.monotonic() > limit or len(self.alive()) < size:
                raise StarterError(f"ranks were not started: {self.starter.last_words()}")
            self._look(0.1)
        self.started()

    def _watch(self) -> None:
        while self.alive():
            self._note_ends(self.starter)  # perhaps heard of already, beside an answer
            now = time.monotonic()
            due = self.act(now)
            if now > self.limit():
                for rank in self.alive():
                    rank.overdue = True
                return
            self._look(min(due - now, _LOOK_S))

    def _look(self, patience_s: float) -> None:
        for key, _ in self._events.select(max(0.0, patience_s)):
            key.data(key.fileobj)

    def end_all(self) -> None:
        """End all ranks that have not ended, and hear their last words."""
        for rank in self.alive():
            self.starter.send(rank.number, signal.SIGCONT)
            self.starter.send(rank.number, signal.SIGUSR1)  # its stacks go to its output
        time.sleep(0.2 if self.alive() else 0.0)
        for rank in self.alive():
            self.starter.send(rank.number, signal.SIGKILL)
        limit = time.monotonic() + 10
        while self.alive() and time.monotonic() < limit:
            self._note_ends(self.starter)
            self._look(0.1)
        self._look(0.0)  # their last words
        for line in self._lines:
            line.close()
        self._lines.clear()

    def _note_what_is_left(self) -> None:
        """Give all that the ranks started its time to end, and write down what remains."""
        limit = time.monotonic() + self.starter.leaving_s
        while (left := self.starter.left()) and time.monotonic() < limit:
            time.sleep(0.02)
        self.left += left

    # --- what is heard ---

    def _welcome(self, door: socket.socket) -> None:
        line, _ = door.accept()
        self._lines[line] = -1
        self._events.register(line, selectors.EVENT_READ, self._hear)

    def _hear(self, line: socket.socket) -> None:
        try:
            while text := line.recv(1 << 16, socket.MSG_DONTWAIT):
                self._note(line, json.loads(text))
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        self._events.unregister(line)

    def _note(self, line: socket.socket, told: dict[str, Any]) -> None:
        if told["what"] == "here":
            self._lines[line] = told["rank"]
        rank = self._lines[line]
        self.ranks[rank].told[told["what"]] = told
        self.heard(rank, told)

    def _note_ends(self, starter: Zygotes) -> None:
        while (ended := starter.ended()) is not None:
            for rank in self.ranks:
                if rank.number == ended[0]:
                    rank.status, rank.ended_at = ended[1], time.monotonic()
