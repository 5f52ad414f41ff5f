"""hsgd data verify: every block of a slab folder against its checksum, with several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..batches.scheduler import staging_bytes
from ..format.data_map import DataMap, Extent
from ..format.slab_folder import OFFSETS, FieldSpec
from ..order.epoch_order import IntArray
from ..reading import row_copies
from ..reading.claimed_memory import claimed_memory
from ..reading.row_reader import RowReader
from ..reading.slab_files import SlabFiles

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
    if not data.slabs:
        return
    size = staging_bytes(data, direct=False, verify=True)
    own = threading.local()
    files = SlabFiles(data)

    def check(number: int) -> list[str]:
        if not hasattr(own, "staging"):
            with claimed_memory(data.path, "its largest chunk or checksum block", size):
                own.staging = row_copies.Staging(size)
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
    staging: row_copies.Staging,
    advance: Callable[[int], object],
) -> list[str]:
    slab = data.slabs[number]
    if data.access is not None:
        try:
            found = [_check_slowly(data, number, spec, advance) for spec in data.fields]
        except DataError as error:
            return [str(error)]
        return [line for lines in found for line in lines]
    try:
        descriptor, alignment = files.acquire(number)
    except DataError as error:
        return [str(error)]
    lines = []
    try:
        for spec in data.fields:
            for name, table in _tables(data, number, spec):
                for block, status in _check_table(table, descriptor, alignment, staging, advance):
                    first = int(table.starts[block])
                    end = first + int(table.sizes[block])
                    lines.append(
                        f"{slab.path}: bytes [{first}, {end}) of {name!r}: {_describe(status)}"
                    )
            if not _is_plain(slab.extents[spec.name]):
                lines += _check_slowly(data, number, spec, advance)
    except DataError as error:
        lines.append(str(error))
    finally:
        files.release([number])
    return lines


def _is_plain(extent: Extent) -> bool:
    """Whether the rows lie in the file as they are in memory, and HDF5 can be bypassed."""
    return not extent.refusal and extent.chunks is None and extent.stored_dtype.isnative


def _check_slowly(
    data: DataMap, number: int, spec: FieldSpec, advance: Callable[[int], object]
) -> list[str]:
    """Blocks that lie in chunks or behind a URL, or that h5py has to read."""
    remote = data.access is not None  # nobody has checked offsets then
    slab, step = data.slabs[number], data.checksum_rows
    lines = []
    with RowReader(data) as reader:
        for start in range(0, slab.count, step):
            count = min(step, slab.count - start)
            nowhere = np.zeros(count, np.uint64)
            first, sizes = None, None
            try:
                if spec.ragged:
                    ends = reader.read_offsets(number, spec.name, start, count, verify=remote)
                    first, sizes = int(ends[0]), np.diff(ends) * spec.row_bytes
                reader.scatter(
                    spec.name, number, start, nowhere, first=first, sizes=sizes, verify=True
                )
            except DataError as error:
                lines.append(str(error))
            advance(count * spec.row_bytes if sizes is None else int(sizes.sum()))
    return lines


@dataclass(frozen=True)
class _Table:
    """The blocks of one dataset: first byte in the file, bytes, and checksum of each."""

    starts: IntArray
    sizes: IntArray
    checksums: NDArray[np.uint32]


def _tables(data: DataMap, number: int, spec: FieldSpec) -> Iterator[tuple[str, _Table]]:
    """The datasets of a field in one slab that lie there as they are. Raises DataError when offsets
    make no sense.
    """
    slab, rows = data.slabs[number], data.checksum_rows
    extent = slab.extents[spec.name]
    first = np.arange(0, slab.count, rows)
    stop = np.minimum(first + rows, slab.count)
    if extent.offsets is not None:
        offsets = extent.offsets
        sums = np.frombuffer(offsets.checksums, np.uint32)
        table = _Table(offsets.offset + 8 * first, 8 * (stop - first + 1), sums)
        yield f"{spec.name}/{OFFSETS}", table
        with RowReader(data) as reader:
            ends = reader.read_offsets(number, spec.name, 0, slab.count)
        first, stop = ends[first], ends[stop]
    if not _is_plain(extent):
        return
    sums = np.frombuffer(extent.checksums, np.uint32)
    starts = extent.offset + first * spec.row_bytes
    yield spec.name, _Table(starts, (stop - first) * spec.row_bytes, sums)


def _check_table(
    table: _Table,
    descriptor: int,
    alignment: int,
    staging: row_copies.Staging,
    advance: Callable[[int], object],
) -> Iterator[tuple[int, int]]:
    """Number and status of each damaged block."""
    count = len(table.starts)
    numbers = 8 * np.arange(count)
    ones, nowhere = np.ones(1, np.int64), np.zeros(1, np.uint64)
    tasks = np.zeros(count, row_copies.TASK)
    tasks["row_bytes"] = tasks["ranges"] = 1  # one row: the whole block
    tasks["starts"] = table.starts.ctypes.data + numbers
    tasks["counts"], tasks["places"] = ones.ctypes.data, nowhere.ctypes.data
    tasks["sizes"] = table.sizes.ctypes.data + numbers
    tasks["checksums"] = table.checksums.ctypes.data + numbers // 2
    tasks["alignment"], tasks["file"] = alignment, descriptor
    for low in range(0, count, _TASKS):
        part = np.ascontiguousarray(tasks[low : low + _TASKS])
        row_copies.TaskBatch(part, (table, ones, nowhere)).work(staging)
        advance(int(table.sizes[low : low + _TASKS].sum()))
        for block in np.flatnonzero(part["status"]).tolist():
            yield low + block, int(part["status"][block])


def _describe(status: int) -> str:
    if status == row_copies.MISMATCH:
        return "wrong checksum"
    if status == row_copies.END:
        return "missing, the file is truncated"
    return f"cannot be read: {os.strerror(status)}"
