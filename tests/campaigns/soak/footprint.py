"""Footprint: what the kernel says that this process holds. Linux only.

Owns how memory, descriptors and threads are counted. Never judges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path

__all__ = ["MEASURES", "footprint"]

MEASURES = ("rss", "pss", "mapped", "descriptors", "threads")
_LIBC = ctypes.CDLL(None)
_PROCESS = Path("/proc/self")


def footprint() -> tuple[int, ...]:
    """The measures in this order: bytes of resident, of proportional and of mapped memory, and the
    numbers of descriptors and threads; local.

    Resident memory comes from smaps_rollup, which counts pages: the sum that statm has is late by
    up to 64 pages per thread. What the allocator keeps for later calls goes back before, where
    there is malloc_trim(): its gaps are no leak. Proportional memory is that of no files: how many
    processes share the pages of a library is nothing that this one does.
    """
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    resident = {}
    for line in (_PROCESS / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        resident[name] = 1024 * int(rest.split()[0])
    mapped = int((_PROCESS / "statm").read_text().split()[0]) * mmap.PAGESIZE - _stacks()
    descriptors = len(os.listdir(_PROCESS / "fd")) - 1  # without that of listdir itself
    threads = len(os.listdir(_PROCESS / "task"))
    proportional = resident["Pss"] - resident["Pss_File"]
    return resident["Rss"], proportional, mapped, descriptors, threads


def _stacks() -> int:
    """Bytes of stacks of threads, with their guards: threads are counted themselves, and the C
    library keeps up to 40 MiB of stacks of those that have ended.
    """
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if limit == resource.RLIM_INFINITY:
        limit = 8 << 20
    total = guard_end = guard = 0
    for line in (_PROCESS / "maps").read_text().splitlines():
        span, rights, *_ = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        if rights == "---p":
            guard_end, guard = end, end - begin
        elif begin == guard_end and rights == "rw-p" and abs(end - begin - limit) <= guard:
            total += end - begin + guard
    return total
