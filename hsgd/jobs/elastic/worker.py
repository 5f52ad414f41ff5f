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

from hsgd.errors import LaunchError
from hsgd.jobs.elastic.world_order import Candidate, Seat
from hsgd.jobs.environment.agent_link import FD
from hsgd.jobs.environment.launcher_variables import AGENT_ROUND

__all__ = ["Standing", "Worker", "describe_end"]

_LONGEST_LINE = 1 << 20
_REAP_S = 10.0
# Of a job that this one was started in.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", AGENT_ROUND),
    "TORCHELASTIC_RESTART_COUNT",
)


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
    """

    def __init__(self, slot: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.slot = slot
        self.standing = Standing.STARTING
        self.world, self.rank, self.held = 0, -1, 0
        self.line, other = socket.socketpair()
        with other:
            inode = os.fstat(other.fileno()).st_ino
            given = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
            given |= {**environment, FD: f"{other.fileno()}:{inode}"}
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
        try:
            self.ending = os.pidfd_open(self.process.pid)
        except OSError as error:
            self.process.kill()
            self.process.wait()
            raise LaunchError(f"a rank cannot be watched: pidfd_open: {error.strerror}") from None
        self._unread = b""
        self.is_given_up = False
        self.is_silent = False  # has closed its end of the line

    def messages(self) -> list[dict[str, Any]]:
        """What the worker has said since; local, not blocking."""
        with contextlib.suppress(OSError):
            while received := self.line.recv(1 << 16):
                self._unread += received
            self.is_silent = True
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > _LONGEST_LINE:
            self._unread = b""
        return [json.loads(line) for line in lines]

    def give(self, number: int, seat: Seat, environment: Mapping[str, str]) -> None:
        """Its place in a world; local."""
        self.standing, self.world, self.rank = Standing.IN_WORLD, number, seat.rank
        self._say({"round": number, "environment": dict(environment)})

    def tell_broken(self) -> None:
        """That its world is broken: what waits in it is to end; local."""
        self._say({"broken": self.world})

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
        """Take notice that the process has ended, end what it started (gently after exit code 0),
        and return its exit code, negative for a signal; blocking for ten seconds at most."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        well = ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
        # While the process still has its number.
        self.signal(signal.SIGTERM if well else signal.SIGKILL)
        try:
            code = self.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # the kernel does not let it go, as on a hung file system
            code = -signal.SIGKILL
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
