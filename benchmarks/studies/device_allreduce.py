"""Allreduce of float32 on CUDA tensors: hsgd against gloo, NCCL, staging by hand, and the bus.

The ranks are workers/device_ranks.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import report
from harness.stopping import keeping
from workers.staying_processes import StayingProcesses

__all__ = ["CANDIDATES", "main", "ratios"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(64 * KIB * 4**k for k in range(7))
QUICK_SIZES = (64 * KIB, 4 * MIB, 64 * MIB)
NOTES = """\
The ranks are processes of this machine. Where there are fewer GPUs than ranks, several share one
(--ranks-per-device): NCCL refuses that (but 2.30 and later with NCCL_MULTI_RANK_GPU_ENABLE=1, which
is measured then), and hsgd stages: pieces are copied down into pinned shared
memory, summed there by the CPU, and copied up, while the next pieces follow. Where each rank has a
GPU of its own, NCCL is measured too, alone and as hsgd uses it; "staged" is then HSGD_NCCL_LIBRARY=
none.

A time is that of one call: it begins after a barrier with an idle device, ends when the device has
the result, and the slowest rank counts. Medians over all calls. Candidates take turns in one run,
each with the same tensor, in place, and after each turn the result of its last call is compared
with the exact sum, bit for bit, on all ranks; a wrong one is an error.

The limit is the bus: all ranks at once copy as many bytes from the GPU into pinned memory and, at
the same time, as many back. Nothing that goes through host memory can be faster.

"pageable" is what one writes without a library for it: tensor.cpu(), an allreduce on the CPU by
gloo or by hsgd, and a copy back.

Ratios in the JSON, all within this run: vs_peer/CASE is the time of the best peer (gloo, NCCL,
pageable) / hsgd staged, vs_gloo/CASE and so on a single one, vs_limit/CASE the limit / hsgd staged.
CASE is like "allreduce 64 MiB, 2 ranks". 1 GiB/s of payload is twice that on the bus.

examples:
  python benchmarks/allreduce.py --device cuda --quick
  python benchmarks/allreduce.py --device cuda --ranks 2 4 8 --json device.json --png device.png
  python benchmarks/allreduce.py --device cuda --ranks 4 --ranks-per-device 1
"""


@dataclass(frozen=True)
class Candidate:
    """One way to do it. by_nccl: only where NCCL takes the ranks; see Layout.has_nccl."""

    name: str
    label: str
    kind: str  # "hsgd", "peer" or "limit"
    about: str
    by_nccl: bool = False


CANDIDATES = (
    Candidate("hsgd-staged", "hsgd staged", "hsgd", "Comm.allreduce through host memory"),
    Candidate("hsgd-nccl", "hsgd NCCL", "hsgd", "Comm.allreduce by NCCL", by_nccl=True),
    Candidate("gloo", "gloo", "peer", "torch.distributed.all_reduce of CUDA tensors over gloo"),
    Candidate("nccl", "NCCL", "peer", "the same over NCCL", by_nccl=True),
    Candidate("pageable-gloo", "pageable gloo", "peer", "tensor.cpu(), gloo, copied back"),
    Candidate("pageable-hsgd", "pageable hsgd", "peer", "tensor.cpu(), hsgd, copied back"),
    Candidate("bus", "bus", "limit", "pinned copies down and up at once, of all ranks"),
)


def size_name(nbytes: int) -> str:
    """65536 -> "64 KiB"."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class Layout:
    """Ranks, and how many of them share a device."""

    ranks: int
    ranks_per_device: int
    device: str

    @property
    def name(self) -> str:
        own = self.own_device and self.ranks > 1
        return f"{self.ranks} ranks" + (", a GPU each" if own else "")

    @property
    def own_device(self) -> bool:
        return self.device == "cuda" and self.ranks_per_device == 1

    @property
    def has_nccl(self) -> bool:
        """A GPU for each rank, or NCCL has been told that ranks may share one (2.30 and later)."""
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return self.own_device or (self.device == "cuda" and shares)

    def candidates(self, wanted: Sequence[str]) -> list[str]:
        """Those that are measured here."""
        found = [c.name for c in CANDIDATES if self.has_nccl or not c.by_nccl]
        return [name for name in found if not wanted or name in wanted]


@dataclass
class Found:
    """What a run has told so far."""

    samples: dict[tuple[Layout, str, int], list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    devices: dict[str, str] = field(default_factory=dict)
    any_wrong: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """As in the JSON."""
        rows = []
        order = [candidate.name for candidate in CANDIDATES]
        for (layout, name, nbytes), seconds in self.samples.items():
            about = CANDIDATES[order.index(name)]
            row = {"case": f"allreduce {size_name(nbytes)}, {layout.name}", "layout": layout.name}
            row |= {"candidate": name, "label": about.label, "kind": about.kind}
            numbers = {"ranks": layout.ranks, "ranks_per_device": layout.ranks_per_device}
            counted = {"bytes": nbytes, "samples": len(seconds)}
            rows.append({**row, **numbers, **counted, **report.statistics(seconds)})
        return sorted(rows, key=lambda r: (r["ranks"], r["bytes"], order.index(r["candidate"])))


def measure(layout: Layout, options: argparse.Namespace, found: Found) -> None:
    """All turns of a layout into `found`, also when they are broken off. Raises RuntimeError,
    TimeoutError, EOFError where ranks failed.
    """
    from workers.device_ranks import rank_main  # which loads torch

    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks; this process computes nothing
    with tempfile.TemporaryDirectory() as folder:
        plan = {**vars(layout), "budget_s": options.budget_s, "folder": folder}
        path = f"@hsgd-device-{os.getpid()}-{layout.ranks}"
        words = [(plan, rank, path) for rank in range(layout.ranks)]
        ranks = StayingProcesses(rank_main, words)
        try:
            found.devices[layout.name] = ranks.ask("tell_device")[0]["device"]
            alive = []
            for name in layout.candidates(options.candidates):
                reasons = [told["reason"] for told in ranks.ask("start", name) if told["reason"]]
                if reasons:
                    found.failures.append(f"left out: {name}, {layout.name}: {reasons[0]}")
                else:
                    alive.append(name)
            for nbytes, number in itertools.product(options.sizes, range(options.rounds)):
                random.Random(number).shuffle(alive)  # nobody follows the same one in each round
                for name in alive:
                    _turn(layout, name, nbytes, ranks.ask("turn", name, nbytes), found)
        finally:
            ranks.close()


def _turn(
    layout: Layout, name: str, nbytes: int, told: Sequence[Mapping[str, Any]], found: Found
) -> None:
    slowest = [max(each) for each in zip(*(one["seconds"] for one in told), strict=True)]
    found.samples.setdefault((layout, name, nbytes), []).extend(slowest)
    wrong = sum(one["wrong"] for one in told)
    if wrong:
        found.any_wrong = True
        where = f"{layout.name}, {size_name(nbytes)}"
        found.failures.append(f"{name}, {where}: {wrong} elements are wrong")


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """vs_peer/CASE, vs_limit/CASE and vs_NAME/CASE over hsgd staged; with ", by NCCL" behind CASE
    over hsgd by NCCL.
    """
    found: dict[str, float] = {}
    for (case,), same in report.grouped(rows, "case").items():
        here = {row["candidate"]: row["median_us"] for row in same}
        peers = {row["candidate"]: row["median_us"] for row in same if row["kind"] == "peer"}
        for ours, suffix in (("hsgd-staged", ""), ("hsgd-nccl", ", by NCCL")):
            if ours in here:
                compared = report.versus(here[ours], peers, None if suffix else here.get("bus"))
                found |= {f"{vs}/{case}{suffix}": share for vs, share in compared.items()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 for a wrong result, or when nothing was measured."""
    options = _read(argv)
    layouts = _layouts(options)
    if isinstance(layouts, str):
        print(f"allreduce: {layouts}", file=sys.stderr)
        return 1
    found = Found()
    with keeping() as stopped:
        for layout in layouts:
            try:
                measure(layout, options, found)
            except (RuntimeError, TimeoutError, EOFError) as error:
                found.failures.append(f"{layout.name}: {error}")
    rows = found.rows()
    settings = {
        "sizes": options.sizes,
        "layouts": {layout.name: vars(layout) for layout in layouts},
        "candidates": {c.name: c.about for c in CANDIDATES},
        "rounds": options.rounds,
        "budget_s": options.budget_s,
        "dtype": "float32",
        "op": "sum",
    }
    document = report.document(
        *("device_allreduce", settings, ratios(rows), rows, found.failures, stopped.code),
        meta={"devices": found.devices},
    )
    report.publish(options, document, tables(document), plot)
    return stopped.code or int(found.any_wrong or not rows)


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Draw payload per second, a column for each case."""
    speed = {"GiB of payload per second": lambda r: 1e6 * r["bytes"] / r["median_us"] / (1 << 30)}
    report.plot_bars(document["results"], target, speed, by=("case",))


def _layouts(options: argparse.Namespace) -> list[Layout] | str:
    """Or, in words, why they cannot be had."""
    devices = 1
    if options.device == "cuda":
        try:
            import torch
        except ImportError as error:
            return f"{error}; pip install torch"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA; install a build with it"
        devices = torch.cuda.device_count()
        if not devices:
            return "torch finds no CUDA device on this machine; see nvidia-smi -L"
    found = []
    for ranks in options.ranks:
        share = options.ranks_per_device or -(-ranks // devices)
        if -(-ranks // share) > devices:
            return f"{ranks} ranks, {share} per device: this machine has {devices} device(s)"
        found.append(Layout(ranks, share, options.device))
    return found


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.argument_parser(
        *("Measure allreduce of float32 on CUDA tensors of ranks on this machine.", NOTES),
        quick="fewer sizes and rounds: under a minute",
        png="plot payload per second there",
    )
    add = parser.add_argument
    add("--sizes", nargs="+", metavar="SIZE", help="bytes per rank, like 64KB 4MB")
    add("--ranks", nargs="+", type=int, default=[2], metavar="N", help="default 2")
    about = "ranks that share a GPU (default: as few as there are GPUs for)"
    add("--ranks-per-device", type=int, default=0, metavar="K", help=about)
    names = ", ".join(c.name for c in CANDIDATES)
    add("--candidates", nargs="+", default=[], metavar="NAME", help=f"of {names}")
    add("--rounds", type=int, help="turns of each candidate (default 6)")
    # host memory in place of a device: for a look at this program where there is none
    add("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    options = report.parse(parser, argv, sizes=report.read_size)
    options.sizes = options.sizes or list(QUICK_SIZES if options.quick else SIZES)
    options.rounds = options.rounds or (3 if options.quick else 6)
    options.budget_s = 0.15 if options.quick else 0.5
    if any(size < 4 or size % 4 for size in options.sizes):
        parser.error("--sizes: float32 takes multiples of 4 bytes")
    if min(options.ranks) < 2 or options.rounds < 1 or options.ranks_per_device < 0:
        parser.error("--ranks: 2 or more; --rounds, --ranks-per-device: 1 or more")
    unknown = set(options.candidates) - {c.name for c in CANDIDATES}
    if unknown:
        parser.error(f"--candidates: no {', '.join(sorted(unknown))}; known: {names}")
    return options


def tables(doc: Mapping[str, Any]) -> str:
    """A table for each layout."""
    parts = []
    for (layout,), rows in report.grouped(doc["results"], "layout").items():
        device = doc["meta"]["devices"][layout]
        parts.append(f"allreduce, {layout}, {device}: median ms per call")
        shares: dict[str, Any] = {}
        for title, vs in (("ahead", "vs_peer"), ("of limit", "vs_limit")):
            shares[title] = lambda row, vs=vs: doc["ratios"].get(f"{vs}/{row['case']}")
        size: dict[str, Any] = {"bytes": lambda row: size_name(row["bytes"])}
        cell = lambda row: f"{row['median_us'] / 1e3:.3f}"  # noqa: E731
        parts.append(report.pivot(rows, size, "label", cell, shares))
    return "\n".join(parts)
