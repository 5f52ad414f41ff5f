"""The TCP sockets of a process of the tests."""

from __future__ import annotations

import os
import socket
import stat

__all__ = ["tcp_sockets"]


def tcp_sockets() -> list[tuple[tuple[str, int], bool]]:
    """Address, and whether it listens there, of each TCP socket of this process. By descriptors: a
    list of the kernel's may miss some while others come and go.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        if not stat.S_ISSOCK(mode_of(int(name))):
            continue
        with socket.socket(fileno=os.dup(int(name))) as mine:
            if mine.family == socket.AF_INET and mine.type == socket.SOCK_STREAM:
                listens = mine.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                found.append((mine.getsockname(), bool(listens)))
    return found


def mode_of(fd: int) -> int:
    try:
        return os.fstat(fd).st_mode
    except OSError:  # the listing itself
        return 0
