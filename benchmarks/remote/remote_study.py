"""How fast samples behind a URL reach the loop: hsgd.io, LitData, Streaming, h5py over fsspec
and s3fs: `io_throughput.py --remote`.

The readers are in workers/remote_reader.py, each turn of them a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hsgd.io import convert_to_slabs

from harness import report
from harness.layouts import rank_command
from harness.stopping import keeping
from studies.io_files import LITDATA_ROWS, rows_of_one, write_litdata, write_mds
from studies.io_packages import leave_out
from toolkit import range_server
from toolkit.cluster import Cluster
from toolkit.processes import CommandTimeout, run_marked
from workers.remote_reader import BATCH_SIZE, BUCKET, FETCHED, FROM_FILES, READERS, SECOND_EPOCHS

__all__ = ["main"]

EPILOG = """\
A virtual node with a link of --rate reads from a server of ranges (toolkit.range_server)
behind that link; with --plain both are this machine. Candidates take turns, each a process of its
own, where the import of torch and hsgd does not count; the time from then includes opening. Rates
are samples per second of which every byte was summed up, medians of --rounds; what was read whole
is compared with the file. LitData and Streaming read the same samples from S3's interface of the
same server, without workers, with an empty cache on disk, which hsgd-disk has too. Candidates
"...-again" are measured in the second epoch, those with "full" shuffle single samples, and those
with "files" read the slab folder itself; they run where --candidates names them.

Ratios in the JSON, within this run, above 1 is ahead; LINK is the rate, or "plain":
vs_peer/ORDER/LINK is hsgd.io / the fastest peer in that order, vs_limit/ORDER/LINK hsgd.io / ranges
of 4 MiB in four threads of http.client, vs_link/ORDER/LINK its bytes per second after the first
batch / those of the link without headers, vs_one_second/LINK 1 s / the time until its first
shuffled batch, opening included.

examples:
  python benchmarks/io_throughput.py --remote --quick
  python benchmarks/io_throughput.py --remote --json remote.json
  python benchmarks/io_throughput.py --remote --plain --candidates hsgd-again hsgd-disk-again \\
      hsgd-files-again
"""
_PEERS = {
    "block": ("litdata", "streaming"),
    "in-order": ("litdata-order", "streaming-order", "h5py-fsspec", "h5py-s3fs"),
}
_OWN = {"block": "hsgd", "in-order": "hsgd-order"}
_DEFAULT = [name for name in READERS if name not in SECOND_EPOCHS]
_TURN_S = 120.0


@dataclass
class Found(report.Measured):
    """turns: by candidate."""

    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """Where a server is, and how a command runs where the readers are."""

    url: str
    folder: Path  # that the server serves
    link: str
    cluster: Cluster | None

    def run(self, words: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run where readers are. Raises CommandTimeout."""
        credentials = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
        credentials["AWS_ALLOW_HTTP"] = "true"  # LitData with obstore
        environment = {**os.environ, **credentials, "OMP_NUM_THREADS": "1"}
        if self.cluster is None:
            return run_marked(list(words), environment, timeout_s)
        return self.cluster.run(words, node=1, env=credentials, timeout_s=timeout_s)


@contextlib.contextmanager
def serve(folder: Path, rate: str | None) -> Iterator[Site]:
    """A server of `folder`, behind a link of `rate` where one is given."""
    words = [sys.executable, range_server.__file__, str(folder)]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(1, rate)) if rate else None
        if cluster is not None:
            words = cluster.command([*words, "--host", "10.99.0.254"])
        server = stack.enter_context(
            subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=None if cluster is None else cluster.environment(),
            )
        )
        try:
            assert server.stdout is not None
            yield Site(server.stdout.readline().strip(), folder, rate or "plain", cluster)
        finally:
            server.kill()


def make_files(folder: Path, sample_bytes: int, total_bytes: int, peers: Sequence[str]) -> int:
    """The same samples in our forms and those of peers; the sum of their bytes."""
    home = folder / BUCKET
    home.mkdir()
    count = max(256, total_bytes // sample_bytes)
    rows = np.random.default_rng(0).integers(0, 256, (count, sample_bytes), np.uint8)
    rows.tofile(home / "plain.bin")
    with h5py.File(home / "one.h5", "w") as file:
        file["data"] = rows
    convert_to_slabs({"data": rows}, home / "slabs")
    if "streaming" in peers:
        write_mds(home / "mds", {"data": "bytes"}, ({"data": row.tobytes()} for row in rows))
    if "litdata" in peers:
        produce = functools.partial(rows_of_one, str(home / "one.h5"), count)
        write_litdata(home / "litdata", produce, list(range(0, count, LITDATA_ROWS)))
    return int(rows.sum(dtype=np.int64))


def measure(site: Site, names: Sequence[str], digest: int, options: Any, found: Found) -> None:
    """All turns of all candidates into `found`."""
    for turn in range(options.rounds):
        for name in names:
            place = site.folder if name in FROM_FILES else site.url
            words = [name, str(place), str(options.sample_bytes), str(options.budget)]
            try:
                done = site.run(rank_command("remote_reader", *words), options.budget + _TURN_S)
            except CommandTimeout as error:
                found.failures.append(f"{name}: {str(error).splitlines()[0]}")
                continue
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                errors = [line for line in lines if "Error: " in line]  # some have several lines
                found.failures.append(f"{name}: {(errors or lines)[-1]}")
                continue
            one = json.loads(done.stdout.strip().splitlines()[-1])
            if one["digest"] not in (None, digest):
                found.failures.append(f"{name}: wrong samples, their sum is {one['digest']}")
                continue
            found.turns.setdefault(name, []).append(one)
        print(f"{site.link}: turn {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)


def rows_of(found: Found, sample_bytes: int) -> list[dict[str, Any]]:
    """A row for each candidate."""
    rows = []
    for name, turns in found.turns.items():
        rates = [turn["samples"] / turn["seconds"] for turn in turns]
        nbytes = sample_bytes * sum(turn["samples"] for turn in turns)
        later = [
            (turn["samples"] - BATCH_SIZE) / (turn["seconds"] - turn["first_s"]) for turn in turns
        ]
        rows.append(
            {
                "candidate": name,
                "samples_per_s": round(statistics.median(rates), 1),
                "mb_per_s": round(statistics.median(rates) * sample_bytes / 1e6, 2),
                "mb_per_s_later": round(statistics.median(later) * sample_bytes / 1e6, 2),
                "first_s": round(statistics.median(turn["first_s"] for turn in turns), 3),
                "cpu_s_per_gb": round(sum(turn["cpu_s"] for turn in turns) / nbytes * 1e9, 2),
                "rates": [round(rate, 1) for rate in rates],
            }
        )
    return rows


def ratios(rows: Sequence[dict[str, Any]], link: str) -> dict[str, float]:
    """Rates of hsgd.io over those of others."""
    rate = {row["candidate"]: row["mb_per_s"] for row in rows}
    later = {row["candidate"]: row["mb_per_s_later"] for row in rows}
    found = {}
    for order, own in _OWN.items():
        if own not in rate:
            continue
        peers = [rate[name] for name in _PEERS[order] if name in rate]
        if peers:
            found[f"vs_peer/{order}/{link}"] = round(rate[own] / max(peers), 3)
        if "ranges" in rate:
            found[f"vs_limit/{order}/{link}"] = round(rate[own] / rate["ranges"], 3)
        if link.endswith("gbit"):
            of_link = float(link.removesuffix("gbit")) * 125
            found[f"vs_link/{order}/{link}"] = round(later[own] / of_link, 3)
    for row in rows:
        if row["candidate"] == "hsgd":
            found[f"vs_one_second/{link}"] = round(1 / row["first_s"], 3)
    return found


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.argument_parser(
        *("Samples per second from a server to the training loop.", EPILOG),
        quick="64 MB, one turn",
        program="io_throughput.py --remote",
    )
    add = parser.add_argument
    add("--remote", action="store_true", help="this benchmark")
    add("--sample-bytes", type=int, default=65536, metavar="N", help="default: 65536")
    add("--total", type=int, metavar="MB", help="of data (default 512)")
    add("--rounds", type=int, help="turns of each candidate (default 3)")
    add("--budget", type=float, default=30.0, metavar="S", help="of one turn (default 30)")
    add("--rate", default="1gbit", help="of the link (default 1gbit); needs root")
    add("--plain", action="store_true", help="no link: the server and the loop are this machine")
    add("--candidates", nargs="+", metavar="NAME", choices=list(READERS), help=", ".join(READERS))
    add("--peers", action="store_true", help="download peers that are not there yet")
    options = report.parse(parser, argv)
    options.total = options.total or (64 if options.quick else 512)
    options.rounds = options.rounds or (1 if options.quick else 3)
    if not options.plain and (reason := Cluster.reason_unavailable()):
        parser.error(f"{reason}; --plain needs no virtual nodes")
    return options


def _usable(names: Sequence[str], found: Found, *, install: bool) -> list[str]:
    """Those whose packages are here; the others are named in `found`."""
    wanted = [peer for peer in FETCHED if any(peer in name for name in names)]
    leave_out(wanted, install, found.left_out)
    if any(name.startswith("h5py-") for name in names):
        missing = [n for n in ("fsspec", "aiohttp") if importlib.util.find_spec(n) is None]
        if missing:
            found.left_out["h5py"] = f"pip install {' '.join(missing)}"
            print(f"left out: h5py ({found.left_out['h5py']})", file=sys.stderr)
    return [n for n in names if not any(left in n for left in found.left_out)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured."""
    options = _read(argv)
    rate = None if options.plain else options.rate
    found = Found()
    with keeping() as stopped, tempfile.TemporaryDirectory(prefix="hsgd-remote-") as folder:
        names = _usable(options.candidates or _DEFAULT, found, install=options.peers)
        digest = make_files(
            Path(folder),
            options.sample_bytes,
            options.total << 20,
            [peer for peer in FETCHED if any(peer in name for name in names)],
        )
        with serve(Path(folder), rate) as site:
            measure(site, names, digest, options, found)
    found.rows = rows_of(found, options.sample_bytes)
    columns = {
        "candidate": "candidate",
        "samples/s": "samples_per_s",
        "MB/s": "mb_per_s",
        "after the first batch": "mb_per_s_later",
        "first batch, s": "first_s",
        "CPU s/GB": "cpu_s_per_gb",
    }
    found_ratios = ratios(found.rows, rate or "plain")
    return report.finish("io_remote", options, found, found_ratios, columns, stopped.code)
