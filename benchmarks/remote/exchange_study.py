"""How fast a node gets the slabs of an epoch: from another node's memory, or from the files:
`io_throughput.py --exchange`.

Run by mpirun on virtual nodes, it is the program of the ranks. All nodes share the disk of this
machine, as they would share a file server.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness import report
from harness.layouts import BENCHMARKS
from hsgd.errors import LaunchError

__all__ = ["main"]

_JOB_LIMIT_S = 300.0
_ROW_BYTES = 64 << 10
_SLABS = 32
CANDIDATES = ("comm", "files", "files-cold")
EPILOG = """\
One rank per node, shuffle="slabs", and memory for five eighths of the data: from epoch to epoch
each node needs the part that another one has. A time is that of iter(loader), the largest over the
ranks, after a barrier; candidates take turns, medians count. "comm" is exchange="comm"; "files"
reads what lies in the page cache of this machine, "files-cold" what does not (as root).

Ratios, above 1 is faster: vs_files/LAYOUT is the time of "files" / that of "comm", vs_files-cold
likewise; vs_link is the rate of "comm" / that of a link.

examples:
  python benchmarks/io_throughput.py --exchange --quick
  python benchmarks/io_throughput.py --exchange --rate 10gbit --json exchange.json
"""


def run_rank(folder: str, turns: int, total: int, cold: bool) -> None:
    """The program of a rank: prints seconds and bytes of each turn on rank 0."""
    from hsgd.io import CacheOptions, PartitionedLoader, ReadOptions

    from hsgd import Comm
    from studies.io_files import can_drop_caches, drop_caches

    comm = Comm()
    loaders = {
        name: PartitionedLoader(
            folder, 64, comm.rank, comm.size, "slabs", comm=comm, as_numpy=True,
            read=ReadOptions(window_bytes=total // 64),
            cache=CacheOptions(total * 5 // 8, "comm" if name == "comm" else "files"),
        )
        for name in CANDIDATES
    }  # fmt: skip
    if not cold or comm.allreduce(np.array([not can_drop_caches()], np.int32))[0]:
        del loaders["files-cold"]
    for epoch in range(turns + 1):
        for name, loader in loaders.items():
            loader.set_epoch(epoch)
            before = loader.metrics()
            if name == "files-cold" and comm.rank == 0:
                drop_caches()
            comm.barrier()
            began = time.perf_counter()
            iteration = iter(loader)
            seconds = time.perf_counter() - began
            iteration.close()
            now = loader.metrics()
            came = [now[key] - before[key] for key in ("cache_bytes", "exchanged_bytes")]
            spent = comm.allreduce(np.array([seconds]), op="max")[0]
            moved = comm.allreduce(np.array(came, np.int64))
            if comm.rank == 0 and epoch:  # in the first, all comes from the files
                row = {"way": name, "seconds": float(spent), "bytes": moved.tolist()}
                print(json.dumps(row), flush=True)
    comm.close()


def measure(nodes: int, rate: str, total: int, turns: int, cold: bool) -> list[dict[str, Any]]:
    """Rows of results on `nodes` virtual nodes. Raises LaunchError."""
    from hsgd.io import convert_to_slabs

    from toolkit.cluster import Cluster

    reason = Cluster.reason_unavailable()
    if reason:
        raise LaunchError(reason)
    with tempfile.TemporaryDirectory(prefix="hsgd-exchange-") as place:
        source, folder = Path(place, "data.npy"), Path(place, "slabs")
        rows = np.random.default_rng(0).integers(0, 256, (total // _ROW_BYTES, _ROW_BYTES), "u1")
        np.save(source, rows)
        convert_to_slabs(source, folder, num_slabs=_SLABS, permute=False)
        source.unlink()
        words = ["--rank", str(folder), str(turns), str(total), str(int(cold))]
        with Cluster(nodes, rate) as cluster:
            program = [sys.executable, str(BENCHMARKS / "io_throughput.py"), "--exchange", *words]
            done = cluster.mpirun(nodes, program, timeout_s=_JOB_LIMIT_S)
    if done.returncode:
        raise LaunchError(f"the ranks ended with {done.returncode}: {done.stderr[-500:]}")
    measured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = []
    for name in CANDIDATES:
        mine = [one for one in measured if one["way"] == name]
        if not mine:
            continue
        seconds = statistics.median(one["seconds"] for one in mine)
        read, exchanged = (statistics.median(o["bytes"][k] for o in mine) / nodes for k in (0, 1))
        found.append(
            {
                "candidate": name,
                "layout": f"{nodes}x1@{rate}",
                "seconds": round(seconds, 4),
                "turns": [round(one["seconds"], 4) for one in mine],
                "read_bytes": read,  # per node
                "exchanged_bytes": exchanged,
                "gb_per_s": round((read + exchanged) / seconds / 1e9, 3),
            }
        )
    return found


def ratios(rows: Sequence[dict[str, Any]], rate: str) -> dict[str, float]:
    """Flat figures."""
    by_name = {row["candidate"]: row for row in rows}
    own = by_name.pop("comm", None)
    if own is None:
        return {}
    found = {
        f"vs_{n}/{own['layout']}": row["seconds"] / own["seconds"] for n, row in by_name.items()
    }
    link = int(rate[:-4]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[rate[-4:]] / 8e9
    found[f"vs_link/{own['layout']}"] = own["gb_per_s"] / link
    return {name: round(value, 3) for name, value in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = report.argument_parser(
        *("Slabs from another node's memory, against the files.", EPILOG),
        quick="128 MB, 3 turns",
        program="io_throughput.py --exchange",
    )
    add = parser.add_argument
    add("--exchange", action="store_true", help="this benchmark")
    add("--nodes", type=int, default=2, help="virtual nodes (default 2)")
    add("--rate", default="10gbit", help="of each link, like 1gbit (default 10gbit)")
    add("--total", type=int, metavar="MB", help="of data (default 512)")
    add("--turns", type=int, help="of each candidate (default 7)")
    add("--no-cold", action="store_true", help="leave the page cache of this machine alone")
    add("--rank", nargs=4, help=argparse.SUPPRESS)
    options = report.parse(parser, argv)
    if not re.fullmatch("[1-9][0-9]*[kmg]bit", options.rate):
        parser.error(f"--rate {options.rate}: write it like 1gbit or 500mbit")
    if options.rank:
        folder, *numbers = options.rank
        run_rank(folder, *map(int, numbers))
        return 0
    total = options.total or (128 if options.quick else 512)
    turns = options.turns or (3 if options.quick else 7)
    try:
        rows = measure(options.nodes, options.rate, total << 20, turns, not options.no_cold)
    except LaunchError as error:
        print(f"left out: {error}", file=sys.stderr)
        return 1
    columns: dict[str, Any] = {
        "from": "candidate",
        "ms": lambda row: f"{row['seconds'] * 1e3:.0f}",
        "GB/s per node": lambda row: f"{row['gb_per_s']:.2f}",
    }
    settings = {"nodes": options.nodes, "rate": options.rate, "total_mb": total, "turns": turns}
    document = report.document("io_exchange", settings, ratios(rows, options.rate), rows)
    report.publish(options, document, report.rows_table(rows, columns))
    return 0
