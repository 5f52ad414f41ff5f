"""What the interposer costs where a call passes through, and what it gains where it takes one.

One C program (native/interposer/pairs.c) calls MPI_* and PMPI_* in turn, in one process with the
interposer preloaded, and compares their results. Owns the choice of cases and the ratios; a call on
MPI_COMM_SELF passes through, and its extra time is the interposer's alone. A third run without
LD_PRELOAD shows the noise of that difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
import layouts
import report
from hsgd import launch, mpirun, preload
from hsgd.mpi_compiler import find_wrapper

__all__ = ["LIMIT_NS", "run"]

SOURCE = Path(__file__).resolve().parent / "native" / "interposer" / "pairs.c"
LIMIT_NS = 50.0  # of the extra time of a call that passes through
NOISE_NS = 1.0  # differences are not told better than this
PASSED_BYTES = (64, 4096)  # below the threshold, and above it: then the communicator decides
SIZES = (8, 64, 512, *(1024 * 4**k for k in range(7)))
QUICK_SIZES = (1024, 16384)
RUN_LIMIT_S = 300.0

EPILOG = f"""\
Ratios in the JSON: vs_limit/passed/COLLECTIVE/SIZE is {LIMIT_NS:g} ns / what a call that passes
through takes longer than PMPI's, at least {NOISE_NS:g} ns; vs_peer/interposer/COLLECTIVE/npN/SIZE
is PMPI / MPI_* with the interposer, 1 where it passes the call on. Medians of one run; a time is
that of one call, the mean over a batch, and the largest over the ranks. Roots change from call to
call. HSGD_MIN_BYTES=0 takes every call.

examples:
  python benchmarks/interposer.py --quick
  HSGD_MIN_BYTES=0 python benchmarks/interposer.py --np 2 4 --json interposer.json
"""


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when a run failed or a result was wrong."""
    options = _read_arguments(argv)
    rounds, batch_s = (9, 2e-4) if options.quick else (60, 5e-4)
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hsgd-bench-") as folder:
        program = _compile(Path(folder))
        for ranks, kind, nbytes, interposed in (
            (1, "passed", PASSED_BYTES, True),
            (1, "plain", PASSED_BYTES, False),
            *((ranks, "taken", sizes, True) for ranks in options.np),
        ):
            words = [
                str(program),
                "world" if kind == "taken" else "self",
                str(rounds),
                str(batch_s),
            ]
            try:
                rows = _measure(ranks, [*words, *map(str, nbytes)], interposed)
            except jobs.JobFailed as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            results += [{"kind": kind, "ranks": ranks, **row} for row in rows]
    document = {
        "meta": report.facts("interposer"),
        "results": results,
        "ratios": _ratios(results),
        "failures": [],
    }
    if options.json:
        report.write_json(options.json, document)
    print(_table(results))
    return 0


def _read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="interposer.py",
        description="Measure what the interposer costs and gains.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, in under 20 s")
    parser.add_argument("--np", type=int, nargs="+", default=[2], help="ranks (default: 2)")
    parser.add_argument("--sizes", type=report.read_size, nargs="+", help="like 1KB 64KB 4MB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts, rows and ratios")
    return parser.parse_args(argv)


def _compile(folder: Path) -> Path:
    compiler = find_wrapper("mpicc")
    if compiler is None:
        sys.exit("error: no mpicc beside the interpreter or on PATH: install an MPI with headers")
    program = folder / "pairs"
    subprocess.run([compiler, "-std=gnu11", "-O2", "-o", str(program), str(SOURCE)], check=True)
    return program


def _measure(ranks: int, command: list[str], interposed: bool) -> list[dict[str, Any]]:
    environ = jobs.environment(layouts.on_one_node(max(2, ranks)))
    beside = Path(sys.executable).parent
    environ["PATH"] = f"{beside}{os.pathsep}{environ['PATH']}"
    define = {"LD_PRELOAD": str(preload.library())} if interposed else {}
    job = mpirun.Job(
        command=tuple(command),
        ranks=ranks,
        cores=launch.cores(),
        hosts=mpirun.parse_hosts(f"localhost:{ranks}", ranks),
        define=define,
    )
    words = mpirun.command_line(launch.find_launcher(environ), job, environ)
    try:
        done = subprocess.run(
            words, env=environ, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise jobs.JobFailed(f"{ranks} ranks: not finished after {RUN_LIMIT_S:g} s") from None
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise jobs.JobFailed(f"{ranks} ranks: exit code {done.returncode}: {lines[:1]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _ratios(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    ratios = {}
    for row in results:
        size = report.size_label(row["bytes"])
        if row["kind"] == "passed":
            extra_ns = max(NOISE_NS, row["mpi_ns"] - row["pmpi_ns"])
            ratios[f"vs_limit/passed/{row['collective']}/{size}"] = LIMIT_NS / extra_ns
        elif row["kind"] == "taken":
            name = f"vs_peer/interposer/{row['collective']}/np{row['ranks']}/{size}"
            ratios[name] = row["pmpi_ns"] / row["mpi_ns"]
    return ratios


def _table(results: Sequence[dict[str, Any]]) -> str:
    header = (
        "calls",
        "collective",
        "ranks",
        "bytes",
        "MPI ns",
        "PMPI ns",
        "extra ns",
        "PMPI / MPI",
    )
    return report.table(
        header,
        [
            (
                *(row["kind"], row["collective"], str(row["ranks"])),
                *(report.size_label(row["bytes"]), f"{row['mpi_ns']:.0f}", f"{row['pmpi_ns']:.0f}"),
                f"{row['mpi_ns'] - row['pmpi_ns']:.0f}",
                f"{row['pmpi_ns'] / row['mpi_ns']:.2f}",
            )
            for row in results
        ],
    )


if __name__ == "__main__":
    sys.exit(run())
