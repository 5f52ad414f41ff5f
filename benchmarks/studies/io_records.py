"""How fast two usual kinds of records reach the loop: token streams, and tables of 39 columns:
`io_throughput.py --records`. All candidates run in this process, in turns.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from hsgd.io import PartitionedLoader, convert_to_slabs

from harness import report
from harness.stopping import keeping
from studies.io_candidates import CANDIDATES
from studies.io_files import DataSet, write_litdata
from studies.io_packages import leave_out

__all__ = ["Batches", "Reader", "main", "measure", "ratios"]

EPILOG = """\
tokens: int32, documents of 500 tokens on average, in windows of 1024 (pack=1024 of hsgd.io, with
the boundaries of documents, which no other candidate gives). table: 13 columns of float32 and 26
of int32, as of click logs. The loop sums one value in 4 KiB of each tensor. Candidates take turns,
--rounds times after one that does not count; medians count. Who takes longer than --budget seconds
for a turn is stopped there. The page cache is warm.

Ratios in the JSON, of bytes per second within this run, above 1 is ahead: KIND/ORDER/bBATCH;
vs_peer is hsgd.io / the fastest peer in the same order, vs_limit hsgd.io / preadv of slabs into a
ring of the same size. memmap takes windows from one flat file at random places, rows from one
array for each column; parquet is pyarrow's iter_batches; LitData has TokensLoader.

examples:
  python benchmarks/io_throughput.py --records --quick
  python benchmarks/io_throughput.py --records --kinds tokens --batches 64 512 --json tokens.json
"""
WINDOW = 1024
MEAN_DOCUMENT = 500
FLOATS, INTEGERS = 13, 26
_COLUMNS = [f"f{n:02}" for n in range(FLOATS)] + [f"i{n:02}" for n in range(INTEGERS)]
_ROWS_AT_ONCE = 65536  # of peers that read many
_QUICK_MB, _USUAL_MB = 32, 512
_DEFAULT_BATCHES = {"tokens": (64, 512), "table": (4096,)}

Batches = Iterator[Sequence[Any]]  # the tensors of a batch


@dataclass(frozen=True)
class Reader:
    """One way to read. order: block (shuffled), in-order or both."""

    name: str
    kind: str  # tokens or table
    order: str
    read: Callable[[Path, int, int], Batches]  # folder, batch size, epoch
    role: str = "peer"
    package: str = ""


# --- files ---


def make_tokens(folder: Path, total_bytes: int, peers: Sequence[str]) -> None:
    """The same tokens as slabs, one flat file, and LitData's chunks."""
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / MEAN_DOCUMENT, total_bytes // 4 // MEAN_DOCUMENT)
    tokens = random.integers(0, 50257, int(lengths.sum()), np.int32)
    tokens.tofile(folder / "tokens.bin")
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    convert_to_slabs({"tokens": documents}, folder / "slabs")
    if "litdata" in peers:
        from litdata.streaming.item_loader import TokensLoader

        write_litdata(
            folder / "litdata",
            functools.partial(_tokens_of, str(folder / "tokens.bin")),
            [(low, low + (1 << 20)) for low in range(0, len(tokens), 1 << 20)],
            chunk_size=WINDOW * 16384,
            item_loader=TokensLoader(),
        )


def _tokens_of(path: str, span: tuple[int, int]) -> Any:
    low, high = span
    return torch.from_numpy(np.fromfile(path, np.int32, high - low, offset=4 * low))


def make_table(folder: Path, total_bytes: int, peers: Sequence[str]) -> None:
    """The same columns as slabs, one HDF5 file, arrays and a Parquet file."""
    random = np.random.default_rng(0)
    count = total_bytes // (4 * len(_COLUMNS))
    arrays: dict[str, np.ndarray] = {}
    for name in _COLUMNS:
        whole = random.integers(0, 1 << 20, count, np.int32)
        arrays[name] = whole if name[0] == "i" else (whole / 1024).astype(np.float32)
    convert_to_slabs(arrays, folder / "slabs")
    with h5py.File(folder / "table.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
            array.tofile(folder / f"{name}.bin")
    if "parquet" in peers:
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(arrays)
        parquet.write_table(table, folder / "table.parquet", compression=None, use_dictionary=False)


# --- readers ---

_loaders: dict[tuple[Any, ...], PartitionedLoader] = {}


def _hsgd(kind: str, shuffle: str) -> Callable[[Path, int, int], Batches]:
    def read(folder: Path, batch: int, epoch: int) -> Batches:
        key = (folder, kind, shuffle, batch)
        if key not in _loaders:
            pack = WINDOW if kind == "tokens" else None
            _loaders[key] = PartitionedLoader(folder / "slabs", batch, 0, 1, shuffle, pack=pack)
        _loaders[key].set_epoch(epoch)
        names = ["tokens"] if kind == "tokens" else _COLUMNS
        for found in _loaders[key]:
            yield [found[name] for name in names]

    return read


def _preadv(folder: Path, batch: int, epoch: int) -> Batches:
    """Slabs, without records."""
    (limit,) = (one for one in CANDIDATES if one.name == "preadv")
    for block in limit.read(DataSet(folder, WINDOW * 4, 0), 0, 1, epoch):  # it counts no samples
        yield [block]


def _tokens_memmap(shuffled: bool) -> Callable[[Path, int, int], Batches]:
    """Windows of one flat file, at random places where shuffled: a window is no sample there."""

    def read(folder: Path, batch: int, epoch: int) -> Batches:
        tokens = np.memmap(folder / "tokens.bin", np.int32, "r")
        count = len(tokens) // WINDOW
        random = np.random.default_rng(epoch)
        for low in range(0, count, batch):
            if shuffled:
                starts = random.integers(0, len(tokens) - WINDOW, batch)
                yield [torch.from_numpy(np.stack([tokens[s : s + WINDOW] for s in starts]))]
            else:
                piece = tokens[low * WINDOW : min(low + batch, count) * WINDOW]
                yield [torch.from_numpy(np.array(piece)).view(-1, WINDOW)]

    return read


def _litdata(shuffle: bool) -> Callable[[Path, int, int], Batches]:
    def read(folder: Path, batch: int, epoch: int) -> Batches:
        import litdata
        from litdata.streaming.item_loader import TokensLoader

        stream = litdata.StreamingDataset(
            str(folder / "litdata"), item_loader=TokensLoader(block_size=WINDOW), shuffle=shuffle
        )
        for found in litdata.StreamingDataLoader(stream, batch_size=batch, num_workers=0):
            yield [found]

    return read


def _table_memmap(folder: Path, batch: int, epoch: int) -> Batches:
    types = {name: np.float32 if name[0] == "f" else np.int32 for name in _COLUMNS}
    columns = [np.memmap(folder / f"{name}.bin", types[name], "r") for name in _COLUMNS]
    order = np.random.default_rng(epoch).permutation(len(columns[0]))
    for low in range(0, len(order), batch):
        rows = order[low : low + batch]
        yield [torch.from_numpy(column[rows]) for column in columns]


def _table_h5py(folder: Path, batch: int, epoch: int) -> Batches:
    with h5py.File(folder / "table.h5", "r") as file:
        columns = [file[name] for name in _COLUMNS]
        for low in range(0, len(columns[0]), _ROWS_AT_ONCE):
            slabs = [torch.from_numpy(c[low : low + _ROWS_AT_ONCE]) for c in columns]
            for start in range(0, len(slabs[0]), batch):
                yield [slab[start : start + batch] for slab in slabs]


def _table_parquet(folder: Path, batch: int, epoch: int) -> Batches:
    from pyarrow import parquet

    for found in parquet.ParquetFile(folder / "table.parquet").iter_batches(batch):
        yield [torch.from_numpy(column.to_numpy().copy()) for column in found.columns]


READERS = (
    Reader("hsgd.io", "tokens", "block", _hsgd("tokens", "block"), "hsgd"),
    Reader("hsgd.io in order", "tokens", "in-order", _hsgd("tokens", "none"), "hsgd"),
    Reader("memmap", "tokens", "block", _tokens_memmap(True)),
    Reader("memmap in order", "tokens", "in-order", _tokens_memmap(False)),
    Reader("LitData", "tokens", "block", _litdata(True), package="litdata"),
    Reader("LitData in order", "tokens", "in-order", _litdata(False), package="litdata"),
    Reader("preadv", "tokens", "both", _preadv, "limit"),
    Reader("hsgd.io", "table", "block", _hsgd("table", "block"), "hsgd"),
    Reader("hsgd.io in order", "table", "in-order", _hsgd("table", "none"), "hsgd"),
    Reader("memmap", "table", "block", _table_memmap),
    Reader("h5py slabs", "table", "in-order", _table_h5py),
    Reader("parquet", "table", "in-order", _table_parquet, package="parquet"),
    Reader("preadv", "table", "both", _preadv, "limit"),
)


# --- turns and figures ---


def take_turn(batches: Batches, budget_s: float) -> tuple[float, float, int]:
    """Bytes per second, seconds of processor time per GB, and batches."""
    nbytes = taken = looked = 0
    began, worked = time.perf_counter(), time.process_time()
    for tensors in batches:
        for tensor in tensors:
            flat = tensor.reshape(-1)
            looked += int(flat[:: 4096 // flat.element_size()].sum())
            nbytes += flat.numel() * flat.element_size()
        taken += 1
        if time.perf_counter() - began > budget_s:
            break
    seconds = time.perf_counter() - began
    return nbytes / seconds, (time.process_time() - worked) / max(nbytes, 1) * 1e9, taken


def measure(
    kind: str,
    batch: int,
    folder: Path,
    options: Any,
    found: report.Measured,
    readers: Sequence[Reader] | None = None,
) -> None:
    """All turns of a kind of records with one batch size, into `found`."""
    present = [
        one for one in readers or READERS if one.kind == kind and one.package not in found.left_out
    ]
    turns: dict[str, list[tuple[float, float, int]]] = {one.name: [] for one in present}
    for turn in range(options.rounds + 1):
        for one in list(present):
            try:
                done = take_turn(one.read(folder, batch, turn), options.budget)
            except Exception as error:  # of a peer: the others go on
                found.failures.append(f"{kind}, {one.name}: {type(error).__name__}: {error}")
                present.remove(one)
                continue
            if turn:
                turns[one.name].append(done)
        print(f"{kind}, batches of {batch}: turn {turn} of {options.rounds}", file=sys.stderr)
    for one in present:
        rates, work, _ = zip(*turns[one.name], strict=True)
        found.rows.append(
            {
                "kind": kind,
                "batch": batch,
                "candidate": one.name,
                "role": one.role,
                "order": one.order,
                "gb_per_s": round(statistics.median(rates) / 1e9, 3),
                "cpu_s_per_gb": round(statistics.median(work), 3),
            }
        )


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rates of hsgd.io over those of others."""
    result = {}
    for own in (row for row in rows if row["role"] == "hsgd"):
        others = [r for r in rows if (r["kind"], r["batch"]) == (own["kind"], own["batch"])]
        case = f"{own['kind']}/{own['order']}/b{own['batch']}"
        peers = [r for r in others if r["role"] == "peer" and r["order"] == own["order"]]
        limits = [r for r in others if r["role"] == "limit"]
        for what, against in (("peer", peers), ("limit", limits)):
            if against:
                fastest = max(row["gb_per_s"] for row in against)
                result[f"vs_{what}/{case}"] = float(f"{own['gb_per_s'] / fastest:.3g}")
    return result


def _parser() -> argparse.ArgumentParser:
    parser = report.argument_parser(
        *("Bytes per second of token streams and of tables, to the training loop.", EPILOG),
        quick="32 MB, two short turns",
        program="io_throughput.py --records",
    )
    add = parser.add_argument
    add("--records", action="store_true", help="this benchmark")
    kinds = list(_DEFAULT_BATCHES)
    add("--kinds", nargs="+", choices=kinds, default=kinds, help="default: both")
    add("--batches", nargs="+", type=int, metavar="N", help="sizes (tokens 64 512, table 4096)")
    add("--total", type=int, metavar="MB", help="of data of each kind (default 512)")
    add("--rounds", type=int, help="turns of each candidate (default 5)")
    add("--budget", type=float, default=1.0, metavar="S", help="of one turn (default 1)")
    add("--peers", action="store_true", help="download peers that are not there yet")
    return parser


def _left_out(install: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    leave_out(["litdata"], install, found)
    if importlib.util.find_spec("pyarrow") is None:
        found["parquet"] = "pip install 'hsgd[convert]'"
        print(f"left out: parquet ({found['parquet']})", file=sys.stderr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured."""
    options = report.parse(_parser(), argv)
    total = (options.total or (_QUICK_MB if options.quick else _USUAL_MB)) << 20
    options.rounds = options.rounds or (2 if options.quick else 5)
    found = report.Measured(left_out=_left_out(options.peers))
    makers = {"tokens": make_tokens, "table": make_table}
    with keeping() as stopped, tempfile.TemporaryDirectory(prefix="hsgd-records-") as name:
        for kind in options.kinds:
            folder = Path(name) / kind
            folder.mkdir()
            peers = {one.package for one in READERS} - found.left_out.keys()
            makers[kind](folder, total, sorted(peers))
            for batch in options.batches or _DEFAULT_BATCHES[kind]:
                measure(kind, batch, folder, options, found)
    compared = ratios(found.rows)
    columns = {name: name for name in ("kind", "batch", "candidate", "order")}
    columns |= {"GB/s": "gb_per_s", "CPU s/GB": "cpu_s_per_gb"}
    code = report.finish("io_records", options, found, compared, columns, stopped.code)
    print("  ".join(f"{case}: {ratio}" for case, ratio in compared.items()))
    return code
