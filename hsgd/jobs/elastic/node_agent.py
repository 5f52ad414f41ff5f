"""The agent of a node: keeps its workers in worlds, from the start of the job to its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hsgd.base.call_in_thread import call_in_thread
from hsgd.errors import LaunchError
from hsgd.jobs.elastic.job_events import JobEvents
from hsgd.jobs.elastic.node_rounds import Rounds
from hsgd.jobs.elastic.slots import PASSED_ON, Slots, save_limit_s
from hsgd.jobs.elastic.worker import Standing, Worker, describe_end
from hsgd.jobs.elastic.world_order import NodeRow, arrange, least_ranks, lost_state, staying
from hsgd.jobs.stores.sealed_store import ForeignValue

__all__ = ["AgentOptions", "NodeAgent", "say"]

_LOOK_S = 0.2  # between polls of other agents' events
_ASK_S = 1.0  # between polls of the rendezvous, whose answer lists all nodes
_END_S = 5.0  # for workers that were asked to end
_LEAVE_S = 1.5  # for workers that notice a broken world themselves
_ABORT_S = 1.0  # for workers that got this message and may wait for a late rank
_ROUND_THREAD = "hsgd-agent-round"


@dataclass(frozen=True)
class AgentOptions:
    """Options of a job, the same on all nodes, except `node`, `host` and `slots`.

    Attributes:
        ranks: number that the first world waits for, `start_s` at most.
        grace_s: time for ranks of a broken world to leave it.
        limit_s: time until `min_ranks` must be there again.
        keep_alive_s: between keep-alives of nodes.
        most_resets: worlds after the first; None is any number.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    node: str
    host: str
    slots: int
    ranks: int
    min_ranks: int
    max_ranks: int
    start_s: float
    grace_s: float
    limit_s: float
    keep_alive_s: int
    most_resets: int | None = None


class NodeAgent:
    """The agent of a node; `store` is a TCPStore of its own, `rounds` forms the worlds' nodes."""

    def __init__(self, options: AgentOptions, store: Any, rounds: Rounds) -> None:
        self._options, self._rounds = options, rounds
        self._events = JobEvents(store)
        self._slots = Slots(options.slots, options.command, options.environment)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._forming: Future[tuple[int, list[NodeRow], int]] | None = None
        self._others_wait: Future[bool] | None = None
        self._world = 0
        self._nodes: list[str] = []
        self._broken_s: float | None = None  # since when
        self._short_s: float | None = time.monotonic()  # since when too few ranks
        self._update = False
        self._can_go = False  # the others are enough
        self._is_seated = False
        self._finished = False
        self._failures: list[str] = []  # of ranks of this world
        self._failed = ""
        self._begun_s, self._patient = time.monotonic(), True
        self._stop, self._passed_on, self._may_save = 0, 0, False
        self._inputs: int | None = None
        self._drained = False
        self._next_look_s = self._next_ask_s = 0.0
        self._members: list[str] = []  # nodes of the world, also those without ranks
        self._left_s: float | None = None  # since when ranks leave it
        self._told_broken_s: float | None = None
        self._candidates: dict[int, Worker] = {}

    def end(self, number: int) -> None:
        """End all workers and the agent, as after this signal; from a signal handler.

        After a second one workers get no more time to save.
        """
        self._may_save = number == signal.SIGTERM and not self._stop
        self._stop = number
        os.write(self._woken, b"e")

    def pass_on(self, number: int) -> None:
        """Tell workers that call hsgd.preempted() of this signal; from a signal handler, too."""
        self._passed_on = number
        self._slots.tell_preempted(number)

    def run(self, inputs: int | None = None) -> int:
        """Run until the job is over here; blocking, in the main thread.

        Args:
            inputs: a descriptor whose end ends the agent. The word "drain" makes it release its
                workers at a commit; "stay" revokes that. "SIGTERM" ends it, as the signal does;
                those in PASSED_ON go to the workers.

        Returns:
            The exit code: 0 done, 1 the job failed, 128 + N after signal N.
        """
        self._inputs = inputs
        if inputs is not None:
            self._selector.register(inputs, selectors.EVENT_READ)
        try:
            while True:
                self._start_workers()
                for key, _ in self._selector.select(_LOOK_S):
                    self._hear(key)
                self._look()
                self._form()
                code = self._over()
                if code is not None:
                    return code
        except ForeignValue as error:
            with contextlib.suppress(RuntimeError):  # the store may hold the foreign value
                self._events.tell_failed(str(error))
            say(f"error: {error}")
            return 1
        except LaunchError as error:
            self._give_up(str(error))
            return 1
        except RuntimeError as error:  # torch's error for a store that is gone
            say(f"error: the job's store cannot be reached: {str(error).splitlines()[0]}")
            return 1
        finally:
            self._end_workers(self._slots.workers)
            self._selector.close()

    def _start_workers(self) -> None:
        if self._finished or self._failed or self._stop or self._drained:
            return
        for worker in self._slots.fill():
            self._selector.register(worker.line, selectors.EVENT_READ, worker)
            self._selector.register(worker.ending, selectors.EVENT_READ, worker)

    def _hear(self, key: selectors.SelectorKey) -> None:
        worker: Worker | None = key.data
        if worker is None and key.fd == self._inputs:
            received = os.read(key.fd, 4096)
            if not received:
                self._stop = self._stop or signal.SIGTERM
                self._selector.unregister(key.fd)
            for word in received.decode().split():
                if word.startswith("SIG"):
                    (self.pass_on if word in PASSED_ON else self.end)(signal.Signals[word])
                    continue
                self._drained = word == "drain"
                if self._drained:
                    self._events.tell_update(self._world)
        elif worker is None:
            os.read(key.fd, 4096)
        elif worker.standing is not Standing.ENDED:
            for message in worker.messages():
                self._told(worker, message)
            if key.fd == worker.ending:
                self._ended(worker)
            elif worker.is_silent and worker.line in self._selector.get_map():
                self._selector.unregister(worker.line)

    def _told(self, worker: Worker, message: Mapping[str, Any]) -> None:
        if "watches" in message:
            worker.watches = True
            if self._passed_on:
                worker.tell_preempted(self._passed_on)
        if "held" in message:
            worker.held = max(worker.held, message["held"])
            self._events.tell_held()
        if "ready" in message:
            worker.standing = Standing.READY
            if self._world and not self._broken_s and worker.world < self._world:
                self._ask_for_update()
        elif "left" in message:
            worker.standing = Standing.LEFT
            if self._left_s is None and message["left"] == self._world:
                self._left_s = time.monotonic()
                self._events.tell_left(self._world)
            if message["failed"] and message["left"] == self._world:
                if message["late"] >= 0:
                    self._events.tell_late(self._world, message["late"])
                self._broke(message["late"], message["text"])

    def _ended(self, worker: Worker) -> None:
        was, rank = worker.standing, worker.rank
        code = self._take_leave(worker)
        if self._failed or self._stop:
            return
        name = f"rank {rank} ({worker.process.pid} on {self._options.host})"
        if was is Standing.STARTING and rank < 0:
            name = f"a new rank ({worker.process.pid} on {self._options.host})"
        if code == 0:
            self._finished = True
            self._events.tell_finished()
            return
        text = f"{name} {describe_end(code)}"
        if was in (Standing.IN_WORLD, Standing.LEFT) and worker.world == self._world:
            self._failures.append(text)
            self._broke(rank, text)
            if not self._is_finished():
                say(text)
        elif self._world == 0 and code > 0 and not self._events.begun():
            self._fail(f"{text} before the job had begun")
        else:
            say(text)

    def _broke(self, rank: int, text: str) -> None:
        if self._broken_s is None:
            self._broken_s = time.monotonic()
            self._events.tell_broken(self._world, rank, text)

    def _ask_for_update(self) -> None:
        if not self._update:
            self._events.tell_update(self._world)
            self._updated()

    def _updated(self) -> None:
        self._update = True
        for worker in self._slots.standing(Standing.IN_WORLD):
            worker.tell_update()

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        if self._events.changed():
            self._look_at_events()
        self._look_at_nodes(now)
        since = [each for each in (self._broken_s, self._left_s) if each is not None]
        if since and not self._is_finished():
            self._end_late(now, now - min(since))
        if self._short_s is not None and self._patient and not self._is_patient():
            self._patient = False
            self._ask_for_update()
        if self._drained and self._can_go and not self._update:
            self._ask_for_update()
        if self._world == 0 and self._events.begun():
            self._short_s = None  # the others' next commit may take long
        if self._short_s is not None and now - self._short_s > self._options.limit_s:
            self._fail(
                f"fewer than {self._options.min_ranks} ranks for {self._options.limit_s:g} s "
                "(--elastic-timeout)"
            )

    def _look_at_events(self) -> None:
        if text := self._events.failed():
            self._failed = self._failed or text
        if self._world == 0:
            return
        if self._broken_s is None:
            lost = self._events.lost().intersection(self._nodes)
            if lost:
                self._broke(-1, f"host {min(lost).partition('/')[0]} was lost")
            elif self._events.broken(self._world):
                self._broken_s = time.monotonic()
        if not self._update and self._events.update(self._world):
            self._updated()
        if self._left_s is None and self._events.left(self._world):
            self._left_s = time.monotonic()

    def _look_at_nodes(self, now: float) -> None:
        """Check whether nodes wait to join: one agent of a world asks, in a thread."""
        if self._forming is not None or self._world == 0 or self._update:
            return
        if self._others_wait is None and now >= self._next_ask_s:
            self._next_ask_s = now + _ASK_S
            ended = self._events.ended()
            if next(node for node in self._members if node not in ended) == self._options.node:
                self._others_wait = call_in_thread(_ROUND_THREAD, self._rounds.others_wait)
        elif self._others_wait is not None and self._others_wait.done():
            if self._others_wait.result():
                self._ask_for_update()
            self._others_wait = None

    def _end_late(self, now: float, since_s: float) -> None:
        """Kill ranks that do not leave a broken world, or one that others leave."""
        there = [
            worker
            for worker in self._slots.standing(Standing.IN_WORLD, Standing.LEFT)
            if not worker.is_given_up
        ]
        late: list[int] = []
        if there and self._broken_s is not None and since_s > _LEAVE_S:
            if self._told_broken_s is None:  # its waiting calls would last until their deadlines
                self._told_broken_s = now
                for worker in there:
                    worker.tell_broken()
            elif now - self._told_broken_s > _ABORT_S:
                late = self._events.late(self._world)
        for worker in there:
            if worker.rank in late or since_s > self._options.grace_s:
                worker.is_given_up = True
                say(f"rank {worker.rank} did not leave the old world in time, and is killed")
                worker.signal(signal.SIGKILL)

    # --- worlds ---

    def _form(self) -> None:
        """Begin to form the next world if it is time, or enter the one that has formed."""
        if self._forming is not None:
            if self._forming.done():
                number, rows, index = self._forming.result()
                self._forming = None
                self._enter(number, rows, index)
        elif self._is_time() and not self._failed and not self._stop:
            if self._others_wait is not None and not self._others_wait.done():
                return  # one at a time
            ready = self._slots.standing(Standing.READY)
            self._candidates = {worker.slot: worker for worker in ready}
            candidates = tuple(worker.candidate() for worker in ready)
            row = NodeRow(
                self._options.node,
                self._events.begun(),
                self._events.held(),
                self._is_patient(),
                self._drained,
                candidates,
            )
            self._forming = call_in_thread(_ROUND_THREAD, self._rounds.next, row)
            self._forming.add_done_callback(lambda _: os.write(self._woken, b"f"))

    def _is_patient(self) -> bool:
        return time.monotonic() - self._begun_s < self._options.start_s

    def _is_time(self) -> bool:
        starting = self._slots.standing(Standing.STARTING)
        if self._world == 0:
            ready = bool(self._slots.standing(Standing.READY))
            return ready and not (starting and self._is_patient()) and not self._is_finished()
        if self._broken_s is None and not self._update:
            return False
        if self._slots.standing(Standing.IN_WORLD, Standing.LEFT):
            return False
        return bool(self._survivors()) or not self._is_finished()

    def _enter(self, number: int, rows: Sequence[NodeRow], index: int) -> None:
        before_s = self._broken_s
        self._world, self._left_s = number, None
        self._nodes = self._members = [row.node for row in rows]
        failures, self._failures = self._failures, []
        self._broken_s, self._update, self._others_wait = None, False, None
        self._told_broken_s = None
        if self._is_finished() and all(one.rank < 0 for row in rows for one in row.candidates):
            return  # the others have finished meanwhile
        if lost_state(rows):
            self._failures = failures
            self._fail("no rank is left that had the state of the training")
            return
        needed = least_ranks(rows, self._options.min_ranks, self._options.ranks)
        seats = arrange(staying(rows, needed), self._options.max_ranks)
        size = sum(len(own) for own in seats)
        stay = [own for row, own in zip(rows, seats, strict=True) if not row.leaving]
        others = sum(len(row.candidates) for row in rows if not row.leaving)
        self._can_go = others >= needed and any(stay)
        if size < needed:
            self._short_s = self._short_s or time.monotonic()
            if any(seat.rank == 0 for seat in seats[index].values()):
                say(f"{_count(size, 'rank')} of {needed}: waiting for more")
            more = len(self._slots.standing(Standing.READY)) > len(rows[index].candidates)
        else:
            self._short_s = None
            self._nodes = [row.node for row, own in zip(rows, seats, strict=True) if own]
            self._give(number, seats, index, size, before_s)
            more = bool(self._slots.standing(Standing.READY)) and size < self._options.max_ranks
        if self._drained and not seats[index] and size >= needed:
            self._end_workers(self._slots.workers)
        elif more and not self._drained:  # ready since this world began to form
            self._ask_for_update()
        self._look_at_events()  # others may have entered it before

    def _give(
        self, number: int, seats: Sequence[Any], index: int, size: int, broken_s: float | None
    ) -> None:
        if seats[index] and not self._is_seated:
            self._is_seated = True
            self._events.tell_seated(self._options.node)
        for slot, seat in seats[index].items():
            worker = self._candidates[slot]
            if worker.standing is not Standing.READY:
                self._broke(seat.rank, f"rank {seat.rank} ended before world {number} began")
                continue
            worker.give(number, seat, seat.variables(number, size))
            if seat.rank != 0:
                continue
            limit, resets = self._options.most_resets, self._events.tell_begun() - 1
            if limit is not None and resets > limit:
                self._fail(f"the set of ranks changed more than {limit} times (--reset-limit)")
            elif number > 1:
                nodes = sum(1 for own in seats if own)
                after = "" if broken_s is None else f", {time.monotonic() - broken_s:.1f} s later"
                say(f"world {number}: {_count(size, 'rank')} on {_count(nodes, 'node')}{after}")

    # --- the end ---

    def _survivors(self) -> list[Worker]:
        return [worker for worker in self._slots.standing(Standing.READY) if worker.world]

    def _is_finished(self) -> bool:
        return self._finished or self._events.finished()

    def _over(self) -> int | None:
        """Return the agent's exit code if the job is over here, else None."""
        if self._stop:
            return 128 + self._stop
        if self._failed:
            return 1
        busy = self._slots.standing(Standing.IN_WORLD, Standing.LEFT)
        gone = self._drained and not busy and self._forming is None
        if gone and (not self._slots.workers or self._is_finished()):
            return 0
        if busy or self._survivors():
            return None
        if self._is_finished():
            for text in self._failures:
                say(f"{text}, when others had finished")
            return 1 if self._failures else 0
        if self._forming is None and self._slots.exhausted:
            self._give_up(f"no rank stays alive on {self._options.host}")
            return 1
        return None

    def _give_up(self, text: str) -> None:
        """Give up this node, if the job continues without it, else the job."""
        others = set(self._nodes) - {self._options.node}
        if self._events.begun() and (others or self._world == 0):
            say(f"error: {text}")
            self._failed = text
        else:
            self._fail(text)

    def _fail(self, text: str) -> None:
        if not self._failed:
            self._failed = text
            self._events.tell_failed(text)
            reasons = "".join(f"; {reason}" for reason in self._failures[:1])
            say(f"error: {text}{reasons}")

    def _end_workers(self, workers: Sequence[Worker]) -> None:
        """End workers by SIGTERM, and after a pause by SIGKILL.

        If the job got SIGTERM, those that call hsgd.preempted() are told, and may save until the
        inputs end.
        """
        saves = [each for each in workers if self._may_save and each.watches]
        if saves:
            self._slots.tell_preempted(signal.SIGTERM)
        others = [each for each in workers if each not in saves]
        for worker in others:
            worker.signal(signal.SIGTERM)
            worker.signal(signal.SIGCONT)
        begun = time.monotonic()
        for worker in [*others, *saves]:
            while worker.standing is not Standing.ENDED:
                limit_s = save_limit_s() if self._may_save and worker in saves else _END_S
                left = begun + limit_s - time.monotonic()
                with selectors.DefaultSelector() as ending:
                    ending.register(worker.ending, selectors.EVENT_READ)
                    if self._may_save and self._inputs is not None:
                        ending.register(self._inputs, selectors.EVENT_READ)
                    ready = {key.fd for key, _ in ending.select(max(min(left, _LOOK_S), 0.0))}
                if self._inputs is not None and self._inputs in ready:
                    self._may_save = os.read(self._inputs, 4096) != b""
                if worker.ending in ready or left <= 0:
                    self._take_leave(worker)

    def _take_leave(self, worker: Worker) -> int:
        """Release a worker that has ended, or end it; return its exit code."""
        for end in (worker.line, worker.ending):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        code = worker.finish()
        self._slots.empty(worker, code)
        return code


def say(text: str) -> None:
    """Write a line for people; local."""
    print(f"hsgd: {text}", file=sys.stderr, flush=True)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
