"""`hsgd plan`: its options, its table and its JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from hsgd.tools.plan.calibration import DEFAULT, Calibration, read_calibration
from hsgd.tools.plan.model import Cluster
from hsgd.tools.plan.strategies import Forecast, Outlook, Workload, forecast

__all__ = ["add_parser", "read_rate"]

EXAMPLES = """examples:
  hsgd plan --nodes 64 --ranks-per-node 8 --link 25gbit --model-mb 100
  hsgd plan --nodes 64 --ranks-per-node 8 --link 25gbit --model-mb 100 --compute-ms 180
  hsgd plan --nodes 16 --ranks-per-node 4 --link 100gbit --model-mb 500 --rdma --latency-us 2 --json

Columns:
  communication  time to exchange the gradients of one step
  exposed        the part that forward and backward cannot hide; backward counts as two thirds of
                 both, and the last bucket is sent after it; without --compute-ms nothing is hidden
  suits from     time of forward and backward from which at most a tenth of the step is exposed
  sent, memory   of one node; memory includes the gradients of its ranks

Bounds in brackets held for nine of ten measurements of layouts that the model had not seen. A very
different cluster may lie outside of them.
docs/internals/scale.md says how the model was made and checked.
"""
_SCALES = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}
_Times = tuple[float, float, float]


def add_parser(commands: Any) -> None:
    """Add the command to the `hsgd` command's subparsers."""
    plan = commands.add_parser(
        "plan",
        help="predict the cost of a step on a cluster, and the strategy to take",
        description="Predict what communication costs a training step on a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    plan.add_argument(
        "--ranks-per-node", type=int, required=True, metavar="L", help="ranks on each node"
    )
    plan.add_argument(
        "--link",
        type=read_rate,
        required=True,
        metavar="RATE",
        help="rate of each node's network in each direction: 25gbit, 800mbit",
    )
    plan.add_argument(
        "--model-mb",
        type=float,
        required=True,
        metavar="MB",
        help="gradients of one step, 1e6 bytes, as float32: 4 bytes per parameter",
    )
    plan.add_argument(
        "--compute-ms",
        type=float,
        metavar="MS",
        help="forward and backward of one step on one rank, without communication",
    )
    plan.add_argument(
        "--cores", type=float, metavar="C", help="cores of a node (default: one per rank)"
    )
    plan.add_argument(
        "--rdma",
        action="store_true",
        help="adapters move data between nodes (InfiniBand, RoCE); by default cores do, over TCP",
    )
    plan.add_argument(
        "--latency-us",
        type=float,
        metavar="US",
        help="latency of a message between nodes (default: that of the calibration)",
    )
    plan.add_argument(
        "--calibration",
        type=Path,
        default=DEFAULT,
        metavar="FILE",
        help="constants of benchmarks/plan_calibration.py (default: those of hsgd's own machine)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(command_function=_plan)


def read_rate(text: str) -> float:
    """Return the Gbit/s of "25gbit" or "800mbit". Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgt])bit", text.lower())
    if not found or not float(found[1]) > 0:
        raise argparse.ArgumentTypeError(f'"{text}" is not a rate; write it like 25gbit or 800mbit')
    return float(found[1]) * _SCALES[found[2]]


def _plan(arguments: argparse.Namespace) -> None:
    calibration = read_calibration(arguments.calibration)
    if arguments.latency_us is not None:
        calibration = dataclasses.replace(calibration, latency_us=arguments.latency_us)
    cores = arguments.ranks_per_node if arguments.cores is None else arguments.cores
    cluster = Cluster(
        arguments.nodes, arguments.ranks_per_node, arguments.link, cores, arguments.rdma
    )
    compute_s = None if arguments.compute_ms is None else arguments.compute_ms / 1e3
    if not math.isfinite(arguments.model_mb):
        raise ValueError(f"a model of {arguments.model_mb} MB; give a number")
    workload = Workload(round(arguments.model_mb * 1e6), compute_s)
    found = forecast(cluster, workload, calibration)
    if arguments.json:
        print(json.dumps(_document(cluster, workload, calibration, found), indent=2))
    else:
        print("\n".join(_lines(cluster, workload, calibration, found)))


def _document(
    cluster: Cluster, workload: Workload, calibration: Calibration, found: Forecast
) -> dict[str, Any]:
    compute_s = workload.compute_s or 0.0
    strategies = [
        {**dataclasses.asdict(outlook), "step": outlook.step(compute_s)}
        for outlook in found.outlooks
    ]
    return {
        "cluster": dataclasses.asdict(cluster),
        "workload": dataclasses.asdict(workload),
        "calibration": dataclasses.asdict(calibration),
        "allreduce": dataclasses.asdict(found.allreduce),
        "strategies": strategies,
        "choice": found.choice.name if found.choice else None,
    }


def _lines(
    cluster: Cluster, workload: Workload, calibration: Calibration, found: Forecast
) -> list[str]:
    one = found.allreduce
    where = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.ranks_per_node}"
    lines = [
        f"{workload.model_bytes / 1e6:g} MB of gradients on {where} ranks, "
        f"links of {cluster.link_gbit:g} Gbit/s"
    ]
    if cluster.nodes > 1:
        lines.append(
            f"an allreduce: {one.leaders} leaders per node, {one.messages} messages in "
            f"{one.rounds} round{'s' if one.rounds > 1 else ''}, "
            f"{one.steps or 1} step{'s' if one.steps > 1 else ''}; between nodes it takes "
            f"{_time(one.between_s)}, inside a node {_time(one.inside_s)}"
        )
    compute_s = workload.compute_s
    header = ["strategy", "communication", "exposed"]
    header += ["step"] if compute_s is not None else []
    header += ["suits from", "sent", "memory"]
    rows = [_row(outlook, compute_s) for outlook in found.outlooks]
    lines += ["", *_table([header, *rows]), ""]
    lines += [f"{outlook.name}: {outlook.how}" for outlook in found.outlooks]
    if found.choice is not None:
        lines.append(f"take: {found.choice.name}")
    else:
        lines.append("take: the first whose 'suits from' is at most your forward and backward time")
    return [*lines, f"constants: {calibration.source}"]


def _row(outlook: Outlook, compute_s: float | None) -> list[str]:
    times = [outlook.communication, outlook.exposed]
    if compute_s is not None:
        times.append(outlook.step(compute_s))
    return [
        outlook.name,
        *map(_bounded, times),
        _time(outlook.suits_from_s),
        f"{outlook.sent_bytes / 1e6:.4g} MB",
        f"{outlook.memory_bytes / 1e6:.4g} MB",
    ]


def _bounded(times: _Times) -> str:
    best, low, high = map(_time, times)
    return f"{best} ({low} to {high})"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * unit or name == "us":
            value = seconds / unit
            break
    digits = max(0, 2 - max(0, math.floor(math.log10(value)))) if value > 0 else 0
    return f"{value:.{digits}f} {name}"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
