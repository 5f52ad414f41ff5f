"""Checks of all blocks of a slab folder against their checksums, with several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hsgd.errors import DataError

from ..batches.scheduler import staging_bytes
from ..format.data_map import DataMap
from ..format.slab_folder import FieldSpec
from ..reading import row_copies
from ..reading.claimed_memory import claimed_memory
from ..reading.row_reader import RowReader, WrongChecksum
from ..reading.slab_files import SlabFiles

__all__ = ["find_damage"]


def find_damage(
    data: DataMap, *, threads: int = 4, advance: Callable[[int], object] = lambda count: None
) -> Iterator[str]:
    """Yield one line for each damaged block: file, place, field and the error; blocking.

    `advance` is called with the bytes checked since the last call. Raises ValueError without
    checksums, DataError if a block needs more memory than there is.
    """
    if not data.checksum_rows:
        raise ValueError(f"{data.path} has no checksums; convert it with hsgd data convert")
    if not data.slabs:
        return
    size = staging_bytes(data, direct=False, verify=True)
    with claimed_memory(data.path, "its largest chunk or checksum block", size):
        row_copies.Staging(size)  # one error now instead of one for each block
    pool = ThreadPoolExecutor(threads, "hsgd-verify")
    try:
        for lines in pool.map(lambda n: _check_slab(data, n, advance), range(len(data.slabs))):
            yield from lines
    finally:
        pool.shutdown(cancel_futures=True)


def _check_slab(data: DataMap, number: int, advance: Callable[[int], object]) -> list[str]:
    if data.access is None:
        files = SlabFiles(data)
        try:
            files.acquire(number)  # one line, not one per block, if the file has changed
        except DataError as error:
            return [str(error)]
        finally:
            files.close()
    with RowReader(data) as reader:
        return [
            line
            for spec in data.fields
            for start in range(0, data.slabs[number].count, data.checksum_rows)
            for line in _check_block(reader, number, spec, start, advance)
        ]


def _check_block(
    reader: RowReader, number: int, spec: FieldSpec, start: int, advance: Callable[[int], object]
) -> Iterator[str]:
    slab = reader.data.slabs[number]
    count = min(reader.data.checksum_rows, slab.count - start)
    extent, nowhere = slab.extents[spec.name], np.zeros(count, np.uint64)
    first, sizes, row, nbytes = None, None, start, count * spec.row_bytes
    try:
        if spec.ragged:
            ends = reader.read_offsets(number, spec.name, start, count, verify=True)
            first, sizes = int(ends[0]), np.diff(ends) * spec.row_bytes
            row, nbytes = first, int(sizes.sum())
        reader.scatter(spec.name, number, start, nowhere, first=first, sizes=sizes, verify=True)
    except WrongChecksum as error:
        low = extent.offset + row * spec.row_bytes
        is_plain = extent.stored_dtype.isnative and not extent.refusal and extent.chunks is None
        place = f"{slab.path}: bytes [{low}, {low + nbytes}) of {spec.name!r}"
        yield f"{place}: wrong checksum" if is_plain and reader.data.access is None else str(error)
    except DataError as error:
        yield str(error)
    advance(nbytes)
