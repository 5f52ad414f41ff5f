"""A look at the ranks of the node when a collective of this process has passed its deadline: the
table of `hsgd status` on stderr. Where HSGD_DUMP_DIR asks for files: these, too, and the same when
a collective has lost a rank.

Owns when that is done, and by whom: once in a process, and by one rank of the node, the first for
which the collective failed, as the core knows. It is one of hsgd.errors.observers, which see each
such error. Never raises, never changes the error, and never holds it up for more than a third of a
second, nor the end of the process for more than five.
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
_once = threading.Lock()  # stays locked once this process has had its look
_TRIES = 50
_PAUSE_S = 0.02


def after(error: HsgdError) -> None:
    """Show what the ranks of this node do, if no other rank does so already; local, blocking for
    a third of a second at most: what takes longer goes on in a thread.

    error: PeerLost or CollectiveTimeout, about to be raised. Of a lost rank, which the error names,
    and which others hear of at once to go on without it, only where HSGD_DUMP_DIR asks for it.
    Nothing where no communicator of this process is broken: it was a window's, or the set-up's.
    """
    try:
        config = Config.from_env()
        is_wanted = config.dump_dir is not None or isinstance(error, CollectiveTimeout)
        if not config.dump or not is_wanted or _once.locked():
            return
        # In a thread: /proc, a disk or a full pipe may keep whoever asks.
        words = (type(error).__name__, config.dump_dir)
        looker = threading.Thread(target=_look, args=words, name="hsgd-dump", daemon=True)
        looker.start()
        atexit.register(looker.join, _LIMIT_S)
        looker.join(_WAIT_S)  # no longer: others may wait for this rank in shrink()
    except KeyboardInterrupt:
        _thread.interrupt_main()  # behind the error
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
        elif (
            note.error_rank != note.rank
        ):  # of another node: it was late itself, and they have gone
            _show(f"hsgd: rank {note.rank} got {kind}", f"{note.id:016x}", folder, door)


def _wait_for_the_first(door: str) -> None:
    """Until it has read what the others do, this one among them, or for five seconds."""
    for _ in range(_TRIES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visit:
            visit.settimeout(_LIMIT_S)
            try:
                visit.connect(door)
                visit.recv(1)
                return
            except ConnectionRefusedError:  # it is about to open, or has closed
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
    """Into a folder for this communicator, which all of its nodes share where the disk is shared.
    Raises OSError.
    """
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
