"""Allreduce of float32 on CUDA tensors: hsgd against gloo, NCCL, staging by hand, and the bus.

Owns the choice of cases, the ratios and the table. device_worker.py measures.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import report
from harness.stopping import keeping
from studies.device_figures import hidden, plot_sizes, plot_trace
from studies.device_jobs import listen

__all__ = ["CANDIDATES", "Candidate", "document", "main", "ratios", "size_name"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(64 * KIB * 4**k for k in range(7))
QUICK_SIZES = (64 * KIB, 4 * MIB, 64 * MIB)
CHUNKS = tuple(MIB << k for k in range(5))
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

--chunks measures hsgd staged with other sizes of a piece (HSGD_DEVICE_CHUNK_BYTES) as well: small
ones begin to overlap early, large ones cost fewer steps.
--trace draws what rank 0's GPU did in one step of a DistributedOptimizer with 12 layers of 16 MiB:
when it computed, and when it copied gradients down and sums up.

examples:
  python benchmarks/allreduce.py --device cuda --quick
  python benchmarks/allreduce.py --device cuda --ranks 2 4 8 --json device.json --png device.png
  python benchmarks/allreduce.py --device cuda --sizes 64MB --chunks --trace trace.png
  python benchmarks/allreduce.py --device cuda --ranks 4 --ranks-per-device 1
"""


@dataclass(frozen=True)
class Candidate:
    """One way to do it. by_nccl: only where NCCL takes the ranks; see Layout.has_nccl."""

    name: str
    label: str
    kind: str  # "hsgd", "peer", "limit" or "other"
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

    def candidates(self, wanted: Sequence[str], chunks: Sequence[int]) -> list[Candidate]:
        """Those that are measured here."""
        found = [c for c in CANDIDATES if self.has_nccl or not c.by_nccl]
        found = [c for c in found if not wanted or c.name in wanted]
        about = "hsgd staged with this HSGD_DEVICE_CHUNK_BYTES"
        for nbytes in chunks:
            name = f"chunk-{nbytes}"
            found.append(Candidate(name, f"chunk {size_name(nbytes)}", "other", about))
        return found


class Found:
    """What a run has told so far."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, str, int], list[float]] = {}
        self.failures: list[str] = []
        self.devices: dict[str, Any] = {}
        self.trace: list[dict[str, Any]] = []
        self.any_wrong = False

    def take(self, layout: Layout, told: Mapping[str, Any]) -> None:
        """A line of rank 0."""
        if "turn" in told:
            key = (layout.name, told["turn"], told["bytes"])
            self.samples.setdefault(key, []).extend(told["seconds"])
            if told["wrong"]:
                self.any_wrong = True
                where = f"{layout.name}, {size_name(told['bytes'])}"
                self.failures.append(f"{told['turn']}, {where}: {told['wrong']} elements are wrong")
        elif "failed" in told:
            self.failures.append(f"left out: {told['failed']}, {layout.name}: {told['reason']}")
        elif "trace" in told:
            self.trace = told["trace"]
            if not self.trace:
                self.failures.append("trace: torch's profiler saw no work of the device")
        elif "device" in told:
            self.devices[layout.name] = dict(told)

    def rows(self, layouts: Sequence[Layout], options: argparse.Namespace) -> list[dict[str, Any]]:
        """As in the JSON."""
        rows = []
        for layout in layouts:
            known = {c.name: c for c in layout.candidates((), options.chunks)}
            for (name, candidate, nbytes), seconds in self.samples.items():
                if name != layout.name:
                    continue
                about = known[candidate]
                row = {"case": f"allreduce {size_name(nbytes)}, {name}", "layout": name}
                row |= {"candidate": candidate, "label": about.label, "kind": about.kind}
                numbers = {"ranks": layout.ranks, "ranks_per_device": layout.ranks_per_device}
                counted = {"bytes": nbytes, "samples": len(seconds)}
                rows.append({**row, **numbers, **counted, **report.statistics(seconds)})
        order = [name for layout in layouts for name in _names(layout, options)]
        return sorted(rows, key=lambda r: (r["ranks"], r["bytes"], order.index(r["candidate"])))


def _names(layout: Layout, options: argparse.Namespace) -> list[str]:
    return [c.name for c in layout.candidates(options.candidates, options.chunks)]


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """vs_peer/CASE, vs_limit/CASE and vs_NAME/CASE over hsgd staged; with ", by NCCL" behind CASE
    over hsgd by NCCL.
    """
    found: dict[str, float] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        here = {row["candidate"]: row for row in rows if row["case"] == case}
        for ours, suffix in (("hsgd-staged", ""), ("hsgd-nccl", ", by NCCL")):
            if ours not in here:
                continue
            peers = {n: r["median_us"] for n, r in here.items() if r["kind"] == "peer"}
            compared = {f"vs_{name}": value for name, value in peers.items()}
            if peers:
                compared["vs_peer"] = min(peers.values())
            if "bus" in here and not suffix:
                compared["vs_limit"] = here["bus"]["median_us"]
            own = here[ours]["median_us"]
            found |= {f"{vs}/{case}{suffix}": float(f"{v / own:.4g}") for vs, v in compared.items()}
    return found


def document(
    found: Found, layouts: Sequence[Layout], options: argparse.Namespace
) -> dict[str, Any]:
    """Everything that is known after a run."""
    rows = found.rows(layouts, options)
    names = {layout.name: vars(layout) for layout in layouts}
    settings = {
        "sizes": options.sizes,
        "layouts": names,
        "candidates": {c.name: c.about for c in CANDIDATES},
        "chunks": options.chunks,
        "rounds": options.rounds,
        "budget_s": options.budget_s,
        "dtype": "float32",
        "op": "sum",
    }
    meta = {**report.facts("device_allreduce"), "settings": settings, "devices": found.devices}
    doc: dict[str, Any] = {
        "meta": meta,
        "ratios": ratios(rows),
        "failures": found.failures,
        "results": rows,
    }
    if found.trace:
        doc["trace"] = {**hidden(found.trace), "events": found.trace}
    return doc


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
                for told in listen(_plan(layout, options, layout is layouts[-1])):
                    found.take(layout, told)
            except RuntimeError as error:
                found.failures.append(f"{layout.name}: {error}")
    doc = document(found, layouts, options)
    doc["meta"]["interrupted"] = bool(stopped.code)
    _show(doc)
    if options.json:
        report.write_json(options.json, doc)
    device = "".join(each["device"] for each in list(found.devices.values())[:1])
    if options.png and doc["results"]:
        plot_sizes(doc["results"], f"allreduce, float32, {device}", options.png)
    if options.trace and found.trace:
        title = f"one step of a DistributedOptimizer, {layouts[-1].name}, {device}"
        plot_trace(found.trace, title, options.trace)
    missing = not doc["results"] or bool(options.trace and not found.trace)
    return stopped.code or int(found.any_wrong or missing)


def _plan(layout: Layout, options: argparse.Namespace, is_last: bool) -> dict[str, Any]:
    return {
        "layout": layout.name,
        "ranks": layout.ranks,
        "ranks_per_device": layout.ranks_per_device,
        "device": layout.device,
        "sizes": options.sizes,
        "rounds": options.rounds,
        "budget_s": options.budget_s,
        "chunks": options.chunks,
        "candidates": _names(layout, options),
        "trace": bool(options.trace and is_last),
    }


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
    parser = argparse.ArgumentParser(
        description="Measure allreduce of float32 on CUDA tensors of ranks on this machine.",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer sizes and rounds: under a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--png", type=Path, metavar="FILE", help="plot payload per second over sizes there")
    add(
        "--trace", type=Path, metavar="FILE", help="draw a step of training there, of --ranks' last"
    )
    add("--sizes", nargs="+", metavar="SIZE", help="bytes per rank, like 64KB 4MB")
    add("--ranks", nargs="+", type=int, default=[2], metavar="N", help="default 2")
    about = "ranks that share a GPU (default: as few as there are GPUs for)"
    add("--ranks-per-device", type=int, default=0, metavar="K", help=about)
    about = "other sizes of a piece as well (default 1MB 2MB 4MB 8MB 16MB)"
    add("--chunks", nargs="*", metavar="SIZE", help=about)
    names = ", ".join(c.name for c in CANDIDATES)
    add("--candidates", nargs="+", default=[], metavar="NAME", help=f"of {names}")
    add("--rounds", type=int, help="turns of each candidate (default 6)")
    # host memory in place of a device: for a look at this program where there is none
    add("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        options.sizes = [report.read_size(text) for text in options.sizes or ()]
        chunks = [report.read_size(text) for text in options.chunks or ()]
    except ValueError as error:
        parser.error(str(error))
    options.chunks = list(CHUNKS) if options.chunks == [] else chunks
    options.sizes = options.sizes or list(QUICK_SIZES if options.quick else SIZES)
    options.rounds = options.rounds or (3 if options.quick else 6)
    options.budget_s = 0.15 if options.quick else 0.5
    if any(size < 4 or size % 4 for size in options.sizes):
        parser.error("--sizes: float32 takes multiples of 4 bytes")
    if any(not 1 << 16 <= chunk <= 1 << 28 for chunk in options.chunks):
        parser.error("--chunks: from 64KB to 256MB")
    if min(options.ranks) < 2 or options.rounds < 1 or options.ranks_per_device < 0:
        parser.error("--ranks: 2 or more; --rounds, --ranks-per-device: 1 or more")
    unknown = set(options.candidates) - {c.name for c in CANDIDATES}
    if unknown:
        parser.error(f"--candidates: no {', '.join(sorted(unknown))}; known: {names}")
    report.check_targets(parser, options.json, options.png, options.trace)
    return options


def _show(doc: Mapping[str, Any]) -> None:
    rows = doc["results"]
    for layout in dict.fromkeys(row["layout"] for row in rows):
        here = [row for row in rows if row["layout"] == layout]
        labels = list(dict.fromkeys(row["label"] for row in here))
        print(
            f"allreduce, {layout}, {doc['meta']['devices'][layout]['device']}: median ms per call"
        )
        lines = []
        for case in dict.fromkeys(row["case"] for row in here):
            times = {row["label"]: row["median_us"] for row in here if row["case"] == case}
            size = next(row["bytes"] for row in here if row["case"] == case)
            cells = [f"{times[label] / 1e3:.3f}" if label in times else "-" for label in labels]
            shares = [doc["ratios"].get(f"{vs}/{case}") for vs in ("vs_peer", "vs_limit")]
            cells += ["-" if share is None else f"{share:.2f}" for share in shares]
            lines.append([size_name(size), *cells])
        print(report.table(["bytes", *labels, "ahead", "of limit"], lines))
    if "trace" in doc:
        print("trace: " + ", ".join(f"{k} {v:g}" for k, v in doc["trace"].items() if k != "events"))
    for line in doc["failures"]:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
