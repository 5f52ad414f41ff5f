"""Report on the node's ranks when a collective of this process has passed its deadline.

It is the table of `hsgd status`, on stderr. If HSGD_DUMP_DIR is set, also files, which are written
too when a collective has lost a rank. The report comes once in a process, and from one rank of the
node: the first whose collective failed, as the core knows. after() is one of hsgd.errors.observers,
which see each such error. It never raises, never changes the error, and delays it for a third of a
second at most, and the end of the process for five.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from hsgd.config import Config
from hsgd.errors import CollectiveTimeout

if TYPE_CHECKING:
    from pathlib import Path

    from hsgd.errors import HsgdError
    from hsgd.tools.status.looking import Look
    from hsgd.tools.status.waits import Group

__all__ = ["after"]

_LIMIT_S = 5.0
_WAIT_S = 0.3
_once = threading.Lock()  # stays locked after this process's report
_TRIES = 50
_PAUSE_S = 0.02


def after(error: HsgdError) -> None:
    """Report on this node's ranks, if no other rank does; local, blocking for 0.3 s at most.

    What takes longer continues in a thread. Nothing is reported if no communicator of this process
    is broken: the error came from a window or a set-up.

    Args:
        error: PeerLost or CollectiveTimeout, about to be raised. PeerLost is reported only if
            HSGD_DUMP_DIR is set: it names the rank, and the other ranks learn of it at once.
    """
    try:
        config = Config.from_env()
        is_wanted = config.dump_dir is not None or isinstance(error, CollectiveTimeout)
        if not config.dump or not is_wanted or _once.locked():
            return
        # In a thread: /proc, a disk or a full pipe may block.
        words = (type(error).__name__, config.dump_dir)
        looker = threading.Thread(target=_look, args=words, name="hsgd-dump", daemon=True)
        looker.start()
        atexit.register(looker.join, _LIMIT_S)
        looker.join(_WAIT_S)  # no longer: others may wait for this rank in shrink()
    except KeyboardInterrupt:
        _thread.interrupt_main()  # raised after the error
    except (ValueError, RuntimeError):  # HSGD_* is changed; no thread, or the interpreter ends
        return


def _look(kind: str, folder: str | None) -> None:
    from hsgd.tools.status.page import NoteState, notes_of

    with contextlib.suppress(Exception):
        own = [note for note in notes_of(os.getpid()) if note.state == NoteState.BROKEN]
        if not own or not _once.acquire(blocking=False):
            return
        note = max(own, key=lambda note: note.since_ns)
        door = f"\0hsgd-dump-{note.id:016x}-{note.node}"
        if not note.is_first:
            _wait_for_the_first(door)
        elif note.error_rank != note.rank:  # of another node: this rank was late, and they left
            _show(f"hsgd: rank {note.rank} got {kind}", f"{note.id:016x}", folder, door)


def _wait_for_the_first(door: str) -> None:
    """Wait until it has read the others' pages, this process's too, for five seconds at most."""
    for _ in range(_TRIES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visit:
            visit.settimeout(_LIMIT_S)
            try:
                visit.connect(door)
                visit.recv(1)
                return
            except ConnectionRefusedError:  # not open yet, or closed
                time.sleep(_PAUSE_S)


def _show(cause: str, comm: str, folder: str | None, door: str) -> None:
    from hsgd.tools.status.looking import look
    from hsgd.tools.status.report import brief
    from hsgd.tools.status.waits import groups_of

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        opened.bind(door)
        opened.listen(socket.SOMAXCONN)
        seen = look([os.getpid()], twice=False)
    groups = groups_of(seen.rows)
    group = next(each for each in groups if each.comm == comm)
    print(
        f"{cause}; what the ranks of this node do (HSGD_DUMP=0: not shown):\n{brief(group)}",
        file=sys.stderr,
        flush=True,
    )
    if folder is None:
        return
    try:
        line = f"hsgd: written to {_write(folder, group, groups, seen)}"
    except OSError as error:
        line = f"hsgd: HSGD_DUMP_DIR={folder}: {error.strerror or error}"
    print(line, file=sys.stderr, flush=True)


def _write(folder: str, group: Group, groups: list[Group], seen: Look) -> Path:
    """Write into this communicator's folder, which all its nodes share; raises OSError."""
    import json
    from pathlib import Path

    from hsgd.tools.status.flight_files import flight_files
    from hsgd.tools.status.report import document, table

    target, host = Path(folder) / f"hsgd-{group.comm}", socket.gethostname()
    target.mkdir(parents=True, exist_ok=True)
    files = {
        f"status-{host}.txt": f"{table(groups)}\n".encode(),
        f"status-{host}.json": json.dumps(document(groups, host, seen.refused), indent=2).encode(),
        **flight_files(group),
    }
    part = target / f"part-{host}.tmp"
    for name, data in files.items():
        part.write_bytes(data)
        os.replace(part, target / name)  # a reader finds the whole file, or none
    return target
