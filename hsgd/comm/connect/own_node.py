"""Which ranks share a node, proved by connecting to one another's sockets.

Host names prove nothing. The sockets have abstract names, which need no file and exist in one
network namespace of one kernel. The names are random, and a socket of another user does not count.
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
    """Ranks that can exchange values."""

    @property
    def rank(self) -> int:
        """The rank of this process in the circle, from 0."""

    def exchange(self, what: str, value: object, limit_s: float | None = None) -> list[object]:
        """Return every rank's JSON value, by rank; collective, blocking. See Board.exchange()."""


def find_nodes(board: Circle, size: int) -> list[int]:
    """Return the node of each rank, numbered by first ranks; collective over the `size` ranks."""
    kernel = _running_kernel()
    with _listening(size) as name:
        seen: list[tuple[str, str]] = board.exchange("processes", [kernel, name])  # type: ignore[assignment]
        first = next(
            rank for rank, (other, door) in enumerate(seen) if other == kernel and _reaches(door)
        )
        firsts = board.exchange("nodes", first)
    return number_nodes(firsts)


def number_nodes(marks: Sequence[object]) -> list[int]:
    """Return the marks of ranks as numbers, in the order of their first appearance."""
    numbers = {mark: number for number, mark in enumerate(dict.fromkeys(marks))}
    return [numbers[mark] for mark in marks]


def _running_kernel() -> str:
    """Return the boot id, which ranks of one node share; "" if /proc cannot be read."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@contextlib.contextmanager
def _listening(backlog: int) -> Iterator[str]:
    """Yield the name of a socket that only processes of this network namespace can reach."""
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
            return True  # its queue is full, so it exists
        except OSError:
            return False
        return _user_of(probe) in (os.geteuid(), 0)  # not someone else who took the name


def _user_of(connection: socket.socket) -> int:
    credentials = struct.Struct("3i")  # pid, uid, gid
    option = (socket.SOL_SOCKET, socket.SO_PEERCRED)
    return int(credentials.unpack(connection.getsockopt(*option, credentials.size))[1])
