"""Collectives on up to 1,024 simulated nodes, against Open MPI's and MPICH's algorithms and bounds.

Owns the command line. The parts are in simulation/: platforms.py the networks, runs.py the
simulator, bounds.py what no algorithm can beat, cases.py the choice, figures.py ratios and plot,
calibration.py how well the simulator predicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.stopping import keeping
from hsgd.config import Config
from simulation import runs
from simulation.calibration import calibrate
from simulation.cases import COLLECTIVES, SIZES, Found, Selection, measure
from simulation.figures import draw, ratios, tables
from simulation.local_level import MEASURED, read_local_level
from simulation.platforms import KINDS, NODES, Link

__all__ = ["main", "parser_of_options", "selection_of"]

EPILOG = """\
hsgd's unchanged communicator and transport run over SimGrid's SMPI, one rank per node; times are
simulated, so that a busy machine changes nothing but how long the program takes. Peers are single
algorithms of Open MPI and MPICH, each forced at every size: the best of them is at least as good as
what either MPI would choose. "limit" is the larger one of what latency and what bandwidth allow
(formulas and sources: benchmarks/simulation/bounds.py). Sizes are those of the whole vector; in an
allgather, a reduce_scatter and an alltoall each node has 1 / nodes of it, at least 8 bytes.

The network is InfiniBand at 100 Gbit/s as others published it (sources: simulation/platforms.py);
--gbit, --hop-ns and --message-ns give another one. Without --local the ranks of a node cost
nothing; with it, what an allreduce of the ranks of one node took is added to each collective, of
hsgd and of peers alike, and not to the bound. `python benchmarks/plan_calibration.py --constants
FILE` measures it on your machine.

What would take too long or too much memory is left out, and named at the end and in the JSON.

Ratios in the JSON, above 1 is ahead: vs_peer/COLLECTIVE/NETWORK-NODES/SIZE is the best peer's time
over that of hsgd, vs_limit/... the bound over that of hsgd: 1 is perfect. Where --radix names
several, the first is compared under these keys, and another, as 4, under COLLECTIVE_hsgd-4.
--calibrate writes vs_limit/allreduce/LAYOUT/SIZE, simulated / measured: below 1 is slower than
simulated.

examples:
  python benchmarks/simulate.py --quick
  python benchmarks/simulate.py --nodes 1024 --networks fat_tree --collectives allreduce barrier
  python benchmarks/simulate.py --radix 16 2 4 8 --nodes 64 256 --collectives allreduce
  python benchmarks/simulate.py --json simulate.json --png simulate.png
  python benchmarks/simulate.py --calibrate --json calibration.json
  python benchmarks/simulate.py --read simulate.json --png simulate.png
"""
_QUICK = {"networks": KINDS[:1], "nodes": (16,), "sizes": (8, 64 << 10, 1 << 20)}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 where a value was wrong, the simulator failed or is missing."""
    parser = parser_of_options()
    options = parser.parse_args(argv)
    report.check_targets(parser, options.json, options.png)
    if options.calibrate:
        return _calibrate(options)
    if options.read:
        document = json.loads(options.read.read_text(encoding="utf-8"))
        return _finish(document, options.png)
    try:
        selection = selection_of(options)
        runs.check_program()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    facts = report.facts("simulate")
    found = Found()
    with keeping() as stopped:
        for _ in measure(selection, found, lambda line: print(line, file=sys.stderr, flush=True)):
            _write(options.json, _document(facts, selection, found, 0))
    document = _document(facts, selection, found, stopped.code)
    _write(options.json, document)
    return stopped.code or _finish(document, options.png)


def _calibrate(options: argparse.Namespace) -> int:
    try:
        runs.check_program()
        return calibrate(options.calibrate, options.json, options.png, options.quick)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parser_of_options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Simulate collectives on many nodes with SimGrid.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a fat tree of 16 nodes, three sizes: half a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there, as it is found")
    add("--png", type=Path, metavar="FILE", help="plot time over bound there")
    add("--read", type=Path, metavar="FILE", help="simulate nothing: show and plot this JSON")
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
    add("--networks", nargs="+", choices=KINDS, help="default: all")
    add("--nodes", nargs="+", type=int, choices=NODES, help="default: all")
    add("--sizes", nargs="+", metavar="SIZE", help="such as 8B 64KB; default: 8 B to 256 MB")
    add("--radix", nargs="+", type=int, metavar="N", help="HSGD_WIRE_RADIX of hsgd, 2 to 64")
    add("--gbit", type=float, default=100.0, help="of a link, each way (default 100)")
    add("--hop-ns", type=float, default=150.0, help="of a link and the switch behind it (150)")
    add("--message-ns", type=float, default=300.0, help="of either end of a message (300)")
    add(
        "--local",
        type=Path,
        nargs="?",
        const=MEASURED,
        metavar="FILE",
        help="add what the ranks of a node cost, as plan_calibration.py --constants FILE measured "
        "it (default: the constants that hsgd plan comes with)",
    )
    add("--run-limit-s", type=float, default=240.0, help="of one form of a case (default 240)")
    add("--limit-s", type=float, default=36000.0, help="of everything (default 36000)")
    return parser


def selection_of(options: argparse.Namespace) -> Selection:
    """What the options choose; ValueError where one is out of range."""
    quick = _QUICK if options.quick else {}
    sizes = [report.read_size(text) for text in options.sizes or ()]
    radices = options.radix or [Config().wire_radix]
    if any(size < 8 or size % (8 if size < 4096 else 4096) for size in sizes):
        raise ValueError("--sizes: multiples of 8 bytes, from 4 KB on of 4 KB")
    if any(not 2 <= radix <= 64 for radix in radices):
        raise ValueError("--radix: 2 to 64")
    if options.gbit <= 0 or options.hop_ns < 0 or options.message_ns < 0:
        raise ValueError("--gbit: more than 0; --hop-ns and --message-ns: 0 or more")
    message_s = 1e-9 * options.message_ns
    link = Link(
        bytes_per_s=1e9 / 8 * options.gbit,
        hop_s=1e-9 * options.hop_ns,
        send_s=message_s,
        receive_s=message_s,
    )
    if options.run_limit_s <= 0 or options.limit_s <= 0:
        raise ValueError("--run-limit-s and --limit-s: more than 0")
    return Selection(
        networks=options.networks or quick.get("networks", KINDS),
        nodes=options.nodes or quick.get("nodes", NODES),
        collectives=options.collectives,
        sizes=sizes or quick.get("sizes", SIZES),
        radices=radices,
        run_limit_s=options.run_limit_s,
        limit_s=options.limit_s,
        link=link,
        words=read_local_level(options.local).words() if options.local else (),
    )


def _document(
    facts: dict[str, Any], selection: Selection, found: Found, code: int
) -> dict[str, Any]:
    subject = runs.hsgd_form(selection.radices[0]).name
    settings = {
        "subject": subject,
        "link": dataclasses.asdict(selection.link),
        "local": list(selection.words),
        "run_limit_s": selection.run_limit_s,
        "limit_s": selection.limit_s,
    }
    return {
        "meta": {**facts, "settings": settings, "interrupted": bool(code)},
        "ratios": ratios(found.rows, subject),
        "failures": found.failures,
        "left_out": found.left_out,
        "results": found.rows,
    }


def _write(target: Path | None, document: dict[str, Any]) -> None:
    if target:
        report.write_json(target, document)


def _finish(document: dict[str, Any], png: Path | None) -> int:
    """Show and plot; the exit code."""
    print(tables(document))
    for line in document["left_out"]:
        print(f"left out: {line}")
    for line in document["failures"]:
        print(f"failed: {line}", file=sys.stderr)
    if png and document["results"]:
        draw(document, png)
    return int(bool(document["failures"]))


if __name__ == "__main__":
    sys.exit(main())
