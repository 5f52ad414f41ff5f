"""The command line of the soak tests: soaks one after another, a table, a JSON file.

Owns what is printed. Exit code 1 when something grew, or a job did not end well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from campaigns.soak.flatness import BOUNDS, WARM_UP, Growth, growth_of, tenths
from campaigns.soak.footprint import MEASURES
from campaigns.soak.soak_job import Done, Extent, run_soak
from campaigns.soak.soaks import LAYOUTS, SOAKS, Soak

__all__ = ["main"]

_QUICK = 0.01
_EPILOG = f"""\
Each soak is a job of some ranks on this machine that do one thing again and again, on one node or
on pretended ones that speak TCP. Each rank says some 125 times what it holds: resident (RSS),
proportional (PSS) and mapped memory, descriptors, threads. After a warm-up of {WARM_UP:.0%} the
medians of the first and of the last tenth are compared: a rank whose descriptors or threads grew
by one, or whose memory grew by more than {BOUNDS["rss"] >> 10} KiB, leaks, and the exit code is
1. The column "unseen" says what one operation could leave behind without being found: the fewer
operations, the more. So --quick finds what leaks a page each time; a few bytes take the long form.

examples:
  python -m campaigns.soak --quick
  python -m campaigns.soak --minutes 60 --json soak.json
  python -m campaigns.soak --soaks communicators groups --layouts node-2 tcp-3
  python -m campaigns.soak --soaks leak-memory --quick; echo $?

soaks:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soaks; the exit code."""
    options = _parser().parse_args(argv)
    scale = _QUICK if options.quick else options.scale
    minutes = 0.1 if options.quick and options.minutes is None else options.minutes or 60.0
    extent = Extent(scale, 60.0 * minutes, 30 if options.quick else options.width)
    chosen = [
        (SOAKS[name], layout)
        for name in options.soaks or [name for name, soak in SOAKS.items() if soak.runs]
        for layout in SOAKS[name].counts
        if not options.layouts or layout in options.layouts
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ranks are ended on the way out
    needs_store = any(LAYOUTS[layout].by == "store" or soak.uses_torch for soak, layout in chosen)
    store = _serve_store() if needs_store else None
    port = 0 if store is None else store.port
    results: list[dict[str, Any]] = []
    print("  ".join(_cells(_HEAD)), flush=True)
    for soak, layout in chosen:
        done = run_soak(soak, layout, extent, port, _Progress(soak, layout, len(results)))
        results.append(_judged(soak, layout, done))
        print("\n".join(_lines(results[-1])), flush=True)
        if options.json is not None:
            _write(options.json, extent, results)
    bad = [f"{each['soak']} {each['layout']}" for each in results if each["problems"]]
    print(f"{len(results)} soaks, {len(bad)} with problems{': ' if bad else ''}{', '.join(bad)}")
    return 1 if bad else 0


def _serve_store() -> Any:
    """Where ranks of several nodes meet; its keys are nothing that a rank holds."""
    import torch.distributed

    dist: Any = torch.distributed
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _parser() -> argparse.ArgumentParser:
    table = [f"  {soak.name:17}{soak.about} ({', '.join(soak.counts)})" for soak in SOAKS.values()]
    places = [f"  {name:17}{layout.about}" for name, layout in LAYOUTS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.soak",
        description="Do the same for long, and see whether ranks then hold more than at first.",
        epilog=_EPILOG + "\n".join([*table, "\nlayouts:", *places]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="of training (60; with --quick 0.1)"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="times the operations of all others"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"--scale {_QUICK} --width 30, in some minutes"
    )
    parser.add_argument(
        "--width", type=int, default=1000, metavar="N", help='communicators of "open" (1000)'
    )
    names: dict[str, Any] = {"nargs": "+", "default": (), "metavar": "NAME"}
    parser.add_argument("--soaks", choices=list(SOAKS), help="these alone", **names)
    parser.add_argument("--layouts", choices=list(LAYOUTS), help="these alone", **names)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    return parser


class _Progress:
    """A line on a terminal that says how far a soak is."""

    def __init__(self, soak: Soak, layout: str, number: int) -> None:
        self._what, self._begin = f"{number + 1}: {soak.name} {layout}", time.monotonic()

    def __call__(self, operations: int, share: float) -> None:
        if not sys.stderr.isatty():
            return
        passed = time.monotonic() - self._begin
        line = f"\r{self._what}: {operations} operations, {share:.0%}, {passed:.0f} s \x1b[K"
        print("\r\x1b[K" if share == 1 else line, end="", file=sys.stderr, flush=True)


# --- judging, and what is said of it ---

_HEAD = ("soak", "layout", "operations", "s", *MEASURES, "unseen")


def _judged(soak: Soak, layout: str, done: Done) -> dict[str, Any]:
    problems = list(done.problems)
    worst: dict[str, Growth] = {}
    for rank, samples in enumerate(done.samples):
        if len(samples) < soak.samples:
            problems.append(f"rank {rank} took {len(samples)} samples of {soak.samples}")
            continue
        for growth in growth_of(samples):
            if growth.is_leak:
                problems.append(
                    f"rank {rank}: {growth.measure} grew from {growth.first:.0f} to "
                    f"{growth.last:.0f}"
                )
            if growth.measure not in worst or growth.by > worst[growth.measure].by:
                worst[growth.measure] = growth
    return {
        "soak": soak.name,
        "layout": layout,
        "operations": done.operations,
        "seconds": done.seconds,
        "growth": {name: asdict(each) | {"by": each.by} for name, each in worst.items()},
        "unseen_bytes": _unseen(soak, done.operations),
        "notes": done.notes,
        "problems": problems,
        "samples": done.samples,
    }


def _unseen(soak: Soak, operations: int) -> float:
    """Bytes that each operation could leave behind without being found."""
    first, last = tenths(soak.samples)
    between = operations * (last.start - first.start) / soak.samples
    return BOUNDS["rss"] / between if between else float("inf")


def _cells(words: Sequence[str]) -> list[str]:
    widths = (17, 7, 11, 7, 9, 9, 9, 11, 7, 9)
    return [
        word.ljust(width) if column < 2 else word.rjust(width)
        for column, (word, width) in enumerate(zip(words, widths, strict=True))
    ]


def _lines(result: dict[str, Any]) -> list[str]:
    def grown(measure: str) -> str:
        if measure not in result["growth"]:
            return "-"
        by = result["growth"][measure]["by"]
        return f"{by:+.0f}" if BOUNDS[measure] == 0 else f"{by / 1024:+.0f} KiB"

    unseen = result["unseen_bytes"]
    row = [
        result["soak"],
        result["layout"],
        f"{result['operations']:,}",
        f"{result['seconds']:.0f}",
    ]
    row += [*map(grown, MEASURES), f"{unseen:.3g} B"]
    notes = [f"  {name}: {value:,.1f}" for name, value in result["notes"].items()]
    return ["  ".join(_cells(row)), *notes, *(f"  {line}" for line in result["problems"])]


def _write(path: Path, extent: Extent, results: list[dict[str, Any]]) -> None:
    meta = {**asdict(extent), "bounds": BOUNDS, "warm_up": WARM_UP, "cores": os.cpu_count()}
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"meta": meta, "measures": MEASURES, "results": results}))
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main())
