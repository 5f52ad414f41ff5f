"""ChaosCampaign: cases one after another, and what is said of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from campaigns.chaos.case_job import CaseJob
from campaigns.chaos.cases import FAULTS, STARTERS, TIMEOUT_S, Case, draw
from campaigns.chaos.layers import LAYERS
from campaigns.chaos.oracle import judge
from campaigns.chaos.summary import summary, table
from campaigns.mpi_launch import MpiLaunch
from campaigns.zygotes import StarterError, Zygotes
from toolkit.cluster import Cluster

__all__ = ["ChaosCampaign"]

_NODES = 3
_MODULES = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel"),
    *("torch.distributed.fsdp", "campaigns.chaos.core_programs", "campaigns.chaos.optim_programs"),
    *("campaigns.chaos.torch_programs", "campaigns.chaos.reader_programs"),
)
_EPILOG = """\
Each case is a job of some ranks on this machine, on one node or on pretended ones that speak TCP,
in which one rank comes to harm at a random moment. What the others do is compared with what is
promised. Case k of --seed S is number S * 1000000 + k: --replay runs it again, with the same
--layers, --kinds and --under. With --twice a case that is not as it should be is run a second
time, and counts if it is not then either: for machines where other programs take the cores away.

examples:
  python -m campaigns chaos --faults 100
  python -m campaigns chaos --faults 1000 --seed 7 --json chaos.json
  python -m campaigns chaos --layers ddp --kinds kill stop --faults 20
  python -m campaigns chaos --replay 7000123
  python -m campaigns chaos --under nodes --kinds cut slow --faults 50
  python -m campaigns chaos --under mpirun --faults 50
  python -m campaigns chaos --table monday.json tuesday.json
"""


class ChaosCampaign:
    """Random faults at random moments in small jobs."""

    name = "chaos"
    about = "Let ranks of small jobs come to harm, and judge what the others do."

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    @staticmethod
    def epilog() -> str:
        """Return the end of its help."""
        return _EPILOG

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add its own options to its command."""
        add = parser.add_argument
        add("--faults", type=int, default=100, metavar="N", help="cases (100)")
        add("--seed", type=int, default=1, metavar="S", help="of the draw (1)")
        add("--limit-s", type=float, metavar="S", help="begin no case after that")
        add("--replay", type=int, nargs="+", metavar="CASE", help="these cases")
        several: dict[str, Any] = {"nargs": "+", "default": ()}
        layers = ", ".join(f"{name} ({layer.about})" for name, layer in LAYERS.items())
        add("--layers", choices=list(LAYERS), metavar="LAYER", help=layers, **several)
        faults = ", ".join(f"{name} ({fault.about})" for name, fault in FAULTS.items())
        add("--kinds", choices=list(FAULTS), metavar="FAULT", help=faults, **several)
        starters = "; ".join(f"{name}: {about}" for name, about in STARTERS.items())
        words = f"how ranks are started: {starters} (fork)"
        add("--under", choices=list(STARTERS), default="fork", help=words)
        words = "where there can be no virtual nodes, say why and end with exit code 0"
        add("--if-possible", action="store_true", help=words)
        add("--twice", action="store_true", help="run cases with problems again")
        words = "run nothing: one table of campaigns that --json wrote"
        add("--table", type=Path, nargs="+", metavar="FILE", help=words)

    def results(self) -> Iterator[dict[str, Any]]:
        """Run the cases. Raises StarterError, and ValueError if there is nothing to draw."""
        options = self._options
        if options.table:
            for path in options.table:
                yield from json.loads(path.read_text())["results"]
            return
        needs_nodes = options.if_possible and options.under != "fork"
        if needs_nodes and (reason := Cluster.reason_unavailable()):
            print(f"chaos: not run: {reason}", file=sys.stderr)
            return
        first = options.seed * 1_000_000
        numbers: Iterable[int] = options.replay or range(first, first + options.faults)
        with _starter(options.under) as starter:
            begin = time.monotonic()
            for count, number in enumerate(numbers, 1):
                if options.limit_s and time.monotonic() - begin > options.limit_s:
                    break
                case = draw(number, options.layers, options.kinds, options.under)
                result = _run(case, starter)
                if options.twice and result["problems"]:
                    result = {**_run(case, starter), "first_time": result["problems"]}
                yield result
                if sys.stderr.isatty():
                    text = f"\r{count} cases, {time.monotonic() - begin:.0f} s "
                    print(text, end="", file=sys.stderr, flush=True)

    def lines(self, result: dict[str, Any]) -> list[str]:
        """Return what is said of a case at once: its problems."""
        if self._options.table or not result["problems"]:
            return []
        case = Case(**result["case"])
        return [str(case), *(f"  {kind}: {what}" for kind, what in result["problems"])]

    def summary(self, results: list[dict[str, Any]]) -> list[str]:
        """Return the table of all layers."""
        return table(results)

    def report(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what is written beside the results."""
        meta = {
            "seed": self._options.seed,
            "layers": list(self._options.layers),
            "kinds": list(self._options.kinds),
            "under": self._options.under,
            "timeout_s": TIMEOUT_S,
            "cores": os.cpu_count(),
        }
        return {"meta": meta, "summary": summary(results)}


def _starter(under: str) -> Zygotes:
    if under == "mpirun":
        return MpiLaunch(nodes=_NODES)
    return Zygotes(_MODULES, nodes=_NODES if under == "nodes" else 0)


def _run(case: Case, starter: Zygotes) -> dict[str, Any]:
    job = CaseJob(starter, case)
    try:
        job.run()
    except StarterError as error:  # an mpirun that does not come up, say
        print(f"{case}: started again: {error}", file=sys.stderr)
        job = CaseJob(starter, case)
        job.run()
    seen = job.observed()
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
