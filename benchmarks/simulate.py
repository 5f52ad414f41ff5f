"""Collectives on up to 1,024 simulated nodes, against Open MPI's and MPICH's algorithms and bounds.

The parts are in simulation/: platforms.py the networks, runs.py the simulator, bounds.py what no
algorithm can beat, cases.py the choice, figures.py ratios and plot, calibration.py how well the
simulator predicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.stopping import keeping
from simulation import runs
from simulation.calibration import calibrate
from simulation.cases import COLLECTIVES, SIZES, Found, Selection, measure
from simulation.figures import draw, ratios, tables
from simulation.network_fit import MEASURED
from simulation.platforms import NODES, Link

__all__ = ["main"]

EPILOG = """\
hsgd's unchanged communicator and transport run over SimGrid's SMPI, one rank per node; times are
simulated, so that a busy machine changes nothing but how long the program takes. Peers are single
algorithms of Open MPI and MPICH, each forced at every size: the best of them is at least as good as
what either MPI would choose. "limit" is the larger one of what latency and what bandwidth allow
(formulas and sources: benchmarks/simulation/bounds.py). Sizes are those of the whole vector; in an
allgather, a reduce_scatter and an alltoall each node has 1 / nodes of it, at least 8 bytes.

The network is InfiniBand at 100 Gbit/s as others published it (sources: simulation/platforms.py).
The ranks of a node cost nothing.

What would take too long or too much memory is left out, and named at the end and in the JSON.

Ratios in the JSON, above 1 is ahead: vs_peer/COLLECTIVE/NETWORK-NODES/SIZE is the best peer's time
over that of hsgd, vs_limit/... the bound over that of hsgd: 1 is perfect.
--calibrate writes vs_limit/allreduce/LAYOUT/SIZE, simulated / measured: below 1 is slower than
simulated.

examples:
  python benchmarks/simulate.py --quick
  python benchmarks/simulate.py --nodes 1024 --collectives allreduce barrier
  python benchmarks/simulate.py --json simulate.json --png simulate.png
  python benchmarks/simulate.py --calibrate --json calibration.json
"""
_QUICK = {"nodes": (16,), "sizes": (8, 64 << 10, 1 << 20)}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 where a value was wrong, the simulator failed or is missing."""
    parser = _parser()
    options = report.parse(parser, argv, sizes=report.read_size)
    selection = _selection(parser, options)
    try:
        runs.check_program()
        if options.calibrate:
            return calibrate(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = Found()
    with keeping() as stopped:
        for _ in measure(selection, found, lambda line: print(line, file=sys.stderr, flush=True)):
            if options.json:
                report.write_json(options.json, _document(selection, found, 0))
    document = _document(selection, found, stopped.code)
    report.publish(options, document, tables(document), draw)
    return stopped.code or int(bool(found.failures))


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = report.argument_parser(
        *("Simulate collectives on many nodes with SimGrid.", EPILOG),
        quick="a fat tree of 16 nodes, three sizes: half a minute",
        png="plot time over bound there",
    )
    add = parser.add_argument
    add(
        "--calibrate",
        type=Path,
        nargs="?",
        const=MEASURED,
        metavar="FILE",
        help="how well the simulator predicts: simulate the allreduces on virtual nodes that "
        "plan_calibration.py --constants FILE measured (default: those that hsgd plan comes with), "
        "each layout with constants fitted to the others",
    )
    add("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    add("--nodes", nargs="+", type=int, choices=NODES, help="default: all")
    add("--sizes", nargs="+", metavar="SIZE", help="such as 8B 64KB; default: 8 B to 256 MB")
    add("--run-limit-s", type=float, default=240.0, help="of one form of a case (default 240)")
    add("--limit-s", type=float, default=36000.0, help="of everything (default 36000)")
    return parser


def _selection(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Selection:
    """What the options choose."""
    quick = _QUICK if options.quick else {}
    if any(size < 8 or size % (8 if size < 4096 else 4096) for size in options.sizes):
        parser.error("--sizes: multiples of 8 bytes, from 4 KB on of 4 KB")
    if options.run_limit_s <= 0 or options.limit_s <= 0:
        parser.error("--run-limit-s and --limit-s: more than 0")
    return Selection(
        nodes=options.nodes or quick.get("nodes", NODES),
        collectives=options.collectives,
        sizes=options.sizes or quick.get("sizes", SIZES),
        run_limit_s=options.run_limit_s,
        limit_s=options.limit_s,
    )


def _document(selection: Selection, found: Found, stopped: int) -> dict[str, Any]:
    settings = {
        "subject": runs.hsgd_form(selection.radix).name,
        "link": dataclasses.asdict(Link()),
        "run_limit_s": selection.run_limit_s,
        "limit_s": selection.limit_s,
    }
    return report.document(
        *("simulate", settings, ratios(found.rows), found.rows, found.failures, stopped),
        left_out=found.left_out,
    )


if __name__ == "__main__":
    sys.exit(main())
