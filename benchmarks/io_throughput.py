"""How fast samples reach the training loop: hsgd.io against h5py, DataLoader, WebDataset and more.

Owns the command line, the turns, and the figures. Candidates are in io_candidates.py, the files in
io_files.py, the packages of peers in io_packages.py. Ranks (io_ranks.py) are processes that stay
from candidate to candidate, so that start-up does not count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import report
from remote import exchange_study, remote_study
from studies import io_records
from studies.io_candidates import CANDIDATES, MEMORY_LIMIT, Candidate, fio_rate
from studies.io_files import SMALL, DataSet, can_drop_caches, drop_caches, make, warm
from studies.io_packages import reason_against
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
--json is written after each case, and when the run is interrupted or its --limit reached: what was
measured by then counts.

Ratios in the JSON, of rates within this run, above 1 is ahead: CASE is STATE/ORDER/SIZE/RANKS.
vs_peer/CASE is hsgd.io / the fastest peer in the same order, vs_NAME/CASE / one peer. vs_limit/CASE
is hsgd.io / preadv of the same bytes into a ring of the same size (warm) or / fio with direct
sequential reads (cold). ORDER-packed compares those that read Blosc's lz4, ORDER-limited is hsgd.io
with a memory_limit of 64 MiB, and vs_memory_limit that / the memory that it gained; ORDER-mapped is
hsgd.io with ReadOptions(mapped=True), against the peers of ORDER. Of opening a
loader: vs_half_a_second is 0.5 s / the time until its first batch, parses_per_job the files that
all ranks together opened with HDF5 / the files that there are: 1 is one parse for the job.

Peers that are not there are installed once, into hsgd's cache: pyfive, h5coro, LitData, SPDL, Grain
and TensorStore. WebDataset, Streaming and hdf5plugin must be in the environment, and FFCV, which is
compiled against OpenCV and Numba. Those that cannot be used are named, with the reason.

--remote measures datasets behind a URL, --exchange slabs of another node, --records token streams
and tables, with options of their own: --remote --help, and so on.

examples:
  python benchmarks/io_throughput.py --quick
  python benchmarks/io_throughput.py --json io.json --png io.png
  python benchmarks/io_throughput.py --sizes 3KB 64KB --np 1 --budget 1 --limit 330 --json warm.json
  python benchmarks/io_throughput.py --state cold --sizes 150KB 4MB --np 1 2 --budget 2 \
      --candidates hsgd hsgd-order loader-2 h5py-slabs --limit 330 --json cold.json
  python benchmarks/io_throughput.py --remote --plain --candidates hsgd-again hsgd-disk-again
"""


@dataclass(frozen=True)
class Case:
    """What is measured together."""

    state: str  # warm or cold
    sample_bytes: int
    ranks: int

    def __str__(self) -> str:
        size = report.size_label(self.sample_bytes)
        return f"{self.state}, samples of {size}, {self.ranks} rank(s)"


class Clock:
    """Says when the time of the whole run is over."""

    def __init__(self, limit_s: float | None) -> None:
        self._end = None if limit_s is None else time.monotonic() + limit_s

    def is_over(self) -> bool:
        """Whether nothing new shall be begun."""
        return self._end is not None and time.monotonic() > self._end


@dataclass
class Found:
    """What was measured so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    openings: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # packages, and why


def measure(
    case: Case,
    data: DataSet,
    chosen: Sequence[Candidate],
    options: argparse.Namespace,
    clock: Clock,
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
                if clock.is_over():
                    return
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
        **{name: round(opening[name], 4) for name in ("open_s", "first_s")},
        "parsed": opening["parsed"],
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
        row["peak_mb"] = round(max(turn["peak_mb"] for turn in turns), 1)  # some keep it
    return row


def ratios(rows: Sequence[dict[str, Any]], openings: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rates of hsgd over those of others in the same case, and what opening and memory cost."""
    found = {}
    for opening in openings:
        size = report.size_label(opening["bytes"])
        case = f"{opening['state']}/{size}/np{opening['ranks']}"
        found[f"parses_per_job/{case}"] = round(sum(opening["parsed"]) / opening["files"], 3)
        found[f"vs_half_a_second/{case}"] = round(0.5 / opening["first_s"], 2)
    for own in [row for row in rows if row["kind"] == "hsgd"]:
        variant = own["variant"]
        where = (own["state"], own["bytes"], own["ranks"])
        size = report.size_label(own["bytes"])
        order = f"{own['order']}-{variant}" if variant else own["order"]
        case = f"{own['state']}/{order}/{size}/np{own['ranks']}"
        same = [r for r in rows if (r["state"], r["bytes"], r["ranks"]) == where]
        rivals = "" if variant == "mapped" else variant
        alike = [r for r in same if (r["order"], r["variant"]) == (own["order"], rivals)]
        peers = [r for r in alike if r["kind"] == "peer"]
        wanted = "preadv" if own["state"] == "warm" else "fio"
        limits = [r for r in same if r["candidate"] == wanted and variant != "packed"]
        if variant == "limited":
            found[f"vs_memory_limit/{case}"] = round(
                MEMORY_LIMIT / 2**20 / max(own["peak_mb"], 1.0), 3
            )
        named = [(f"vs_{r['candidate']}", r) for r in peers] + [("vs_limit", r) for r in limits]
        if peers:
            named.append(("vs_peer", max(peers, key=lambda r: r["samples_per_s"])))
        for name, other in named:
            found[f"{name}/{case}"] = round(own["samples_per_s"] / other["samples_per_s"], 3)
    return found


def tables(doc: dict[str, Any]) -> str:
    """The document as text, a table for each case."""
    parts = []
    rows = doc["results"]
    cases = {Case(row["state"], row["bytes"], row["ranks"]): None for row in rows}
    for case in cases:
        lines = [
            [
                row["label"],
                row["order"],
                f"{row['samples_per_s']:,.0f}",
                f"{row['gb_per_s']:.2f}",
                f"{row['first_s'] * 1e3:.0f}" if "first_s" in row else "-",
                f"{row['peak_mb']:.0f}" if "peak_mb" in row else "-",
            ]
            for row in rows
            if Case(row["state"], row["bytes"], row["ranks"]) == case
        ]
        header = ["candidate", "order", "samples/s", "GB/s", "first batch, ms", "memory, MB"]
        parts += [str(case), report.table(header, lines)]
    for row in doc["openings"]:
        parts.append(
            f"{Case(row['state'], row['bytes'], row['ranks'])}: opened in "
            f"{row['open_s'] * 1e3:.0f} ms, first batch after {row['first_s'] * 1e3:.0f} ms; of "
            f"{row['files']} files the ranks parsed {row['parsed']}"
        )
    return "\n".join(parts)


def plot(doc: dict[str, Any], target: Path) -> None:
    """Bars of GB/s by sample size, for the first state and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = doc["results"][0]
    rows = [
        r for r in doc["results"] if (r["state"], r["ranks"]) == (first["state"], first["ranks"])
    ]
    sizes = sorted({row["bytes"] for row in rows})
    labels = list(dict.fromkeys(row["label"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 4.8), layout="constrained")
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        points = [(sizes.index(r["bytes"]), r["gb_per_s"]) for r in rows if r["label"] == label]
        places = [place + (number - len(labels) / 2) * width for place, _ in points]
        axes.bar(places, [value for _, value in points], width, label=label)
    axes.set_xticks(range(len(sizes)), [report.size_label(size) for size in sizes])
    axes.set_yscale("log")
    axes.set_ylabel("GB/s reaching the loop")
    axes.set_xlabel(f"bytes per sample, {first['state']}, {first['ranks']} rank(s)")
    axes.legend(fontsize=8, frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Samples per second from files to the training loop.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two sizes, 256 MB, warm, few turns: under a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--png", type=Path, metavar="FILE", help="plot the first state there")
    add("--sizes", nargs="+", metavar="SIZE", help="bytes per sample (3KB 64KB 150KB 4MB)")
    add("--total", type=int, metavar="MB", help="of data, warm (default 1024)")
    add("--cold-total", type=int, metavar="MB", help="of data, cold (default 4096)")
    add("--limit", type=float, metavar="S", help="begin nothing new after so many seconds")
    add("--np", nargs="+", type=int, metavar="N", help="ranks (default 1 2 4)")
    add("--state", nargs="+", choices=("warm", "cold"), help="of the page cache (default warm)")
    add("--rounds", type=int, help="turns of each candidate (default 5)")
    add("--budget", type=float, metavar="S", help="of one turn (default 3)")
    known = ", ".join(c.name for c in CANDIDATES)
    add("--candidates", nargs="+", metavar="NAME", help=f"of {known}")
    add("--copy", action="store_true", help="the loop copies each batch, instead of touching pages")
    add("--peers", action="store_true", help="download peers that are not there yet")
    add("--folder", type=Path, help="where data is made and kept; default: a temporary one")
    return parser


def _settings(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    quick = options.quick
    try:
        sizes = options.sizes or (["3KB", "64KB"] if quick else ["3KB", "64KB", "150KB", "4MB"])
        options.sizes = [report.read_size(text) for text in sizes]
    except ValueError as error:
        parser.error(str(error))
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
    options.cold_total = options.cold_total or (256 if quick else 4096)
    options.np = options.np or ([1] if quick else [1, 2, 4])
    options.rounds = options.rounds or (2 if quick else 5)
    options.budget = options.budget or (0.4 if quick else 3.0)
    return options


def _measure_all(options: argparse.Namespace, chosen: Sequence[Candidate], found: Found) -> None:
    """All cases, and the files that they need."""
    clock = Clock(options.limit)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hsgd-io-"))
    totals = {"warm": options.total, "cold": options.cold_total}
    try:
        for sample_bytes in options.sizes:
            for state in options.state:
                if clock.is_over():
                    return
                place = folder / f"{report.size_label(sample_bytes)}-{totals[state]}"
                kinds = {"slabs", *(c.files for c in chosen)}
                data = make(place, sample_bytes, totals[state] << 20, kinds)
                for ranks in options.np:
                    if not clock.is_over():
                        case = Case(state, sample_bytes, ranks)
                        measure(case, data, chosen, options, clock, found)
                        _write(options, found)
                if options.folder is None:
                    shutil.rmtree(place, ignore_errors=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def usable(chosen: Sequence[Candidate], install: bool, left_out: dict[str, str]) -> list[Candidate]:
    """Those that can read here; packages that the others need go to `left_out`, with the reason."""
    for name in sorted({name for candidate in chosen for name in candidate.packages()}):
        if reason := reason_against(name, install):
            left_out[name] = reason
            print(f"left out: {name} ({reason})", file=sys.stderr)
    return [c for c in chosen if not c.packages() & left_out.keys()]


def _write(options: argparse.Namespace, found: Found, stopped: int = 0) -> dict[str, Any]:
    """The document, into the JSON file too when one is wanted."""
    settings = {
        "sizes": options.sizes,
        "total_mb": options.total,
        "cold_total_mb": options.cold_total,
        "rounds": options.rounds,
        "budget_s": options.budget,
        "limit_s": options.limit,
        "copy": options.copy,
    }
    meta = {
        **report.facts("io_throughput"),
        "settings": settings,
        "interrupted": bool(stopped),
    }
    doc = {
        "meta": meta,
        "ratios": ratios(found.rows, found.openings),
        "left_out": found.left_out,
        "failures": found.failures,
        "openings": found.openings,
        "results": found.rows,
    }
    if options.json:
        report.write_json(options.json, json.loads(json.dumps(doc)))
    return doc


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured, 130 or 143 when it was
    interrupted: what had been measured is shown and written.
    """
    options = _settings(argv)
    names = options.candidates or [c.name for c in CANDIDATES if not options.quick or c.quick]
    chosen = [c for c in CANDIDATES if c.name in names]
    found = Found()
    stopped = 0
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        chosen = usable(chosen, options.peers, found.left_out)
        _measure_all(options, chosen, found)
    except KeyboardInterrupt:
        stopped = 130
    except SystemExit as request:
        stopped = int(request.code or 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    if stopped:
        print("interrupted; this is what had been measured", file=sys.stderr)
    doc = _write(options, found, stopped)
    if found.rows:
        print(tables(doc))
    for line in found.failures:
        print(f"failed: {line}", file=sys.stderr)
    if options.png and found.rows:
        plot(doc, options.png)
    return stopped or (0 if found.rows else 1)


if __name__ == "__main__":
    others = {"--remote": remote_study.main, "--exchange": exchange_study.main}
    others["--records"] = io_records.main
    sys.exit(next((run for word, run in others.items() if word in sys.argv), main)())
