"""One turn of a benchmark of URLs: a reader of samples behind a server, in a process of its own.

`rank.py remote_reader NAME PLACE SAMPLE_BYTES BUDGET` prints one line of JSON.
"""

from __future__ import annotations

import http.client
import importlib
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from hsgd.io import PartitionedLoader, ReadOptions

from studies.io_packages import import_streaming, reason_against

__all__ = [
    "BATCH_SIZE",
    "BLOCK_BYTES",
    "BUCKET",
    "FETCHED",
    "FROM_FILES",
    "READERS",
    "SECOND_EPOCHS",
]

BATCH_SIZE = 64
BLOCK_BYTES = 4 << 20
BUCKET = "bench"  # the folder of the server that holds the files
_THREADS = 4

# Arrays or tensors of whole samples; None: what came before does not count.
Batches = Iterator[Any]


def _hsgd(
    shuffle: str, *, keep: bool = False, again: bool = False
) -> Callable[[str, int], Batches]:
    """keep: with a cache on disk that is empty, as LitData and Streaming have one. again: it is the
    second epoch that counts.
    """

    def batches(url: str, sample_bytes: int) -> Batches:
        with tempfile.TemporaryDirectory() as cache:
            loader = PartitionedLoader(
                f"{url}/{BUCKET}/slabs",
                BATCH_SIZE,
                rank=0,
                world_size=1,
                shuffle=shuffle,  # type: ignore[arg-type]
                read=ReadOptions(disk_cache=cache if keep else None),
            )
            if again:
                for _ in loader:
                    pass
                yield None
            for batch in loader:
                yield batch["data"]

    return batches


def _ranges(url: str, sample_bytes: int) -> Batches:
    """The limit: ranges of 4 MiB in four threads, one connection each, into the same buffers."""
    parts = urlsplit(url)
    name = f"/{BUCKET}/plain.bin"

    def connect() -> http.client.HTTPConnection:
        return http.client.HTTPConnection(parts.hostname or "", parts.port)

    asking = connect()
    asking.request("HEAD", name)
    size = int(asking.getresponse().headers["Content-Length"])
    asking.close()
    free = [(connect(), np.empty(BLOCK_BYTES, np.uint8)) for _ in range(_THREADS)]

    def read(start: int) -> Any:
        stop = min(start + BLOCK_BYTES, size)
        connection, block = free.pop()
        connection.request("GET", name, headers={"Range": f"bytes={start}-{stop - 1}"})
        answer = connection.getresponse()
        view = block[: stop - start].data
        while len(view):
            view = view[answer.readinto(view) :]
        answer.read()
        found = block[: stop - start].copy()
        free.append((connection, block))
        return found

    with ThreadPoolExecutor(_THREADS) as pool:
        for block in pool.map(read, range(0, size, BLOCK_BYTES)):
            yield block.reshape(-1, sample_bytes)


def _h5py(protocol: str) -> Callable[[str, int], Batches]:
    """One contiguous HDF5 file, in order, through a file of fsspec with blocks of 4 MiB ahead."""

    def batches(url: str, sample_bytes: int) -> Batches:
        h5py, fsspec = map(importlib.import_module, ("h5py", "fsspec"))
        if protocol == "s3":
            client = {"endpoint_url": url, "region_name": "us-east-1"}
            system, name = fsspec.filesystem("s3", client_kwargs=client), f"{BUCKET}/one.h5"
        else:
            system, name = fsspec.filesystem("http"), f"{url}/{BUCKET}/one.h5"
        opened = system.open(name, "rb", block_size=BLOCK_BYTES, cache_type="readahead")
        with opened as content, h5py.File(content, "r") as file:
            data = file["data"]
            for low in range(0, len(data), BATCH_SIZE):
                yield data[low : low + BATCH_SIZE]

    return batches


def _litdata(shuffle: bool) -> Callable[[str, int], Batches]:
    def batches(url: str, sample_bytes: int) -> Batches:
        litdata = importlib.import_module("litdata")
        with tempfile.TemporaryDirectory() as cache:
            stream = litdata.StreamingDataset(
                f"s3://{BUCKET}/litdata",
                cache_dir=cache,
                shuffle=shuffle,
                storage_options={"endpoint_url": url, "region_name": "us-east-1"},
            )
            yield from litdata.StreamingDataLoader(stream, batch_size=BATCH_SIZE, num_workers=0)

    return batches


def _streaming(shuffle: bool) -> Callable[[str, int], Batches]:
    def batches(url: str, sample_bytes: int) -> Batches:
        os.environ["S3_ENDPOINT_URL"] = url
        package = import_streaming()
        with tempfile.TemporaryDirectory() as cache:
            stream = package.StreamingDataset(
                remote=f"s3://{BUCKET}/mds", local=cache, shuffle=shuffle, batch_size=BATCH_SIZE
            )
            rows = (np.frombuffer(sample["data"], np.uint8) for sample in stream)
            while batch := list(itertools.islice(rows, BATCH_SIZE)):
                yield np.stack(batch)
        package.base.util.clean_stale_shared_memory()

    return batches


READERS: dict[str, Callable[[str, int], Batches]] = {
    "hsgd": _hsgd("block"),
    "hsgd-order": _hsgd("none"),
    "hsgd-disk": _hsgd("block", keep=True),
    "hsgd-again": _hsgd("block", again=True),
    "hsgd-full-again": _hsgd("full", again=True),
    "hsgd-disk-again": _hsgd("block", keep=True, again=True),
    "hsgd-disk-full-again": _hsgd("full", keep=True, again=True),
    "hsgd-files-again": _hsgd("block", again=True),
    "hsgd-files-full-again": _hsgd("full", again=True),
    "ranges": _ranges,
    "h5py-fsspec": _h5py("http"),
    "h5py-s3fs": _h5py("s3"),
    "litdata": _litdata(True),
    "litdata-order": _litdata(False),
    "streaming": _streaming(True),
    "streaming-order": _streaming(False),
}


FETCHED = ("litdata", "s3fs", "streaming")  # by io_packages.py; in the names of their readers
SECOND_EPOCHS = tuple(name for name in READERS if name.endswith("-again"))
FROM_FILES = tuple(name for name in READERS if "-files-" in name)  # the folder in place of the URL


def read(name: str, url: str, sample_bytes: int, budget_s: float) -> dict[str, Any]:
    """Read an epoch, or for budget_s. digest: the sum of all bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    samples = digest = 0
    first_s = 0.0
    whole = True
    for batch in READERS[name](url, sample_bytes):
        if batch is None:
            before = resource.getrusage(resource.RUSAGE_SELF)
            began = time.perf_counter()
            continue
        rows = np.asarray(batch)
        samples += len(rows)
        digest += int(rows.sum(dtype=np.int64))
        now = time.perf_counter() - began
        first_s = first_s or now
        if now > budget_s:
            whole = False
            break
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "samples": samples,
        "digest": digest if whole else None,
        "seconds": seconds,
        "first_s": first_s,
        "cpu_s": cpu_s,
    }


def main() -> int:
    """The command line; what a candidate prints goes to stderr."""
    name, url, sample_bytes, budget_s = sys.argv[1:5]
    out = os.dup(1)
    os.dup2(2, 1)
    for peer in FETCHED:
        if peer in name and (reason := reason_against(peer)):
            raise SystemExit(f"{peer}: {reason}")
    importlib.import_module("torch")  # start-up does not count
    found = read(name, url, int(sample_bytes), float(budget_s))
    os.write(out, json.dumps(found).encode() + b"\n")
    os._exit(0)  # some candidates leave threads behind


if __name__ == "__main__":
    main()
