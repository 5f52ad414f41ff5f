"""ReadOptions and CacheOptions: arguments of a PartitionedLoader in groups."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["CacheOptions", "ErrorAction", "Exchange", "ReadOptions", "Shuffle"]

Shuffle = Literal["block", "slabs", "full", "none"]
ErrorAction = Literal["raise", "skip", "substitute"]
Exchange = Literal["files", "comm"]
_LEAST_CACHE = 2 << 20


@dataclass(frozen=True)
class ReadOptions:
    """How a loader reads; each rank may choose, except for block_bytes and window_bytes."""

    block_bytes: int = 4 << 20
    """Bytes of the blocks that shuffle="block" and "slabs" permute; equal on all ranks."""
    window_bytes: int = 64 << 20
    """Bytes of the windows inside which samples are shuffled then; equal on all ranks."""
    threads: int = 4
    """Reading threads, and so the number of reads at the same time."""
    read_ahead: int = 4
    """Batches that are ready before the loop asks for them."""
    memory_limit: int | None = None
    """Bytes that batches may take. None: two windows and read_ahead batches, and more while the
    loop holds more than read_ahead old batches. Arguments that need more raise ValueError; a loop
    that holds too many batches gets a MemoryError."""
    transform_threads: int = 0
    """Threads that call `transform`; with 0 the loop's thread does."""
    decode_threads: int | None = None
    """Threads that decode samples, with `decode`; None is one per core of this process."""
    pin_memory: bool = False
    """Page-lock the buffers for a GPU."""
    direct: bool = False
    """Read past the page cache (O_DIRECT); if the file system cannot, metrics() says so."""
    verify: bool = False
    """Check all checksums; a wrong one raises DataError, naming file and byte. Blocks of
    checksum_rows samples are then read whole. Needs a slab folder."""
    mapped: bool = False
    """With shuffle="none": batches are views of the mapped files; nothing is copied or read ahead.
    For data in the page cache. Truncating a file meanwhile kills the process."""
    fill_unwritten: bool = False
    """Give HDF5's fill values for rows that were never written (missing chunks, parts of a virtual
    dataset without source), with a warning; otherwise they are a DataError."""
    timeout_s: float = 600.0
    """Longest wait for one batch, seconds."""
    retry_s: float = 60.0
    """For URLs: seconds for which a failing request is repeated before DataError."""
    disk_cache: str | os.PathLike[str] | None = None
    """For URLs: a folder on a local disk that keeps what was read, for later epochs, other ranks of
    the node and later jobs; made if it does not exist."""
    disk_cache_bytes: int = 64 << 30
    """Limit for the files in that folder."""

    def __post_init__(self) -> None:
        least = min(self.read_ahead, self.block_bytes, self.window_bytes, self.threads)
        if self.decode_threads is not None:
            least = min(least, self.decode_threads)
        if least < 1 or self.transform_threads < 0:
            raise ValueError(
                f"read_ahead={self.read_ahead}, block_bytes={self.block_bytes}, "
                f"window_bytes={self.window_bytes}, threads={self.threads}, "
                f"transform_threads={self.transform_threads}, "
                f"decode_threads={self.decode_threads}; use at least 1 (transform_threads 0)"
            )
        if not (self.retry_s >= 0 and math.isfinite(self.retry_s)):
            raise ValueError(f"retry_s={self.retry_s}; use a number of seconds from 0")
        if self.disk_cache is not None and not os.fspath(self.disk_cache):
            raise ValueError(
                "disk_cache is empty, as of a variable that is not set; name a folder, or None"
            )
        whole = isinstance(self.disk_cache_bytes, int)
        if not whole or self.disk_cache_bytes < _LEAST_CACHE:
            raise ValueError(
                f"disk_cache_bytes={self.disk_cache_bytes!r}; use at least {_LEAST_CACHE}, "
                "a whole number: what is kept are blocks of 1 MiB"
            )
        if self.mapped and (self.verify or self.direct or self.pin_memory or self.memory_limit):
            raise ValueError(
                "mapped=True: verify, direct, pin_memory and memory_limit are for batches that are "
                "read; leave them out"
            )


@dataclass(frozen=True)
class CacheOptions:
    """Options of the cache of slabs in the shared memory of each node; equal on all ranks.

    Each slab is read once, before the first batch, by one of the node's ranks, and stays for later
    epochs. With shuffle="slabs" a node needs its share of the dataset for as many epochs as it has
    ranks, otherwise all of it in every epoch. What does not fit is read from the files.
    """

    node_bytes: int
    """Shared memory of each node."""
    exchange: Exchange = "files"
    """Source of a slab that another node already holds: "files", or with "comm" the memory of that
    node, by alltoall."""

    def __post_init__(self) -> None:
        if self.node_bytes < 1:
            raise ValueError(f"CacheOptions: node_bytes={self.node_bytes}; use at least 1")
        if self.exchange not in get_args(Exchange):
            known = ", ".join(map(repr, get_args(Exchange)))
            raise ValueError(f"CacheOptions: exchange={self.exchange!r}; use one of {known}")
