"""One case, run: ranks are started, the fault happens, and all that is seen is written down.

Owns the folder of the case and its deadlines. Whoever outlives them is ended. Never judges.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from campaigns.chaos.cases import FAULTS, LINK_STATES, TIMEOUT_S, Case
from campaigns.chaos.layers import LAYERS
from campaigns.chaos.starter import Starter, StarterError
from toolkit.cluster import ClusterError
from toolkit.shared_files import orphaned_files, shared_files

__all__ = ["Observed", "RankSeen", "run_case"]

SETUP_S, STEPS_S = 30.0, 40.0  # longest that a job may take without any fault
END_S = 3 * TIMEOUT_S + 6.0  # from a fault to the end of all ranks but the victim
WAKE_S = 2 * TIMEOUT_S + 4.0  # from SIGCONT to the end of a victim that was stopped
_SIGNALS = {
    "kill": signal.SIGKILL,
    "abort": signal.SIGABRT,
    "interrupt": signal.SIGINT,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
}


@dataclass
class RankSeen:
    """What was seen of a rank. Times are those of time.monotonic(); 0 is never."""

    pid: int
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: int | None = None  # of waitpid
    overdue: bool = False  # it had not ended when it had to, and was ended
    ended_at: float = 0.0
    steps: int = 0
    output: str = ""

    @property
    def error(self) -> dict[str, Any] | None:
        """What its program raised."""
        return self.told.get("error")


@dataclass
class Observed:
    """A case that was run."""

    case: Case
    ranks: list[RankSeen]
    fault_at: float = 0.0
    woken_at: float = 0.0
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def took_place(self) -> bool:
        """Whether the fault hit a process that lived."""
        return self.fault_at > 0


def run_case(case: Case, starter: Starter) -> Observed:
    """Run it; blocking, at most some SETUP_S + STEPS_S + END_S. Raises StarterError."""
    with tempfile.TemporaryDirectory(prefix="hsgd-chaos-") as folder:
        begin, before = time.monotonic(), shared_files()
        job = _Job(case, starter, Path(folder))
        try:
            job.start()
            job.watch()
        finally:
            job.close()
        seen = job.seen()
        seen.left = _left_by(starter, before)
        seen.seconds = time.monotonic() - begin
        return seen


class _Job:
    def __init__(self, case: Case, starter: Starter, folder: Path) -> None:
        self._case, self._starter, self._folder = case, starter, folder
        self._layer = LAYERS[case.layer]
        self._ranks: list[RankSeen] = []
        self._lines: dict[int, tuple[socket.socket, bytearray, list[int]]] = {}
        self._fault_due = self._fault_at = self._woken_at = 0.0
        self._link_state = "up"
        self._events = selectors.DefaultSelector()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    # --- start and end ---

    def start(self) -> None:
        self._door.bind(str(self._folder / "controller"))
        self._door.listen(len(self._case.nodes))
        self._events.register(self._door, selectors.EVENT_READ, self._welcome)
        self._events.register(self._starter, selectors.EVENT_READ, self._note_ends)
        (self._folder / "steps").write_bytes(bytes(8 * len(self._case.nodes)))
        order = {
            "program": self._layer.program,
            "nodes": self._case.nodes,
            "number": self._case.number,
            "steps": self._layer.steps,
            "timeout_s": TIMEOUT_S,
            "folder": str(self._folder),
            "secret": secrets.token_hex(16),
            "cores": self._case.cores,
            "store": self._starter.store,
            "under": self._case.under,
            "launch": self._launch(),
            "has_setup": self._layer.has_setup,
        }
        self._begin = time.monotonic()
        numbers = self._starter.start(
            [
                {**order, "rank": rank, "is_victim": rank == self._case.victim}
                for rank in range(len(self._case.nodes))
            ]
        )
        self._ranks += [RankSeen(number) for number in numbers]
        self._victim = self._ranks[self._case.victim]
        if self._case.phase == "setup":
            self._fault_due = time.monotonic() + self._case.delay_s

    def _launch(self) -> dict[str, Any] | None:
        if self._layer.launch is None:
            return None
        from hsgd.jobs.launch import preload

        return {**asdict(self._layer.launch), "library": str(preload.library())}

    def close(self) -> None:
        """End who is left."""
        if self._link_state != "up":
            self._set_link("up")
        for rank in self._alive():
            self._starter.send(rank.pid, signal.SIGCONT)
            self._starter.send(rank.pid, signal.SIGUSR1)  # its stacks go to its output
        time.sleep(0.2 if self._alive() else 0.0)
        for rank in self._alive():
            self._starter.send(rank.pid, signal.SIGKILL)
        limit = time.monotonic() + 10
        while any(not rank.ended_at for rank in self._ranks) and time.monotonic() < limit:
            self._note_ends(self._starter)
            for key, _ in self._events.select(0.1):
                key.data(key.fileobj)
        for line, _, _ in self._lines.values():
            line.close()
        self._door.close()
        self._events.close()

    def seen(self) -> Observed:
        counts = memoryview((self._folder / "steps").read_bytes()).cast("q")
        for rank, (seen, steps) in enumerate(zip(self._ranks, counts, strict=True)):
            seen.steps = steps
            with contextlib.suppress(OSError):
                seen.output = (self._folder / f"output-{rank}").read_text(errors="replace")[-4000:]
        return Observed(self._case, self._ranks, self._fault_at, self._woken_at)

    # --- while it runs ---

    def watch(self) -> None:
        """Until all have ended, or may not take any longer."""
        while self._alive():
            now = time.monotonic()
            self._note_ends(self._starter)  # perhaps heard of already, beside an answer
            if self._due(now):
                self._strike()
            self._wake(now)
            if now > self._limit():
                for rank in self._alive():
                    rank.overdue = True
                return
            for key, _ in self._events.select(self._patience(now)):
                key.data(key.fileobj)

    def _alive(self) -> list[RankSeen]:
        return [rank for rank in self._ranks if not rank.ended_at]

    def _due(self, now: float) -> bool:
        return not self._fault_at and 0 < self._fault_due <= now

    def _limit(self) -> float:
        if self._case.fault == "gil" and self._alive() == [self._victim] and self._fault_at:
            return 0.0  # it never ends by itself
        if not self._fault_at:
            return self._begin + SETUP_S + STEPS_S
        if FAULTS[self._case.fault].hangs and self._woken_at:
            return self._woken_at + WAKE_S
        fault = FAULTS[self._case.fault]
        steps_s = 0.0 if fault.ends or fault.cuts else STEPS_S
        return self._fault_at + END_S + steps_s

    def _patience(self, now: float) -> float:
        times = [now + 0.25]
        if not self._fault_at and self._fault_due:
            times.append(self._fault_due)
        if self._case.fault in ("pause", "slow") and self._fault_at and not self._woken_at:
            times.append(self._fault_at + self._case.pause_s)
        return max(0.0, min(times) - now)

    def _strike(self) -> None:
        self._fault_due = 0.0
        if self._victim.ended_at or "done" in self._victim.told or self._victim.error:
            return
        fault = self._case.fault
        at = time.monotonic()
        try:
            if fault in _SIGNALS:
                if not self._starter.send(self._victim.pid, _SIGNALS[fault]):
                    return
            elif fault in LINK_STATES:
                self._set_link(LINK_STATES[fault])
            elif (line := self._line_of(self._case.victim)) is not None:
                line.sendall(fault.encode())
            else:
                self._fault_due = at + 1e-3  # it has not come so far
                return
        except OSError:
            return
        self._fault_at = at

    def _wake(self, now: float) -> None:
        if self._woken_at or not self._fault_at:
            return
        fault = self._case.fault
        over = fault in ("pause", "slow") and now >= self._fault_at + self._case.pause_s
        alone = fault == "stop" and self._alive() == [self._victim]
        if not over and not alone:
            return
        if fault == "slow":
            self._set_link("up")
        else:
            self._starter.send(self._victim.pid, signal.SIGCONT)
        self._woken_at = now

    def _set_link(self, state: str) -> None:
        """Of the victim's node."""
        try:
            self._starter.set_link(self._case.nodes[self._case.victim], state)
        except ClusterError as error:
            raise StarterError(str(error)) from error
        self._link_state = state

    # --- what is heard ---

    def _line_of(self, rank: int) -> socket.socket | None:
        return next((line for line, _, of in self._lines.values() if of == [rank]), None)

    def _welcome(self, door: socket.socket) -> None:
        line, _ = door.accept()
        self._lines[line.fileno()] = (line, bytearray(), [])
        self._events.register(line, selectors.EVENT_READ, self._hear)

    def _hear(self, line: socket.socket) -> None:
        try:
            text = line.recv(1 << 16)
        except ConnectionError:
            text = b""
        if not text:
            self._events.unregister(line)
            return
        _, rest, of = self._lines[line.fileno()]
        rest += text
        while b"\n" in rest:
            part, _, after = bytes(rest).partition(b"\n")
            rest[:] = after
            self._note(json.loads(part), of)

    def _note(self, told: dict[str, Any], of: list[int]) -> None:
        if told["what"] == "here":
            of.append(told["rank"])
        self._ranks[of[0]].told[told["what"]] = told
        all_ready = all("ready" in rank.told for rank in self._ranks)
        if self._fault_at or self._fault_due:
            return
        if self._case.phase == "work" and told["what"] == "ready" and all_ready:
            self._fault_due = time.monotonic() + self._case.delay_s
        if self._case.phase == "end" and told["what"] == "ending" and of[0] == self._case.victim:
            self._fault_due = time.monotonic() + self._case.delay_s

    def _note_ends(self, starter: Starter) -> None:
        while (ended := starter.ended()) is not None:
            for rank in self._ranks:
                if rank.pid == ended[0]:
                    rank.status, rank.ended_at = ended[1], time.monotonic()


# --- what is left ---


def _left_by(starter: Starter, before: set[str]) -> list[str]:
    """What remains when all that the ranks started has had its time."""
    limit = time.monotonic() + starter.leaving_s
    while (left := starter.left()) and time.monotonic() < limit:
        time.sleep(0.02)
    starter.end_case()
    return [*left, *(f"/dev/shm/{name}" for name in orphaned_files(before, 1.0))]
