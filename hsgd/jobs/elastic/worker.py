"""One worker of an agent: its process, the connection to it, and its standing."""

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
# Variables of a job in which this one was started.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", AGENT_ROUND),
    "TORCHELASTIC_RESTART_COUNT",
)


class Standing(enum.Enum):
    """Standing of a worker."""

    STARTING = "starting"  # has not asked for a world yet
    READY = "ready"  # waits for a world
    IN_WORLD = "in world"
    LEFT = "left"  # has left its world, and will ask for the next one
    ENDED = "ended"


class Worker:
    """A process of the user's command.

    Attributes:
        slot: its place on the node.
        world: the last world that it was in, 0 before.
        rank: its rank there, -1 before.
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
        self.watches = False  # asks hsgd.preempted()
        self.is_silent = False  # has closed its end

    def messages(self) -> list[dict[str, Any]]:
        """Return the worker's new messages; local, not blocking."""
        with contextlib.suppress(OSError):
            while received := self.line.recv(1 << 16):
                self._unread += received
            self.is_silent = True
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > _LONGEST_LINE:
            self._unread = b""
        return [json.loads(line) for line in lines]

    def give(self, number: int, seat: Seat, environment: Mapping[str, str]) -> None:
        """Assign the worker the rank of `seat` in world `number`, and tell it; local."""
        self.standing, self.world, self.rank = Standing.IN_WORLD, number, seat.rank
        self._say({"round": number, "environment": dict(environment)})

    def tell_preempted(self, number: int) -> None:
        """Send that the job got this signal; local."""
        self._say({"preempted": signal.Signals(number).name})

    def tell_broken(self) -> None:
        """Send that its world is broken, so that its waiting calls end; local."""
        self._say({"broken": self.world})

    def tell_update(self) -> None:
        """Send that ranks wait to join its world; local."""
        self._say({"update": self.world})

    def candidate(self) -> Candidate:
        """Return its row for the next world."""
        return Candidate(self.slot, self.held, self.rank)

    def signal(self, number: int) -> None:
        """Signal the process and its children; local."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def finish(self) -> int:
        """Reap the ended process and end its children; return its exit code, negative for a signal.

        Children get SIGTERM after exit code 0, else SIGKILL. Blocking for ten seconds at most.
        """
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        well = ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
        # While the process still has its number.
        self.signal(signal.SIGTERM if well else signal.SIGKILL)
        try:
            code = self.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # the kernel holds it, as on a hung file system
            code = -signal.SIGKILL
        self.standing = Standing.ENDED
        self.line.close()
        os.close(self.ending)
        return code

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has just ended, and its pidfd will say so
            self.line.sendall(json.dumps(message).encode() + b"\n")


def describe_end(code: int) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
