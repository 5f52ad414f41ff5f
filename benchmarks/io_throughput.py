"""How fast samples reach the training loop: hsgd.io against h5py, DataLoader, WebDataset and more.

Owns the command line, the turns, and the figures. Candidates are in io_candidates.py, the files in
io_files.py. Ranks are processes that stay from candidate to candidate, so that start-up does not
count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from io_candidates import CANDIDATES, Candidate, fio_rate
from io_files import SMALL, DataSet, available, can_drop_caches, drop_caches, make, warm

__all__ = ["main"]

_START_S, _RUN_S = 120.0, 300.0
EPILOG = """\
A rate is samples per second that reached the loop as uint8 tensors in batches of 64, of which one
byte in 4 KiB was summed up; over all ranks, from a common start. Candidates take turns, --rounds
times; medians count. Who takes longer than --budget seconds for a turn is stopped there, and the
rate until then counts. Before cold turns the page cache is dropped (as root); WebDataset and
Streaming read a quarter of the same samples, at most 256 MB, warm alone.

Ratios in the JSON, of rates within this run, above 1 is ahead: CASE is STATE/ORDER/SIZE/RANKS.
vs_peer/CASE is hsgd.io / the fastest peer in the same order, vs_NAME/CASE / one peer. vs_limit/CASE
is hsgd.io / preadv of the same bytes into a ring of the same size (warm) or / fio with direct
sequential reads (cold).

FFCV is compared where `import ffcv` works; its wheel has to be compiled against OpenCV and Numba.

examples:
  python benchmarks/io_throughput.py --quick
  python benchmarks/io_throughput.py --json io.json --png io.png
  python benchmarks/io_throughput.py --state cold --sizes 150KB --total 4096 --candidates hsgd
"""


@dataclass(frozen=True)
class Case:
    """What is measured together."""

    state: str  # warm or cold
    sample_bytes: int
    ranks: int


class Ranks:
    """The processes: each delivers its part of a candidate's samples when told."""

    def __init__(self, ranks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._barrier = spawn.Barrier(ranks)
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_rank_main, args=(rank, ranks, self._barrier, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(_START_S)

    def turn(self, name: str, data: DataSet, epoch: int, budget_s: float) -> dict[str, float]:
        """One pass over the data, or as far as the budget goes."""
        for pipe in self._pipes:
            pipe.send((name, data, epoch, budget_s))
        found = self._answers(_RUN_S)
        return {
            "samples_per_s": sum(a["samples"] for a in found) / max(a["seconds"] for a in found),
            "first_s": max(a["first_s"] for a in found),
            "peak_mb": max(a["peak_mb"] for a in found),
        }

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def _answers(self, timeout_s: float) -> list[dict[str, float]]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise RuntimeError(answer)
            answers.append(answer)
        return answers


def _rank_main(rank: int, ranks: int, barrier: Any, pipe: Any) -> None:
    """Body of a process: turns until the pipe is closed."""
    import torch

    torch.set_num_threads(1)
    known = {candidate.name: candidate for candidate in CANDIDATES}
    pipe.send({})
    while True:
        try:
            name, data, epoch, budget_s = pipe.recv()
        except EOFError:
            return
        try:
            barrier.wait(_START_S)
            pipe.send(_deliver(known[name].read(data, rank, ranks, epoch), budget_s))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _deliver(batches: Any, budget_s: float) -> dict[str, float]:
    """Take batches, touch them, and count."""
    before_mb = _restart_peak()
    began = time.perf_counter()
    first_s, samples, touched = 0.0, 0, 0
    for batch in batches:
        first_s = first_s or time.perf_counter() - began
        touched += int(batch.view(-1)[::4096].sum())
        samples += len(batch)
        if time.perf_counter() - began > budget_s:
            break
    seconds = time.perf_counter() - began
    return {
        "samples": samples,
        "seconds": seconds,
        "first_s": first_s,
        "peak_mb": max(0.0, _memory_mb("VmHWM") - before_mb),
        "touched": touched,
    }


def _restart_peak() -> float:
    """Begin a new peak of the resident memory; what it is now, in MB."""
    Path("/proc/self/clear_refs").write_text("5\n")
    return _memory_mb("VmRSS")


def _memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measure(
    case: Case, data: DataSet, chosen: Sequence[Candidate], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """All turns of one case: rows of results, and what failed."""
    failures: dict[str, str] = {}
    turns: dict[str, list[dict[str, float]]] = {}
    limits = []
    cold = case.state == "cold"
    present = [c for c in chosen if available(c.files) and not (cold and c.files in SMALL)]
    ranks = Ranks(case.ranks)
    try:
        for turn in range(options.rounds + 1):  # the first is not counted
            for candidate in (c for c in present if c.name not in failures):
                drop_caches() if cold else warm(data, candidate.files)
                try:
                    found = ranks.turn(candidate.name, data, turn, options.budget)
                except (RuntimeError, TimeoutError, EOFError) as error:
                    failures[candidate.name] = f"{candidate.name}, {case}: {error}"
                    ranks.close()
                    ranks = Ranks(case.ranks)
                    continue
                if turn:
                    turns.setdefault(candidate.name, []).append(found)
            if cold and turn:
                drop_caches()
                limits.append(fio_rate(data))
    finally:
        ranks.close()
    rows = [_row(case, c, turns[c.name]) for c in present if c.name in turns]
    rates = [rate / case.sample_bytes for rate in limits if rate]
    if rates:
        fio = Candidate("fio", "fio", "limit", "both", "slabs", lambda *_: iter(()))
        rows.append(_row(case, fio, [{"samples_per_s": rate} for rate in rates]))
    return rows, list(failures.values())


def _row(case: Case, candidate: Candidate, turns: list[dict[str, float]]) -> dict[str, Any]:
    rates = [turn["samples_per_s"] for turn in turns]
    median = statistics.median(rates)
    row: dict[str, Any] = {
        "candidate": candidate.name,
        "label": candidate.label,
        "kind": candidate.kind,
        "order": candidate.order,
        "state": case.state,
        "bytes": case.sample_bytes,
        "ranks": case.ranks,
        "samples_per_s": round(median, 1),
        "gb_per_s": round(median * case.sample_bytes / 1e9, 3),
        "rates": [round(rate, 1) for rate in rates],
    }
    for name in ("first_s", "peak_mb"):
        if name in turns[0]:
            row[name] = round(max(turn[name] for turn in turns), 4)
    return row


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rates of hsgd over those of others in the same case."""
    found = {}
    for own in [row for row in rows if row["kind"] == "hsgd"]:
        suffix = "" if own["candidate"] in ("hsgd", "hsgd-order") else f"-{own['candidate'][5:]}"
        where = (own["state"], own["bytes"], own["ranks"])
        size = report.size_label(own["bytes"])
        case = f"{own['state']}/{own['order']}{suffix}/{size}/np{own['ranks']}"
        same = [r for r in rows if (r["state"], r["bytes"], r["ranks"]) == where]
        peers = [r for r in same if r["kind"] == "peer" and r["order"] == own["order"]]
        wanted = "preadv" if own["state"] == "warm" else "fio"
        limits = [r for r in same if r["candidate"] == wanted]
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
    for case in dict.fromkeys((r["state"], r["bytes"], r["ranks"]) for r in rows):
        state, nbytes, ranks = case
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
            if (row["state"], row["bytes"], row["ranks"]) == case
        ]
        parts.append(f"{state}, samples of {report.size_label(nbytes)}, {ranks} rank(s)")
        header = ["candidate", "order", "samples/s", "GB/s", "first batch, ms", "memory, MB"]
        parts.append(report.table(header, lines))
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
    add("--total", type=int, metavar="MB", help="of data (default 1024)")
    add("--np", nargs="+", type=int, metavar="N", help="ranks (default 1 2)")
    add("--state", nargs="+", choices=("warm", "cold"), help="of the page cache (default warm)")
    add("--rounds", type=int, help="turns of each candidate (default 5)")
    add("--budget", type=float, metavar="S", help="of one turn (default 3)")
    known = ", ".join(c.name for c in CANDIDATES)
    add("--candidates", nargs="+", metavar="NAME", help=f"of {known}")
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
    options.np = options.np or ([1] if quick else [1, 2])
    options.rounds = options.rounds or (2 if quick else 5)
    options.budget = options.budget or (0.4 if quick else 3.0)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured."""
    options = _settings(argv)
    names = options.candidates or [c.name for c in CANDIDATES if not options.quick or c.quick]
    chosen = [c for c in CANDIDATES if c.name in names]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hsgd-io-"))
    try:
        for sample_bytes in options.sizes:
            place = folder / f"{report.size_label(sample_bytes)}-{options.total}"
            data = make(place, sample_bytes, options.total << 20, {c.files for c in chosen})
            for state in options.state:
                for ranks in options.np:
                    found, failed = measure(Case(state, sample_bytes, ranks), data, chosen, options)
                    rows += found
                    failures += failed
            if options.folder is None:
                shutil.rmtree(place, ignore_errors=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    missing = sorted({c.files for c in chosen if not available(c.files)})
    settings = {
        "sizes": options.sizes,
        "total_mb": options.total,
        "rounds": options.rounds,
        "budget_s": options.budget,
        "not_installed": [{"tar": "webdataset", "mds": "mosaicml-streaming"}[m] for m in missing],
    }
    meta = {**report.facts("io_throughput"), "settings": settings}
    doc = {"meta": meta, "ratios": ratios(rows), "failures": failures, "results": rows}
    if rows:
        print(tables(doc))
    for line in failures:
        print(f"failed: {line}", file=sys.stderr)
    if options.json:
        report.write_json(options.json, json.loads(json.dumps(doc)))
    if options.png and rows:
        plot(doc, options.png)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
