"""A worker's connection to the agent of its node, in jobs that `hsgd run --min-np` started.

It sets the environment of the worker, as torchrun does, whenever the agent assigns it a place in a
new world. It ends this process if its agent is gone. docs/elastic.md lists the messages.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from hsgd.errors import CollectiveTimeout, HsgdError, LaunchError
from hsgd.jobs.environment.launcher_variables import AGENT_ROUND

__all__ = ["FD", "AgentLink", "enter_world", "link"]

FD = "HSGD_AGENT_FD"


class AgentLink:
    """The connection to the agent; one per process."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._line = socket.socket(fileno=descriptor)
        self._owner = os.getpid()
        self._worlds: queue.Queue[dict[str, Any]] = queue.Queue()
        self._listener: Callable[[float], object] | None = None
        self._updated: float | None = None
        self._lock = threading.Lock()
        self.round = 0
        self._held = 0  # the last world in which this rank had the state of the training
        self._broken = 0  # the last broken world
        self._give_up: Callable[[], object] | None = None
        self._preempted: Callable[[str], object] = lambda name: None
        threading.Thread(target=self._listen, name="hsgd-agent-link", daemon=True).start()

    @property
    def is_own(self) -> bool:
        """False in a forked child, which is no worker."""
        return os.getpid() == self._owner

    def enter(self) -> None:
        """Wait for a place in the next world and set the environment; blocking. LaunchError."""
        self._say({"ready": self.round})
        world = self._worlds.get()
        with self._lock:
            self.round, self._updated = world["round"], None
        os.environ.update(world["environment"])
        os.environ[AGENT_ROUND] = str(self.round)

    def leave(self, error: BaseException | None, *, is_of_world: bool = True) -> None:
        """Report that this process makes no more calls in its world; local.

        The reason is `error`, or ranks that wait to join. enter() then gets the next world. Ranks
        in `error` are those of the world if `is_of_world`.
        """
        cause = error if isinstance(error, HsgdError) else getattr(error, "__cause__", None)
        is_late = is_of_world and isinstance(cause, CollectiveTimeout)
        late = getattr(cause, "rank", -1) if is_late else -1
        text = "" if error is None else str(error)
        self._say({"left": self.round, "failed": error is not None, "late": late, "text": text})
        os.environ.pop(AGENT_ROUND, None)

    def when_broken(self, give_up: Callable[[], object]) -> None:
        """Call `give_up` once this world is broken; local, in the link's thread or now."""
        with self._lock:
            self._give_up = give_up
            is_broken = self._broken == self.round
        if is_broken:
            give_up()

    def forget_world(self) -> None:
        """Drop the callback: no call waits in this world any more; local."""
        with self._lock:
            self._give_up = None

    @property
    def is_training(self) -> bool:
        """Whether this rank has had the state of the training since it entered its world."""
        return self._held == self.round > 0

    def hold(self) -> None:
        """Report that this process has the state of all ranks of its world; local."""
        self._held = self.round
        self._say({"held": self.round})

    def listen(self, listener: Callable[[float], object] | None) -> None:
        """Call `listener(round)`, also at once, if ranks wait to join; None removes it; local."""
        with self._lock:
            self._listener = listener
            updated = self._updated
        if updated is not None and listener is not None:
            listener(updated)

    def when_preempted(self, note: Callable[[str], object]) -> None:
        """Call `note` with the signal's name if the job gets one; local, in the link's thread."""
        self._preempted = note
        self._say({"watches": True})

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LaunchError(f"the agent of this node cannot be reached: {error}") from None

    def _listen(self) -> None:
        try:
            with contextlib.suppress(OSError), self._line.makefile("rb") as lines:
                for line in lines:
                    self._hear(json.loads(line))
        finally:
            self._end()

    def _end(self) -> None:
        """End this process and its children: a rank without an agent would wait forever."""
        print("hsgd: the agent of this node is gone: this rank ends", file=sys.stderr, flush=True)
        if os.getsid(0) == os.getpgrp():  # the group that the agent made
            with contextlib.suppress(OSError):
                os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    def _hear(self, message: dict[str, Any]) -> None:
        if "environment" in message:
            self._worlds.put(message)
            return
        if "preempted" in message:
            self._preempted(message["preempted"])
            return
        if "broken" in message:
            with self._lock:
                self._broken = message["broken"]
                give_up = self._give_up if self._broken == self.round else None
            if give_up is not None:
                give_up()
            return
        with self._lock:
            if message["update"] != self.round:
                return
            self._updated = updated = float(self.round)
            listener = self._listener
        if listener is not None:
            listener(updated)


@functools.cache
def link() -> AgentLink | None:
    """Return the connection to the agent, or None; LaunchError if it was closed; local."""
    text = os.environ.pop(FD, "")  # children are no workers
    if not text:
        return None
    number, _, inode = text.partition(":")
    try:
        is_there = os.fstat(int(number)).st_ino == int(inode)
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        raise LaunchError(
            "the connection to the agent of this node was closed before this rank began: start "
            "Python with `exec` in wrappers, and leave their inherited descriptors open"
        )
    return AgentLink(int(number))


def enter_world() -> None:
    """Wait for a worker's place in a world; LaunchError if the agent is gone; blocking."""
    agent = link()
    if agent is not None and agent.is_own and AGENT_ROUND not in os.environ:
        importlib.import_module("torch.distributed")  # slow; after enter() others would wait
        agent.enter()
