"""How fast compressed chunks of ordinary HDF5 files reach the loop: `io_throughput.py --chunks`.
All candidates run in this process, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from hsgd.io import PartitionedLoader, open_map
from hsgd.io.format.chunks import decode

from harness import report
from harness.stopping import keeping
from studies.io_packages import leave_out
from studies.io_records import Batches, Reader, measure, ratios

__all__ = ["main"]

EPILOG = """\
Images of 128 x 128 float32 of which compression saves about two thirds, as h5py writes them:
gzip-auto is compression="gzip" with the chunks that h5py chooses, which hold parts of images;
lzf-auto the same with LZF and shuffle; bitshuffle (LZ4) and shuffle-gzip have chunks of 16 images.
The page cache is warm, batches have 64 images, the loop sums one value in 4 KiB. h5py and pyfive
read as many rows at once as a chunk has, at least 64, in order; h5py's cache holds these chunks.
Candidates take turns, --rounds times after one that does not count; medians count.

Ratios in the JSON, of bytes per second within this run, above 1 is ahead. vs_limit is hsgd.io / the
decoders alone: all cores decode the same chunks from memory, and no bytes are copied to batches.

examples:
  python benchmarks/io_throughput.py --chunks --quick
  python benchmarks/io_throughput.py --chunks --kinds gzip-auto bitshuffle --json chunks.json
"""
SIDE, BATCH = 128, 64
_QUICK_MB, _USUAL_MB = 32, 256
_CACHE_BYTES = 64 << 20


def _bitshuffle() -> Mapping[str, Any]:
    import hdf5plugin

    options: Mapping[str, Any] = hdf5plugin.Bitshuffle(cname="lz4")
    return options


KINDS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "gzip-auto": lambda: {"compression": "gzip"},
    "shuffle-gzip": lambda: {
        "compression": "gzip",
        "shuffle": True,
        "chunks": (16, SIDE, SIDE),
    },
    "lzf-auto": lambda: {"compression": "lzf", "shuffle": True},
    "bitshuffle": lambda: {**_bitshuffle(), "chunks": (16, SIDE, SIDE)},
}


def make_images(path: Path, total_bytes: int, options: Mapping[str, Any]) -> None:
    """Write smooth images with some noise, as counts of a detector."""
    draw = np.random.default_rng(0)
    count = total_bytes // (4 * SIDE * SIDE)
    slopes = np.linspace(0, 1, SIDE, dtype=np.float32)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (count, SIDE, SIDE), "f4", **options)
        for low in range(0, count, 256):
            rows = min(256, count - low)
            levels = draw.random((rows, 1, 1), np.float32) * slopes[:, None] * slopes * 50
            dataset[low : low + rows] = draw.poisson(levels).astype(np.float32)


# --- readers ---

_loaders: dict[tuple[Path, str], PartitionedLoader] = {}


def _hsgd(shuffle: str) -> Callable[[Path, int, int], Batches]:
    def read(folder: Path, batch: int, epoch: int) -> Batches:
        key = (folder, shuffle)
        if key not in _loaders:
            _loaders[key] = PartitionedLoader(folder / "x.h5", batch, 0, 1, shuffle)
        _loaders[key].set_epoch(epoch)
        for found in _loaders[key]:
            yield [found["x"]]

    return read


def _slabs(dataset: Any, batch: int) -> Batches:
    rows = -(-max(dataset.chunks[0], batch) // dataset.chunks[0]) * dataset.chunks[0]
    for low in range(0, dataset.shape[0], rows):
        for found in torch.from_numpy(dataset[low : low + rows]).split(batch):
            yield [found]


def _h5py(folder: Path, batch: int, epoch: int) -> Batches:
    with h5py.File(folder / "x.h5", "r", rdcc_nbytes=_CACHE_BYTES, rdcc_nslots=100_003) as file:
        yield from _slabs(file["x"], batch)


def _pyfive(folder: Path, batch: int, epoch: int) -> Batches:
    import pyfive

    with pyfive.File(folder / "x.h5") as file:
        yield from _slabs(file["x"], batch)


_stored: dict[Path, list[np.ndarray]] = {}


def _decoders(folder: Path, batch: int, epoch: int) -> Batches:
    """The chunks, decoded by as many threads as there are cores."""
    extent = open_map(folder / "x.h5").slabs[0].extents["x"]
    chunks = extent.chunks
    assert chunks is not None, extent.refusal
    if folder not in _stored:
        content = np.fromfile(folder / "x.h5", np.uint8)
        places = (chunks.place(number) for number in range(len(chunks.offsets) // 8))
        _stored[folder] = [content[start : start + size].copy() for start, size in places]
    stored = _stored[folder]
    threads = len(os.sched_getaffinity(0))

    def part(first: int) -> int:
        numbers = range(first, len(stored), threads)
        return sum(decode(chunks, number, stored[number]).nbytes for number in numbers)

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(part, range(threads)))
    yield [torch.empty(total, dtype=torch.uint8)]


def _readers(kind: str) -> Iterator[Reader]:
    yield Reader("hsgd.io", kind, "block", _hsgd("block"), "hsgd")
    yield Reader("hsgd.io in order", kind, "in-order", _hsgd("none"), "hsgd")
    yield Reader("h5py slabs", kind, "in-order", _h5py)
    yield Reader("pyfive slabs", kind, "in-order", _pyfive, package="pyfive")
    yield Reader("decoders", kind, "both", _decoders, "limit")


def _parser() -> argparse.ArgumentParser:
    parser = report.argument_parser(
        *("Bytes per second of compressed chunks, to the training loop.", EPILOG),
        quick="32 MB, two turns",
        program="io_throughput.py --chunks",
    )
    add = parser.add_argument
    add("--chunks", action="store_true", help="this benchmark")
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    add("--total", type=int, metavar="MB", help="of images before compression (default 256)")
    add("--rounds", type=int, help="turns of each candidate (default 5)")
    add("--budget", type=float, default=30.0, metavar="S", help="of one turn (default 30)")
    add("--peers", action="store_true", help="download peers that are not there yet")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured."""
    options = report.parse(_parser(), argv)
    total = (options.total or (_QUICK_MB if options.quick else _USUAL_MB)) << 20
    options.rounds = options.rounds or (2 if options.quick else 5)
    found = report.Measured(left_out={})
    leave_out(["pyfive"], options.peers, found.left_out)
    readers = list(itertools.chain(*map(_readers, options.kinds)))
    with keeping() as stopped, tempfile.TemporaryDirectory(prefix="hsgd-chunks-") as name:
        for kind in options.kinds:
            folder = Path(name) / kind
            folder.mkdir()
            make_images(folder / "x.h5", total, KINDS[kind]())
            measure(kind, BATCH, folder, options, found, readers)
            _stored.clear()
    compared = ratios(found.rows)
    columns = {name: name for name in ("kind", "candidate", "order")}
    columns |= {"GB/s": "gb_per_s", "CPU s/GB": "cpu_s_per_gb"}
    code = report.finish("io_chunks", options, found, compared, columns, stopped.code)
    print("  ".join(f"{case}: {ratio}" for case, ratio in compared.items()))
    return code
