"""The command line of the campaign: cases one after another, a table, a JSON file.

Owns what is printed. Exit code 1 when a case was not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from campaigns.chaos.cases import FAULTS, STARTERS, TIMEOUT_S, Case, draw
from campaigns.chaos.job import run_case
from campaigns.chaos.layers import LAYERS
from campaigns.chaos.mpi_launch import MpiLaunch
from campaigns.chaos.node_zygotes import NodeZygotes
from campaigns.chaos.oracle import judge
from campaigns.chaos.starter import Starter, StarterError
from campaigns.chaos.summary import summary, table
from campaigns.chaos.zygote import Zygote
from toolkit.cluster import Cluster

__all__ = ["main"]

_EPILOG = """\
Each case is a job of some ranks on this machine, on one node or on pretended ones that speak TCP,
in which one rank comes to harm at a random moment. What the others do is compared with what is
promised. Case k of --seed S is number S * 1000000 + k: --replay runs it again, with the same
--layers, --kinds and --under. With --twice a case that is not as it should be is run a second
time, and counts if it is not then either: for machines where other programs take the cores away.

examples:
  python -m campaigns.chaos --faults 100
  python -m campaigns.chaos --faults 1000 --seed 7 --json chaos.json
  python -m campaigns.chaos --layers ddp --kinds kill stop --faults 20
  python -m campaigns.chaos --replay 7000123
  python -m campaigns.chaos --under nodes --kinds cut slow --faults 50
  python -m campaigns.chaos --under mpirun --faults 50
  python -m campaigns.chaos --table monday.json tuesday.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; the exit code."""
    options = _parser().parse_args(argv)
    if options.table:
        files = [json.loads(path.read_text()) for path in options.table]
        return _end([result for file in files for result in file["results"]])
    if options.if_possible and (reason := _reason_impossible(options.under)):
        print(f"chaos: not run: {reason}", file=sys.stderr)
        return 0
    results: list[dict[str, Any]] = []
    try:
        _campaign(options, results)
    except (StarterError, ValueError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    finally:
        if options.json is not None:
            _write(options, results)
    return _end(results)


def _reason_impossible(under: str) -> str | None:
    return None if under == "fork" else Cluster.reason_unavailable()


def _campaign(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Raises StarterError, and ValueError where no layer or fault is left to draw from."""
    numbers: Iterable[int] = options.replay or (
        range(options.seed * 1_000_000, options.seed * 1_000_000 + options.faults)
    )
    with _starter(options.under) as starter:
        begin = time.monotonic()
        for count, number in enumerate(numbers):
            if options.limit_s and time.monotonic() - begin > options.limit_s:
                break
            case = draw(number, options.layers, options.kinds, options.under)
            result = _run(case, starter)
            if options.twice and result["problems"]:
                result = {**_run(case, starter), "first_time": result["problems"]}
            results.append(result)
            _say(case, result, count + 1, time.monotonic() - begin)
            if options.json is not None and (result["problems"] or count % 20 == 0):
                _write(options, results)


def _end(results: list[dict[str, Any]]) -> int:
    print("\n".join(table(results)))
    return 1 if any(result["problems"] for result in results) else 0


@contextlib.contextmanager
def _starter(under: str) -> Iterator[Starter]:
    if under == "nodes":
        with NodeZygotes() as nodes:
            yield nodes
    elif under == "mpirun":
        with MpiLaunch() as launch:
            yield launch
    else:
        with Zygote() as zygote:
            import torch.distributed  # threads of its own: after the ranks' process was started

            dist: Any = torch.distributed
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            zygote.store = ("127.0.0.1", store.port)
            yield zygote


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.chaos",
        description="Let ranks of small jobs come to harm, and judge what the others do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="cases (100)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the draw (1)")
    parser.add_argument("--limit-s", type=float, metavar="S", help="begin no case after that")
    parser.add_argument("--replay", type=int, nargs="+", metavar="CASE", help="these cases")
    parser.add_argument(
        "--layers",
        nargs="+",
        default=(),
        choices=list(LAYERS),
        metavar="LAYER",
        help=", ".join(f"{name} ({layer.about})" for name, layer in LAYERS.items()),
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=(),
        choices=list(FAULTS),
        metavar="FAULT",
        help=", ".join(f"{name} ({fault.about})" for name, fault in FAULTS.items()),
    )
    parser.add_argument(
        "--under",
        choices=list(STARTERS),
        default="fork",
        help="how ranks are started: "
        + "; ".join(f"{name}: {about}" for name, about in STARTERS.items())
        + " (fork)",
    )
    parser.add_argument(
        "--if-possible",
        action="store_true",
        help="where there can be no virtual nodes, say why and end with exit code 0",
    )
    parser.add_argument("--twice", action="store_true", help="run cases with problems again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all cases there")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing: one table of campaigns that --json wrote",
    )
    return parser


def _run(case: Case, starter: Starter) -> dict[str, Any]:
    try:
        seen = run_case(case, starter)
    except StarterError as error:  # an mpirun that does not come up, say
        print(f"{case}: started again: {error}", file=sys.stderr)
        starter.end_case()
        seen = run_case(case, starter)
    verdict = judge(seen)
    result = {
        "case": case.as_json(),
        "took_place": seen.took_place,
        "problems": verdict.problems,
        "latency_s": verdict.latency_s,
        "seconds": seen.seconds,
    }
    if verdict.problems:
        result["ranks"] = [
            {"told": rank.told, "status": rank.status, "steps": rank.steps, "output": rank.output}
            for rank in seen.ranks
        ]
    return result


def _say(case: Case, result: dict[str, Any], count: int, seconds: float) -> None:
    if result["problems"]:
        print("\n".join([str(case), *(f"  {kind}: {what}" for kind, what in result["problems"])]))
    sys.stdout.flush()
    if sys.stderr.isatty():
        print(f"\r{count} cases, {seconds:.0f} s ", end="", file=sys.stderr, flush=True)


def _write(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    found = {
        "meta": {
            "seed": options.seed,
            "layers": list(options.layers),
            "kinds": list(options.kinds),
            "under": options.under,
            "timeout_s": TIMEOUT_S,
            "cores": os.cpu_count(),
        },
        "summary": summary(results),
        "results": results,
    }
    part = options.json.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1))
    part.rename(options.json)


if __name__ == "__main__":
    sys.exit(main())
