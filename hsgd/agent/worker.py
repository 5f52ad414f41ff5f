"""One worker of an agent: its process, the line to it, and where it stands.

Owns the start and the end of the process and of what it started itself. What to do next is the
agent's to say.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from hsgd.agent.world_order import Candidate, Seat
from hsgd.errors import LaunchError
from hsgd.job.agent_link import FD

__all__ = ["Standing", "Worker", "describe_end"]

_LONGEST_LINE = 1 << 20


class Standing(enum.Enum):
    """Of a worker."""

    STARTING = "starting"  # has not asked for a world yet
    READY = "ready"  # waits for one
    IN_WORLD = "in world"
    LEFT = "left"  # has left its world, and will ask for the next one
    ENDED = "ended"


class Worker:
    """A process of the user's command.

    slot: its place on the node. world, rank: of the last world that it was in, 0 and -1 before.
    failed_in: the world that it left by an error, 0: none.
    """

    def __init__(self, slot: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.slot = slot
        self.standing = Standing.STARTING
        self.world, self.rank, self.held, self.failed_in = 0, -1, 0, 0
        self.line, other = socket.socketpair()
        with other:
            inode = os.fstat(other.fileno()).st_ino
            given = {**os.environ, **environment, FD: f"{other.fileno()}:{inode}"}
            try:
                self.process = subprocess.Popen(
                    list(command),
                    env=given,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    start_new_session=True,  # its children end with it
                )
            except OSError as error:
                self.line.close()
                raise LaunchError(f"{command[0]} does not start: {error.strerror}") from None
        self.line.setblocking(False)
        self.ending = os.pidfd_open(self.process.pid)
        self._unread = b""

    def messages(self) -> list[dict[str, Any]]:
        """What the worker has said since; local, not blocking."""
        with contextlib.suppress(OSError):
            while received := self.line.recv(1 << 16):
                self._unread += received
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > _LONGEST_LINE:
            self._unread = b""
        return [json.loads(line) for line in lines]

    def give(self, number: int, seat: Seat, environment: Mapping[str, str]) -> None:
        """Its place in a world; local."""
        self.standing, self.world, self.rank = Standing.IN_WORLD, number, seat.rank
        self._say({"round": number, "environment": dict(environment)})

    def tell_update(self) -> None:
        """That ranks wait to join its world; local."""
        self._say({"update": self.world})

    def candidate(self) -> Candidate:
        """For the next world."""
        return Candidate(self.slot, self.held, self.rank)

    def signal(self, number: int) -> None:
        """To the process and its children; local."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def finish(self) -> int:
        """Take notice that the process has ended, end what it started, and return its exit code,
        negative for a signal; local."""
        self.signal(signal.SIGKILL)  # while the process still has its number
        code = self.process.wait()
        self.standing = Standing.ENDED
        self.line.close()
        os.close(self.ending)
        return code

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has just ended, and its pidfd will say so
            self.line.sendall(json.dumps(message).encode() + b"\n")


def describe_end(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
