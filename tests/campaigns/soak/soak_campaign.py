"""SoakCampaign: soaks one after another, the judge of their samples, and what is said of them."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from campaigns.mpi_launch import MpiLaunch
from campaigns.soak.flatness import BOUNDS, WARM_UP, Growth, growth_of, tenths
from campaigns.soak.footprint import MEASURES
from campaigns.soak.soak_job import SoakJob
from campaigns.soak.soaks import LAYOUTS, SOAKS, Soak
from campaigns.zygotes import Zygotes

__all__ = ["SoakCampaign"]

_QUICK = 0.01
_HEAD = ("soak", "layout", "operations", "s", *MEASURES, "unseen")
_ENVIRONMENT: dict[str, Any] = {
    # What is mapped is what is held: no reserve of 64 MiB for each thread, no large block that is
    # kept for later.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
}
_EPILOG = f"""\
Each soak is a job of some ranks on this machine that do one thing again and again, on one node or
on pretended ones that speak TCP. Each rank says some 125 times what it holds: resident (RSS),
proportional (PSS) and mapped memory, descriptors, threads. After a warm-up of {WARM_UP:.0%} the
medians of the first and of the last tenth are compared: a rank whose descriptors or threads grew
by one, or whose memory grew by more than {BOUNDS["rss"] >> 10} KiB, leaks, and the exit code is
1. The column "unseen" says what one operation could leave behind without being found: the fewer
operations, the more. So --quick finds what leaks a page each time; a few bytes take the long form.

examples:
  python -m campaigns soak --quick
  python -m campaigns soak --minutes 60 --json soak.json
  python -m campaigns soak --soaks communicators groups --layouts node-2 tcp-3
  python -m campaigns soak --soaks leak-memory --quick; echo $?

soaks:
"""


class SoakCampaign:
    """Jobs in which what a rank holds must stay flat over millions of operations."""

    name = "soak"
    about = "Do the same for long, and see whether ranks then hold more than at first."

    def __init__(self, options: argparse.Namespace) -> None:
        scale = _QUICK if options.quick else options.scale
        minutes = 0.1 if options.quick and options.minutes is None else options.minutes or 60.0
        width = 30 if options.quick else options.width
        self._extent = {"scale": scale, "seconds": 60.0 * minutes, "width": width}
        self._chosen = [
            (SOAKS[name], layout)
            for name in options.soaks or [name for name, soak in SOAKS.items() if soak.runs]
            for layout in SOAKS[name].counts
            if not options.layouts or layout in options.layouts
        ]

    @staticmethod
    def epilog() -> str:
        """Return the end of its help."""
        soaks = [
            f"  {each.name:17}{each.about} ({', '.join(each.counts)})" for each in SOAKS.values()
        ]
        places = [f"  {name:17}{layout.about}" for name, layout in LAYOUTS.items()]
        return _EPILOG + "\n".join([*soaks, "\nlayouts:", *places])

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add its own options to its command."""
        add = parser.add_argument
        add("--minutes", type=float, metavar="M", help="of training (60; with --quick 0.1)")
        words = "times the operations of all others"
        add("--scale", type=float, default=1.0, metavar="F", help=words)
        words = f"--scale {_QUICK} --width 30, in some minutes"
        add("--quick", action="store_true", help=words)
        words = 'communicators of "open" (1000)'
        add("--width", type=int, default=1000, metavar="N", help=words)
        names: dict[str, Any] = {"nargs": "+", "default": (), "metavar": "NAME"}
        add("--soaks", choices=list(SOAKS), help="these alone", **names)
        add("--layouts", choices=list(LAYOUTS), help="these alone", **names)

    def results(self) -> Iterator[dict[str, Any]]:
        """Run the soaks. Raises StarterError."""
        print("  ".join(_cells(_HEAD)), flush=True)
        with contextlib.ExitStack() as stack:

            @functools.cache
            def starter(kind: type[Zygotes]) -> Zygotes:
                return stack.enter_context(kind(**_ENVIRONMENT))

            for soak, layout in self._chosen:
                kind = MpiLaunch if LAYOUTS[layout].by == "mpi" else Zygotes
                job = SoakJob(starter(kind), soak, layout, self._extent)
                job.run()
                yield _judged(soak, layout, job)

    def lines(self, result: dict[str, Any]) -> list[str]:
        """Return a line of the table, and what is noted below it."""

        def grown(measure: str) -> str:
            if measure not in result["growth"]:
                return "-"
            by = result["growth"][measure]["by"]
            return f"{by:+.0f}" if BOUNDS[measure] == 0 else f"{by / 1024:+.0f} KiB"

        counts = [f"{result['operations']:,}", f"{result['seconds']:.0f}", *map(grown, MEASURES)]
        row = [result["soak"], result["layout"], *counts, f"{result['unseen_bytes']:.3g} B"]
        notes = [f"  {name}: {value:,.1f}" for name, value in result["notes"].items()]
        return ["  ".join(_cells(row)), *notes, *(f"  {line}" for line in result["problems"])]

    def summary(self, results: list[dict[str, Any]]) -> list[str]:
        """Say how many had problems, and which."""
        bad = [f"{each['soak']} {each['layout']}" for each in results if each["problems"]]
        names = f": {', '.join(bad)}" if bad else ""
        return [f"{len(results)} soaks, {len(bad)} with problems{names}"]

    def report(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what is written beside the results."""
        meta = {"bounds": BOUNDS, "warm_up": WARM_UP, "cores": os.cpu_count()}
        return {"meta": {**self._extent, **meta}, "measures": MEASURES}


def _judged(soak: Soak, layout: str, job: SoakJob) -> dict[str, Any]:
    problems = job.problems()
    worst: dict[str, Growth] = {}
    for rank, samples in enumerate(job.samples):
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
    first, last = tenths(soak.samples)
    between = job.operations * (last.start - first.start) / soak.samples
    return {
        "soak": soak.name,
        "layout": layout,
        "operations": job.operations,
        "seconds": job.told_in_the_end("seconds", 0.0),
        "growth": {name: asdict(each) | {"by": each.by} for name, each in worst.items()},
        # What each operation could leave behind without being found.
        "unseen_bytes": BOUNDS["rss"] / between if between else float("inf"),
        "notes": job.told_in_the_end("notes", {}),
        "problems": problems,
        "samples": job.samples,
    }


def _cells(words: Sequence[str]) -> list[str]:
    widths = (17, 7, 11, 7, 9, 9, 9, 11, 7, 9)
    return [
        word.ljust(width) if column < 2 else word.rjust(width)
        for column, (word, width) in enumerate(zip(words, widths, strict=True))
    ]
