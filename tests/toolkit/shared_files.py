"""Files in /dev/shm that a program left behind. Linux only."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

__all__ = ["orphaned_files", "shared_files"]


def shared_files() -> set[str]:
    """The names that are there now."""
    return set(os.listdir("/dev/shm"))


def orphaned_files(before: set[str], grace_s: float) -> list[str]:
    """New files that are still there after at most `grace_s` although no process maps them.

    A file that is mapped, or is on its way in or out, may belong to another program.
    """
    deadline = time.monotonic() + grace_s
    while new := shared_files() - before:
        orphans = sorted(name for name in new if not _in_use(name))
        if not orphans or time.monotonic() > deadline:
            return orphans
        time.sleep(0.1)  # no event tells that a file was mapped
    return []


def _in_use(name: str) -> bool:
    """Whether a process maps the file. Found by its inode: sem_open() maps a file under a name that
    it changes afterwards.
    """
    try:
        inode = os.stat(f"/dev/shm/{name}").st_ino
    except FileNotFoundError:
        return False
    needle = re.compile(rf" {inode} +/dev/shm/".encode())
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if needle.search(maps.read_bytes()):
                return True
        except OSError:
            continue
    return False
