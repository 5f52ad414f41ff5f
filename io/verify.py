"""hsgd data verify: every block of a slab folder against its checksum, with several threads.

Owns the search for damage and its report. Never repairs and never writes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hsgd.io import native
from hsgd.io.datamap import DataMap
from hsgd.io.files import SlabFiles
from hsgd.io.schedule import staging_bytes

from hsgd.errors import DataError

__all__ = ["find_damage"]

_TASKS = 64  # blocks between two reports of progress


def find_damage(
    data: DataMap, *, threads: int = 4, advance: Callable[[int], object] = lambda count: None
) -> Iterator[str]:
    """One line for each damaged block: file, bytes, field, and what is wrong.

    advance: told the number of bytes that were checked. Blocks as long as reading takes. Raises
    ValueError for a dataset without checksums.
    """
    if not data.checksum_rows:
        raise ValueError(f"{data.path} has no checksums; convert it with hsgd data convert")
    size = staging_bytes(data, direct=False, verify=True)
    own = threading.local()
    files = SlabFiles(data)

    def check(number: int) -> list[str]:
        if not hasattr(own, "staging"):
            own.staging = native.Staging(size)
        return _check_slab(data, files, number, own.staging, advance)

    pool = ThreadPoolExecutor(threads, "hsgd-verify")
    try:
        for lines in pool.map(check, range(len(data.slabs))):
            yield from lines
    finally:
        pool.shutdown(cancel_futures=True)
        files.close()


def _check_slab(
    data: DataMap,
    files: SlabFiles,
    number: int,
    staging: native.Staging,
    advance: Callable[[int], object],
) -> list[str]:
    slab, rows = data.slabs[number], data.checksum_rows
    try:
        descriptor, alignment = files.acquire(number)
    except DataError as error:
        return [str(error)]
    lines = []
    try:
        for spec in data.fields:
            extent = slab.extents[spec.name]
            starts = np.arange(0, slab.count, rows)
            counts = np.minimum(rows, slab.count - starts)
            checksums = np.frombuffer(extent.checksums, np.uint32)
            nowhere = np.zeros(rows, np.uint64)
            tasks = np.zeros(len(starts), native.TASK)
            tasks["offset"], tasks["row_bytes"], tasks["ranges"] = extent.offset, spec.row_bytes, 1
            tasks["starts"] = starts.ctypes.data + 8 * np.arange(len(starts))
            tasks["counts"] = counts.ctypes.data + 8 * np.arange(len(starts))
            tasks["checksums"] = checksums.ctypes.data + 4 * np.arange(len(starts))
            tasks["places"], tasks["alignment"] = nowhere.ctypes.data, alignment
            tasks["file"] = descriptor
            for low in range(0, len(tasks), _TASKS):
                part = np.ascontiguousarray(tasks[low : low + _TASKS])
                native.TaskBatch(part, (starts, counts, checksums, nowhere)).work(staging)
                advance(int(counts[low : low + _TASKS].sum()) * spec.row_bytes)
                for block in np.flatnonzero(part["status"]).tolist():
                    first = extent.offset + int(starts[low + block]) * spec.row_bytes
                    end = first + int(counts[low + block]) * spec.row_bytes
                    what = _describe(int(part["status"][block]))
                    lines.append(f"{slab.path}: bytes [{first}, {end}) of {spec.name!r}: {what}")
    finally:
        files.release([number])
    return lines


def _describe(status: int) -> str:
    if status == native.MISMATCH:
        return "wrong checksum"
    if status == native.END:
        return "missing, the file is truncated"
    return f"cannot be read: {os.strerror(status)}"
