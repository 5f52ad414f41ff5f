"""Which ranks share a node: who can connect to whose socket.

Owns the proof. Host names prove nothing. Sockets have abstract names, which need no file and live
in a network namespace of one kernel; the names are random, and a process of another user that takes
one is not believed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["Circle", "find_nodes", "number_nodes"]


class Circle(Protocol):
    """Ranks that can tell one another something."""

    @property
    def rank(self) -> int:
        """The own one, from 0."""

    def exchange(self, what: str, value: object, limit_s: float | None = None) -> list[object]:
        """Everybody's value, by rank; collective, blocking, with a deadline. What JSON takes.

        limit_s: see Board.exchange().
        """


def find_nodes(board: Circle, size: int) -> list[int]:
    """The node of each rank, numbered by their first ranks; collective over the `size` ranks."""
    kernel = _running_kernel()
    with _listening(size) as name:
        seen: list[tuple[str, str]] = board.exchange("processes", [kernel, name])  # type: ignore[assignment]
        first = next(
            rank for rank, (other, door) in enumerate(seen) if other == kernel and _reaches(door)
        )
        firsts = board.exchange("nodes", first)
    return number_nodes(firsts)


def number_nodes(marks: Sequence[object]) -> list[int]:
    """Numbers for the marks of ranks, in the order in which they first appear."""
    numbers = {mark: number for number, mark in enumerate(dict.fromkeys(marks))}
    return [numbers[mark] for mark in marks]


def _running_kernel() -> str:
    """Where it differs ranks share no node. What cannot be read here, as in sandboxes, the others
    of the node cannot read either.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@contextlib.contextmanager
def _listening(backlog: int) -> Iterator[str]:
    """The name of a socket that processes of this network namespace can reach, and no others."""
    name = f"hsgd-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen(backlog)
        yield name


def _reaches(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0{name}")
        except BlockingIOError:
            return True  # its queue is full: it is there
        except OSError:
            return False
        return _user_of(probe) in (os.geteuid(), 0)  # and not who took the same name elsewhere


def _user_of(connection: socket.socket) -> int:
    """Who listens at the other end."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    option = (socket.SOL_SOCKET, socket.SO_PEERCRED)
    return int(credentials.unpack(connection.getsockopt(*option, credentials.size))[1])
