"""How fast samples reach the training loop: hsgd.io against h5py, DataLoader, WebDataset and more.

Candidates are in io_candidates.py, the files in io_files.py, the packages of peers in
io_packages.py. Ranks (io_ranks.py) are processes that stay from candidate to candidate, so that
start-up does not count.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import report
from harness.stopping import keeping
from remote import exchange_study, remote_study
from studies import io_chunks, io_records
from studies.io_candidates import CANDIDATES, fio_rate
from studies.io_files import SMALL, DataSet, can_drop_caches, drop_caches, make, warm
from studies.io_packages import Candidate, usable
from workers.io_ranks import Ranks

__all__ = ["main"]

EPILOG = """\
A rate is samples per second that reached the loop as uint8 tensors in batches of 64, of which one
byte in 4 KiB was summed up; over all ranks, from a common start. Candidates take turns, --rounds
times after one that does not count; medians count. Who takes longer than --budget seconds for a
turn is stopped there, and the rate until then counts. Before the first turn each one's first rows
are compared with the HDF5 file. Before cold turns the page cache is dropped (as root). WebDataset,
Streaming, LitData, h5coro, ArrayRecord and TensorStore's shuffled rows have a quarter of the same
samples, at most 256 MB, warm alone.
--json is written after each case, and when the run is interrupted, with what was measured by then.

Ratios in the JSON, of rates within this run, above 1 is ahead: CASE is STATE/ORDER/SIZE/RANKS.
vs_peer/CASE is hsgd.io / the fastest peer in the same order, vs_NAME/CASE / one peer. vs_limit/CASE
is hsgd.io / preadv of the same bytes into a ring of the same size (warm) or / fio with direct
sequential reads (cold). ORDER-packed compares those that read Blosc's lz4; ORDER-mapped is hsgd.io
with ReadOptions(mapped=True), against the peers of ORDER. Of opening a loader: vs_half_a_second is
0.5 s / the time until its first batch.

Peers that are not there are installed once, into hsgd's cache: pyfive, h5coro, LitData, SPDL, Grain
and TensorStore. WebDataset, Streaming and hdf5plugin must be in the environment. Those that cannot
be used are named, with the reason.

--remote measures datasets behind a URL, --exchange slabs of another node, --records token streams
and tables, --chunks compressed chunks, with options of their own: --remote --help, and so on.

examples:
  python benchmarks/io_throughput.py --quick
  python benchmarks/io_throughput.py --json io.json --png io.png
  python benchmarks/io_throughput.py --sizes 3KB 64KB --np 1 --budget 1 --json warm.json
  python benchmarks/io_throughput.py --state cold --sizes 150KB 4MB --np 1 2 --budget 2 \
      --candidates hsgd hsgd-order loader-2 h5py-slabs --json cold.json
  python benchmarks/io_throughput.py --remote --plain --candidates hsgd-again hsgd-disk-again
"""
SIZES = (3 << 10, 64 << 10, 150 << 10, 4 << 20)


@dataclass(frozen=True)
class Case:
    """What is measured together."""

    state: str  # warm or cold
    sample_bytes: int
    ranks: int

    def __str__(self) -> str:
        size = report.size_label(self.sample_bytes)
        return f"{self.state}, samples of {size}, {self.ranks} rank(s)"


@dataclass
class Found(report.Measured):
    """What was measured so far."""

    openings: list[dict[str, Any]] = field(default_factory=list)


def measure(
    case: Case,
    data: DataSet,
    chosen: Sequence[Candidate],
    options: argparse.Namespace,
    found: Found,
) -> None:
    """All turns of one case into `found`, also when they are broken off."""
    cold = case.state == "cold"
    present = [c for c in chosen if not (cold and c.files in SMALL)]
    turns: dict[str, list[dict[str, float]]] = {c.name: [] for c in present}
    limits: list[float | None] = []
    ranks = Ranks(case.ranks)
    try:
        try:
            found.openings.append(_opening(case, data, ranks))
        except (RuntimeError, TimeoutError, EOFError) as error:
            found.failures.append(f"opening, {case}: {error}")
            ranks.close()
            ranks = Ranks(case.ranks)
        for turn in range(options.rounds + 1):  # of the first, the rate is not counted
            for candidate in [c for c in present if c.name in turns]:
                drop_caches() if cold else warm(data, candidate.files)
                try:
                    if turn == 0 and candidate.kind != "limit":
                        ranks.check(candidate.name, data)
                    one = ranks.turn(candidate.name, data, turn, options.budget, options.copy)
                except (RuntimeError, TimeoutError, EOFError) as error:
                    found.failures.append(f"{candidate.name}, {case}: {error}")
                    del turns[candidate.name]
                    ranks.close()
                    ranks = Ranks(case.ranks)
                    continue
                turns[candidate.name].append(one)
            if cold and turn:
                drop_caches()
                limits.append(fio_rate(data))
            print(f"{case}: turn {turn} of {options.rounds}", file=sys.stderr, flush=True)
    finally:
        ranks.close()
        found.rows += [
            _row(case, c, turns[c.name]) for c in present if len(turns.get(c.name, [])) > 1
        ]
        rates = [{"samples_per_s": rate / case.sample_bytes} for rate in limits if rate]
        if rates:
            fio = Candidate("fio", "fio", "limit", "both", "slabs", lambda *_: iter(()))
            found.rows.append(_row(case, fio, [{}, *rates]))


def _opening(case: Case, data: DataSet, ranks: Ranks) -> dict[str, Any]:
    """What it takes until a job has its first batches."""
    if case.state == "cold":
        drop_caches()
    else:
        warm(data, "slabs")
    opening = ranks.open(data)
    return {
        "state": case.state,
        "bytes": case.sample_bytes,
        "ranks": case.ranks,
        "files": len(data.files("slabs")),
        **{name: round(value, 4) for name, value in opening.items()},
    }


def _row(case: Case, candidate: Candidate, turns: list[dict[str, float]]) -> dict[str, Any]:
    rates = [turn["samples_per_s"] for turn in turns[1:]]
    median = statistics.median(rates)
    row: dict[str, Any] = {
        "candidate": candidate.name,
        "label": candidate.label,
        "kind": candidate.kind,
        "order": candidate.order,
        "variant": candidate.variant,
        "state": case.state,
        "bytes": case.sample_bytes,
        "ranks": case.ranks,
        "samples_per_s": round(median, 1),
        "gb_per_s": round(median * case.sample_bytes / 1e9, 3),
        "rates": [round(rate, 1) for rate in rates],
    }
    if "first_s" in turns[-1]:
        row["first_s"] = round(max(turn["first_s"] for turn in turns[1:]), 4)
    return row


def ratios(rows: Sequence[dict[str, Any]], openings: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rates of hsgd over those of others in the same case, and what opening and memory cost."""
    found = {}
    for opening in openings:
        size = report.size_label(opening["bytes"])
        case = f"{opening['state']}/{size}/np{opening['ranks']}"
        found[f"vs_half_a_second/{case}"] = round(0.5 / opening["first_s"], 2)
    cases = report.grouped(rows, "state", "bytes", "ranks")
    for own in [row for row in rows if row["kind"] == "hsgd"]:
        variant = own["variant"]
        size = report.size_label(own["bytes"])
        order = f"{own['order']}-{variant}" if variant else own["order"]
        case = f"{own['state']}/{order}/{size}/np{own['ranks']}"
        same = cases[own["state"], own["bytes"], own["ranks"]]
        rivals = "" if variant == "mapped" else variant
        alike = [r for r in same if (r["order"], r["variant"]) == (own["order"], rivals)]
        peers = [r for r in alike if r["kind"] == "peer"]
        wanted = "preadv" if own["state"] == "warm" else "fio"
        limits = [r for r in same if r["candidate"] == wanted and variant != "packed"]
        named = [(f"vs_{r['candidate']}", r) for r in peers] + [("vs_limit", r) for r in limits]
        if peers:
            named.append(("vs_peer", max(peers, key=lambda r: r["samples_per_s"])))
        for name, other in named:
            found[f"{name}/{case}"] = round(own["samples_per_s"] / other["samples_per_s"], 3)
    return found


def tables(doc: Mapping[str, Any]) -> str:
    """The document as text, a table for each case."""
    columns: dict[str, Any] = {
        "candidate": "label",
        "order": "order",
        "samples/s": lambda row: f"{row['samples_per_s']:,.0f}",
        "GB/s": lambda row: f"{row['gb_per_s']:.2f}",
        "first batch, ms": lambda row: f"{row['first_s'] * 1e3:.0f}" if "first_s" in row else "-",
    }
    parts = []
    for case, rows in report.grouped(doc["results"], "state", "bytes", "ranks").items():
        parts += [str(Case(*case)), report.rows_table(rows, columns)]
    for row in doc["openings"]:
        parts.append(
            f"{Case(row['state'], row['bytes'], row['ranks'])}: opened in "
            f"{row['open_s'] * 1e3:.0f} ms, first batch after {row['first_s'] * 1e3:.0f} ms"
        )
    return "\n".join(parts)


def plot(doc: Mapping[str, Any], target: Path) -> None:
    """Bars of GB/s, a column for each case."""
    heights = {"GB/s reaching the loop": lambda row: row["gb_per_s"]}
    report.plot_bars(doc["results"], target, heights, by=("state", "bytes", "ranks"))


def _settings(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.argument_parser(
        *("Samples per second from files to the training loop.", EPILOG),
        quick="two sizes, 256 MB, warm, few turns: under a minute",
        png="plot there",
    )
    add = parser.add_argument
    add("--sizes", nargs="+", metavar="SIZE", help="bytes per sample (3KB 64KB 150KB 4MB)")
    add("--total", type=int, metavar="MB", help="of data, warm (default 1024)")
    add("--np", nargs="+", type=int, metavar="N", help="ranks (default 1 2 4)")
    add("--state", nargs="+", choices=("warm", "cold"), help="of the page cache (default warm)")
    add("--rounds", type=int, help="turns of each candidate (default 5)")
    add("--budget", type=float, metavar="S", help="of one turn (default 3)")
    known = ", ".join(c.name for c in CANDIDATES)
    add("--candidates", nargs="+", metavar="NAME", help=f"of {known}")
    add("--copy", action="store_true", help="the loop copies each batch, instead of touching pages")
    add("--peers", action="store_true", help="download peers that are not there yet")
    add("--folder", type=Path, help="where data is made and kept; default: a temporary one")
    options = report.parse(parser, argv, sizes=report.read_size)
    quick = options.quick
    options.sizes = options.sizes or list(SIZES[: 2 if quick else None])
    names = {candidate.name for candidate in CANDIDATES}
    unknown = set(options.candidates or ()) - names
    if unknown:
        parser.error(
            f"no candidate {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}"
        )
    options.state = options.state or ["warm"]
    if "cold" in options.state and not can_drop_caches():
        parser.error("--state cold: only root may drop the page cache")
    options.total = options.total or (256 if quick else 1024)
    options.np = options.np or ([1] if quick else [1, 2, 4])
    options.rounds = options.rounds or (2 if quick else 5)
    options.budget = options.budget or (0.4 if quick else 3.0)
    return options


def _measure_all(options: argparse.Namespace, chosen: Sequence[Candidate], found: Found) -> None:
    """All cases, and the files that they need."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hsgd-io-"))
    totals = {"warm": options.total, "cold": options.total * (1 if options.quick else 4)}
    try:
        for sample_bytes in options.sizes:
            for state in options.state:
                place = folder / f"{report.size_label(sample_bytes)}-{totals[state]}"
                kinds = {"slabs", *(c.files for c in chosen)}
                data = make(place, sample_bytes, totals[state] << 20, kinds)
                for ranks in options.np:
                    case = Case(state, sample_bytes, ranks)
                    measure(case, data, chosen, options, found)
                    if options.json:
                        report.write_json(options.json, _document(options, found))
                if options.folder is None:
                    shutil.rmtree(place, ignore_errors=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def _document(options: argparse.Namespace, found: Found, stopped: int = 0) -> dict[str, Any]:
    compared = ratios(found.rows, found.openings)
    return report.document(
        *("io_throughput", vars(options), compared, found.rows, found.failures, stopped),
        left_out=found.left_out,
        openings=found.openings,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured."""
    options = _settings(argv)
    names = options.candidates or [c.name for c in CANDIDATES if not options.quick or c.quick]
    chosen = [c for c in CANDIDATES if c.name in names]
    found = Found()
    with keeping() as stopped:
        chosen = usable(chosen, options.peers, found.left_out)
        _measure_all(options, chosen, found)
    doc = _document(options, found, stopped.code)
    report.publish(options, doc, tables(doc), plot)
    return stopped.code or (0 if found.rows else 1)


if __name__ == "__main__":
    others = {"--remote": remote_study.main, "--exchange": exchange_study.main}
    others |= {"--records": io_records.main, "--chunks": io_chunks.main}
    sys.exit(next((run for word, run in others.items() if word in sys.argv), main)())
