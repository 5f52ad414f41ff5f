"""Leftovers of killed jobs: this user's sockets hsgd* in the temporary folder, if dead."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

__all__ = ["stale_sockets"]


def stale_sockets() -> list[Path]:
    """Return this user's sockets named hsgd* without a listener; local."""
    folder = Path(tempfile.gettempdir())
    paths = [*folder.glob("hsgd*"), *folder.glob("hsgd*/*")]
    return sorted(path for path in paths if _is_own_socket(path) and not _listens(path))


def _is_own_socket(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # a full queue, a datagram socket, a path too long: perhaps alive
    return True
