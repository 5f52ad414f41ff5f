"""What the interposer costs where a call passes through, and what it gains where it takes one.

C programs (native/interposer/) call MPI_* and PMPI_* in turn, in one process with the interposer
preloaded, and compare their results: pairs.c single calls, mixes.c programs that mix collectives
with what goes on beside them. A call on MPI_COMM_SELF passes through, and its extra time is the
interposer's alone. A third run without LD_PRELOAD shows the noise of that difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import jobs, layouts, report
from hsgd.jobs.launch import launch, mpirun, preload
from hsgd.jobs.launch.mpi_compiler import find_wrapper
from toolkit.processes import CommandTimeout, run_marked

__all__ = ["LIMIT_NS", "run"]

SOURCES = Path(__file__).resolve().parent / "native" / "interposer"
# Whether ranks read one another's memory, which many containers forbid: then messages of any size
# go through shared memory step by step.
COPIES = {"cma": {}, "no_cma": {"OMPI_MCA_smsc": "^cma"}}
LIMIT_NS = 50.0  # of the extra time of a call that passes through
NOISE_NS = 1.0  # differences are not told better than this
PASSED_BYTES = (64, 4096)  # below the threshold, and above it: then the communicator decides
SIZES = (8, 64, 512, *(1024 * 4**k for k in range(7)))
QUICK_SIZES = (1024, 16384)
RUN_LIMIT_S = 300.0

EPILOG = f"""\
Ratios in the JSON: vs_limit/passed/COLLECTIVE/SIZE is {LIMIT_NS:g} ns / what a call that passes
through takes longer than PMPI's, at least {NOISE_NS:g} ns; vs_peer/interposer/COLLECTIVE/npN/SIZE
is PMPI / MPI_* with the interposer, 1 where it passes the call on.
vs_peer/interposer_mix/MIX/npN/COPY is the same of a whole program that mixes collectives with
messages, windows and pauses (COPY: cma, or no_cma where ranks cannot read one another's memory).
Medians of one run; a time is
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
        program = _compile(Path(folder), "pairs")
        try:
            for ranks, kind, nbytes, interposed in (
                (1, "passed", PASSED_BYTES, True),
                (1, "plain", PASSED_BYTES, False),
                *((ranks, "taken", sizes, True) for ranks in options.np),
            ):
                where = "world" if kind == "taken" else "self"
                words = [str(program), where, str(rounds), str(batch_s), *map(str, nbytes)]
                rows = _measure(ranks, words, interposed)
                results += [{"kind": kind, "ranks": ranks, **row} for row in rows]
            mixes = _measure_mixes(_compile(Path(folder), "mixes"), options.np, options.quick)
        except jobs.JobFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    found = _ratios(results) | _mix_ratios(mixes)
    document = report.document("interposer", vars(options), found, results, mixes=mixes)
    report.publish(options, document, f"{_table(results)}\n{_mix_table(mixes)}")
    return 0


def _read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.argument_parser(
        *("Measure what the interposer costs and gains.", EPILOG),
        quick="few sizes and rounds, in under 60 s",
    )
    parser.add_argument("--np", type=int, nargs="+", default=[2], help="ranks (default: 2)")
    parser.add_argument("--sizes", type=report.read_size, nargs="+", help="like 1KB 64KB 4MB")
    return report.parse(parser, argv)


def _compile(folder: Path, name: str) -> Path:
    compiler = find_wrapper("mpicc")
    if compiler is None:
        sys.exit("error: no mpicc beside the interpreter or on PATH: install an MPI with headers")
    program = folder / name
    source = str(SOURCES / f"{name}.c")
    subprocess.run([compiler, "-std=gnu11", "-O2", "-o", str(program), source], check=True)
    return program


def _measure_mixes(program: Path, ranks: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    rounds = "20" if quick else "200"
    rows = []
    for np in ranks:
        for copy, environ in COPIES.items():
            for row in _measure(np, [str(program), rounds], True, environ):
                rows.append({"ranks": np, "copy": copy, **row})
    return rows


def _measure(
    ranks: int, command: list[str], interposed: bool, settings: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    environ = jobs.environment(layouts.on_one_node(max(2, ranks)))
    environ |= settings or {}
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
        done = run_marked(words, environ, RUN_LIMIT_S)
    except CommandTimeout as error:
        raise jobs.JobFailed(f"{ranks} ranks: {str(error).splitlines()[0]}") from None
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
            ratios[name] = _share(row, "ns")
    return ratios


def _mix_ratios(mixes: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        f"vs_peer/interposer_mix/{row['mix']}/np{row['ranks']}/{row['copy']}": _share(row, "us")
        for row in mixes
    }


def _share(row: Mapping[str, Any], unit: str) -> float:
    return float(row[f"pmpi_{unit}"] / row[f"mpi_{unit}"])


def _mix_table(mixes: Sequence[dict[str, Any]]) -> str:
    columns: dict[str, Any] = {name: name for name in ("mix", "ranks", "copy")}
    columns |= {
        "MPI us": lambda row: f"{row['mpi_us']:.1f}",
        "PMPI us": lambda row: f"{row['pmpi_us']:.1f}",
        "PMPI / MPI": lambda row: f"{_share(row, 'us'):.2f}",
    }
    return report.rows_table(mixes, columns)


def _table(results: Sequence[dict[str, Any]]) -> str:
    columns: dict[str, Any] = {"calls": "kind", "collective": "collective", "ranks": "ranks"}
    columns |= {
        "bytes": lambda row: report.size_label(row["bytes"]),
        "MPI ns": lambda row: f"{row['mpi_ns']:.0f}",
        "PMPI ns": lambda row: f"{row['pmpi_ns']:.0f}",
        "extra ns": lambda row: f"{row['mpi_ns'] - row['pmpi_ns']:.0f}",
        "PMPI / MPI": lambda row: f"{_share(row, 'ns'):.2f}",
    }
    return report.rows_table(results, columns)


if __name__ == "__main__":
    sys.exit(run())
