"""What a process of the tests holds more than before."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

__all__ = ["descriptors", "descriptors_since", "mappings"]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def descriptors_since(held: set[str]) -> list[str]:
    """What each descriptor is that was not there before, once the look that a passed deadline
    begins (hsgd/tools/status/dump.py) is over.
    """
    for thread in threading.enumerate():
        if thread.name == "hsgd-dump":
            thread.join()
    what = []
    for number in descriptors() - held:
        with contextlib.suppress(FileNotFoundError):  # that of listdir itself
            what.append(os.readlink(f"/proc/self/fd/{number}"))
    return what


def mappings() -> list[str]:
    """Lines of /proc/self/maps with memory of ours."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "memfd:hsgd" in line]
