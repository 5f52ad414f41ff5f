"""What a killed job may leave behind, and nothing else: sockets in the temporary folder that nobody
listens on.

Owns the decision that a socket is stale. Never looks outside the temporary folder, at other users'
files, or at names that do not begin with "hsgd". Shared memory leaves nothing: its segments are
memfds.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

__all__ = ["stale_sockets"]


def stale_sockets() -> list[Path]:
    """Sockets named hsgd* that belong to this user and have no listener any more; local."""
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
            return True  # a full queue, a datagram socket, a path too long: not known to be dead
    return True
