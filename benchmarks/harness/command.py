"""The command line that the benchmarks of collectives share, and what becomes of their figures.

turns.py says how candidates are interleaved, candidates.py what they are.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import report
from harness.candidates import CANDIDATES, HOROVOD_CYCLE_S, select
from harness.jobs import environment, raise_limit
from harness.layouts import JobLayout, on_one_node, read_layout
from harness.operations import OPERATIONS
from harness.ratios import FROM_C, SHOWN, ratios
from harness.setup_cost import setup_ratios
from harness.stopping import keeping
from harness.turns import (
    BATCH_S,
    BUFFERS,
    CYCLE_CALLS,
    LEAST_CALLS,
    LIMIT_S,
    MeasurementPlan,
    Run,
    measure,
)

__all__ = ["Benchmark", "document", "run", "tables"]

# Variables that change what is measured: they go into the JSON.
_TELLING = ("HSGD_", "HOROVOD_", "OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "CCL_", "GLOO_", "OMP_")

EPILOG = f"""\
A time is that of one call, the mean over a batch of calls of about {BATCH_S * 1e3:g} ms that
begins with a barrier, and the largest over the ranks. Median and 99th percentile are over batches.
After each turn the results of its last calls are compared with the exact ones, bit for bit, on all
ranks; a wrong one is an error. Only hsgd with 16-bit floats between nodes may be off, by 2^-7.
Who takes more than --limit-s for {LEAST_CALLS} calls of a case is not asked for larger sizes: a
line says so, and "failures" in the JSON.

Horovod, with hsgd or without, answers in steps of its cycle of {HOROVOD_CYCLE_S * 1e3:g} ms, and
looks for the answer as seldom. Calls back to back would fall into step with that, and count a
little work as a whole cycle or as nothing. So each of its calls begins after a pause below one
cycle, drawn at random, the same on all ranks and not timed, and a batch is the mean of up to
{CYCLE_CALLS} such calls. They are in place, as those of its DistributedOptimizer.

Where ranks outnumber cores Open MPI gets mpi_yield_when_idle, MPICH its progress throttle at every
poll, Intel MPI I_MPI_THREAD_YIELD=2 (which it does as it comes), oneCCL CCL_YIELD=sched_yield, and
candidates that only spin are left out. Open MPI's TCP gets btl_tcp_links 4. oneCCL always gets
CCL_WORKER_OFFLOAD=0: threads of its own would take the ranks' cores. Peers that are not there are
installed once, into hsgd's cache: MPICH and Intel MPI, for one node, into environments of their
own, oneCCL from its wheels (130 MB), and DeepSpeed's allreduce, compiled from its source
distribution.

Descriptors: this program and the launchers raise their soft limit as far as they may; ranks keep
the one that was there, or get that of --files.

Virtual nodes (--nodes) need Linux and root; they share the cores of this machine.

Ratios in the JSON, all within this run: vs_peer/allreduce/LAYOUT/SIZE is the median of the best of
MPI, oneCCL, gloo and Horovod / that of hsgd from C; allreduce_python the same among calls from
Python;
allreduce_arena and allreduce_arena_python with hsgd's buffers in shared memory; allreduce_bf16 with
16-bit floats between nodes;
allreduce_horovod_plugin Horovod / Horovod with the plugin hsgd-mpi, the interposer. vs_limit is
the limit / hsgd, vs_deepspeed, vs_mpi-c, ... are a single peer / hsgd.
"""


@dataclass(frozen=True)
class Benchmark:
    """One of the programs in this folder."""

    name: str
    about: str
    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    rounds: int
    quick_rounds: int
    quick_budget_s: float
    notes: str  # at the end of the help
    ranks: tuple[int, ...] = (2,)  # on one node, unless --np or --nodes say others
    quick_ranks: tuple[int, ...] = (2,)
    candidates: tuple[str, ...] = ()  # unless --candidates names others; empty: all
    span: bool = False  # see MeasurementPlan; takes candidates from C alone
    tables: Callable[[Mapping[str, Any]], str] | None = None  # instead of those of this file
    plot: Callable[[Mapping[str, Any], Path], None] | None = None  # instead of that of report.py


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 for a wrong result, or when nothing was measured."""
    plan, options = _read_arguments(benchmark, argv)
    found = Run()
    with keeping() as stopped:
        measure(plan, found)
    doc = document(benchmark.name, plan, found, stopped.code)
    lower = {(vs, suffix): label for vs, suffix, _, label in SHOWN}
    plot = benchmark.plot or (lambda doc, target: report.plot(doc, target, lower))
    report.publish(options, doc, (benchmark.tables or tables)(doc), plot)
    if found.any_wrong:
        print("error: results were wrong, see above", file=sys.stderr)
        return 1
    return stopped.code or (0 if doc["results"] else 1)


def document(name: str, plan: MeasurementPlan, found: Run, stopped: int = 0) -> dict[str, Any]:
    """Everything that is known after a run, as it goes into the JSON."""
    rows = found.rows(plan)
    settings = {
        "sizes": plan.sizes,
        "layouts": {layout.name: str(layout) for layout in plan.layouts},
        "collectives": {c: OPERATIONS[c].about for c in plan.collectives},
        "candidates": {c.name: c.about for c in plan.candidates},
        "rounds": plan.rounds,
        "budget_s": plan.budget_s,
        "limit_s": plan.limit_s,
        "ulimit": plan.ulimit,
        "span": plan.span,
        "batch_s": BATCH_S,
        "buffers": BUFFERS,
        "dtype": "float32",
        "op": "sum",
        "omp_num_threads": {n.name: environment(n)["OMP_NUM_THREADS"] for n in plan.layouts},
        "crowded": [layout.name for layout in plan.layouts if layout.crowded],
        "pause_before_each_call_s": {c.name: c.cycle_s for c in plan.candidates if c.cycle_s},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_TELLING)},
    }
    return report.document(
        *(name, settings, {**ratios(rows), **setup_ratios(found.setups)}, rows),
        *(found.failures, stopped),
        meta={"machine": found.machine, "launches": found.launches},
        setup=found.setups,
    )


def tables(doc: Mapping[str, Any]) -> str:
    """The document as text for a terminal, a table for each layout and collective."""
    parts = []
    for (layout, collective), rows in report.grouped(
        doc["results"], "layout", "collective"
    ).items():
        title = f"{collective}, {doc['meta']['settings']['layouts'][layout]}"
        parts += [f"{title}, median microseconds per call", _table(rows, doc["ratios"])]
        parts.append(_state(doc["meta"]["machine"].get(layout, {})))
    return "\n".join(part for part in parts if part)


def _table(rows: Sequence[Mapping[str, Any]], found: Mapping[str, float]) -> str:
    layout, collective = rows[0]["layout"], rows[0]["collective"]
    order = [candidate.name for candidate in CANDIDATES]
    ways: dict[str, Any] = {}
    for vs, suffix, title, _ in SHOWN:
        key = f"{vs}/{collective}{suffix}/{layout}/"
        if any(name.startswith(key) for name in found):
            ways[title] = lambda row, key=key: found.get(key + report.size_label(row["bytes"]))
    return report.pivot(
        sorted(rows, key=lambda row: (row["bytes"], order.index(row["candidate"]))),
        {"bytes": lambda row: report.size_label(row["bytes"])},
        "label",  # which some candidates share: the limits of different sizes
        lambda row: _microseconds(row["median_us"]),
        ways,
    )


def _microseconds(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _state(machine: Mapping[str, Any]) -> str:
    """The state of the machine in words."""
    words = []
    if machine.get("shared_last_level_cache") is not None:
        cache = "share a" if machine["shared_last_level_cache"] else "share no"
        fresh, memory = machine["fresh_line_gb_s"], machine["memory_gb_s"]
        words.append(f"cores {cache} last-level cache ({fresh:g} GB/s fresh, {memory:g} memory)")
    if machine.get("state_changed"):
        words.append("and this changed during the run")
    if "store" in machine:
        words.append(f"hsgd uses {machine['store']} stores and {machine['kernels']} kernels")
    return "; ".join(words)


def _read_arguments(
    benchmark: Benchmark, argv: Sequence[str] | None
) -> tuple[MeasurementPlan, argparse.Namespace]:
    parser = _parser(benchmark)
    options = report.parse(parser, argv)
    try:
        sizes = [report.read_size(text) for text in options.sizes or ()]
        layouts = _layouts(options, benchmark.quick_ranks if options.quick else benchmark.ranks)
        collectives = tuple(getattr(options, "collectives", None) or benchmark.collectives)
        candidates = select(options.candidates or benchmark.candidates, collectives)
    except ValueError as error:
        parser.error(str(error))
    if any(size < 4 or size % 4 for size in sizes):
        parser.error("--sizes: float32 takes multiples of 4 bytes")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds: 1 or more")
    if benchmark.span and any(c.name not in FROM_C for c in candidates):
        parser.error(f"--candidates: of {', '.join(sorted(FROM_C))}")
    if options.limit_s <= 0 or (options.files is not None and options.files < 1):
        parser.error("--limit-s, --files: above 0")
    quick, restored = options.quick, raise_limit()
    plan = MeasurementPlan(
        sizes=tuple(sizes) or (benchmark.quick_sizes if quick else benchmark.sizes),
        layouts=layouts,
        candidates=candidates,
        rounds=options.rounds or (benchmark.quick_rounds if quick else benchmark.rounds),
        budget_s=benchmark.quick_budget_s if quick else 1.0,
        collectives=collectives,
        install=options.peers,
        limit_s=options.limit_s,
        span=benchmark.span,
        ulimit=f"-n {options.files}" if options.files else restored,
    )
    return plan, options


def _layouts(options: argparse.Namespace, default: Sequence[int]) -> tuple[JobLayout, ...]:
    ranks = options.np or ([] if options.nodes else default)
    return (*map(on_one_node, ranks), *map(read_layout, options.nodes or ()))


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    known = [c.name for c in CANDIDATES if set(c.collectives) & set(benchmark.collectives)]
    ranks = " ".join(map(str, benchmark.ranks))
    parser = report.argument_parser(
        *(benchmark.about, f"{EPILOG}\n{benchmark.notes}"),
        quick="fewer sizes and rounds: under a minute",
        png="plot the first layout and collective there",
    )
    add = parser.add_argument
    add("--sizes", nargs="+", metavar="SIZE", help="bytes per rank, like 8 64KB 1MB")
    add("--np", nargs="+", type=int, metavar="N", help=f"ranks on one node (default {ranks})")
    add("--nodes", nargs="+", metavar="LAYOUT", help="virtual nodes, like 2x2@1gbit 2+1@10gbit")
    if len(benchmark.collectives) > 1:
        choices = benchmark.collectives
        add("--collectives", nargs="+", choices=choices, help="these alone (default: all)")
    add("--candidates", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(known)}")
    add("--rounds", type=int, help=f"turns of each candidate (default {benchmark.rounds})")
    about = f"who takes longer for {LEAST_CALLS} calls of a case ends there (default {LIMIT_S:g})"
    add("--limit-s", type=float, default=LIMIT_S, metavar="S", help=about)
    add("--files", type=int, metavar="N", help="descriptors of a rank, as with ulimit -n")
    about = "download peers that are not there yet: MPICH, Intel MPI, oneCCL, ... (some 480 MB)"
    add("--peers", action="store_true", help=about)
    return parser
