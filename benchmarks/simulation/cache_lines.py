"""Counts the cache lines that each form of a collective moves between cores, and compares forms.

    cd benchmarks; python -m simulation.cache_lines [--json FILE]

For machines with more cores than there are at hand. Unit of time: one line that another core has
written, read in a stream. A form's time is the lines of the busiest core plus the arrivals that
follow one another. Two numbers come from a measurement on 16 cores (docs/internals/scale.md): the
time of an allreduce of 16 KB in one step, and the size up to which one step was as fast as two.
Results past the caches, NUMA nodes and many readers of one line cost nothing in this model.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import report

__all__ = ["FORMS", "Node", "break_even_bytes"]

LINE = 64
FLAT_RANKS = 16  # HSGD_FLAT_RANKS
MEASURED_US = 45.0  # 16 ranks, 16 KB, one step
MEASURED_ONE_STEP = 16 << 10  # bytes of all inputs up to which one step was as fast as two
# What else was measured with 16 ranks there, in us; from 256 KiB a step on.
CHECKS = {
    ("allreduce", "two steps", 16 << 10): 13.6,
    ("allreduce", "two steps", 32 << 20): 14400.0,
    ("broadcast", "all read", 16 << 20): 3500.0,
}


@dataclass(frozen=True)
class Node:
    """Ranks with a core each; one sees another arrive in the time of `arrival` lines."""

    ranks: int
    arrival: float = 0.0

    def meeting(self) -> float:
        """Lines in the time until all ranks know that all have arrived."""
        if self.ranks <= FLAT_RANKS:  # each rank checks all others
            return self.arrival * (self.ranks - 1)
        members = 8 if self.ranks <= 64 else 16
        groups = math.ceil(self.ranks / members)
        # Ranks count in their group, the last of each group counts the group, one informs all.
        return self.arrival * (members + 2 * groups)


def _of_slice(node: Node, lines: int) -> int:
    """Return the lines of the other ranks' inputs of one rank's slice."""
    return (node.ranks - 1) * math.ceil(lines / node.ranks)


def _one_step(node: Node, lines: int) -> float:
    everything = node.meeting() + (node.ranks - 1) * lines
    # Beyond FLAT_RANKS the last rank to arrive reads all inputs, the others read its result.
    return everything if node.ranks <= FLAT_RANKS else everything + lines


def _two_steps(node: Node, lines: int) -> float:
    return 2 * node.meeting() + lines + _of_slice(node, lines) + lines  # stage, sum, gather


def _in_place(node: Node, lines: int) -> float:
    return 2 * node.meeting() + 2 * _of_slice(node, lines)  # read the inputs, write the outputs


def _own_slice(node: Node, lines: int) -> float:
    return node.meeting() + _of_slice(node, lines)


def _read_all(node: Node, lines: int) -> float:
    return node.meeting() + lines


def _write_part(node: Node, lines: int) -> float:
    return 2 * node.meeting() + math.ceil(lines / node.ranks) + _of_slice(node, lines)


def _joined(node: Node, lines: int) -> float:
    return node.meeting() + max(lines, node.ranks - 1) + lines  # `lines` of the whole result


def _blocks(node: Node, lines: int) -> float:
    return node.meeting() + max(lines, node.ranks - 1)


FORMS: dict[str, dict[str, Callable[[Node, int], float]]] = {
    "allreduce": {"one step": _one_step, "two steps": _two_steps, "Comm.empty": _in_place},
    "reduce_scatter": {"one rank sums": _one_step, "each its slice": _own_slice},
    "broadcast": {"all read": _read_all, "Comm.empty": _write_part},
    "allgather": {"one rank joins": _joined, "all read": _blocks},
}


def _arrival() -> float:
    """Return the lines for which one step and two take equally long where they were measured to."""
    node, lines = Node(FLAT_RANKS), MEASURED_ONE_STEP // FLAT_RANKS // LINE
    return (_one_step(node, lines) - _two_steps(node, lines)) / (FLAT_RANKS - 1)


def _line_us(arrival: float) -> float:
    return MEASURED_US / _one_step(Node(FLAT_RANKS, arrival), (16 << 10) // LINE)


def break_even_bytes(node: Node) -> int:
    """Return the payload from which an allreduce in two steps moves fewer lines than in one."""
    lines = 1
    while _two_steps(node, lines) >= _one_step(node, lines):
        lines += 1
    return lines * LINE


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--np", type=int, nargs="+", default=[16, 64, 128], help="ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(argv)
    arrival = _arrival()
    line_us = _line_us(arrival)
    sizes = [64, 256, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
    results = [
        {"collective": collective, "ranks": ranks, "form": form, "bytes": size, "us": line_us * us}
        for collective, forms in FORMS.items()
        for ranks in options.np
        for form, lines_of in forms.items()
        for size in sizes
        for us in [lines_of(Node(ranks, arrival), math.ceil(size / LINE))]
    ]
    header = ["us, a core each", "ranks", "form", *map(report.size_label, sizes)]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for row in results:
        key = str(row["collective"]), str(row["ranks"]), str(row["form"])
        rows.setdefault(key, []).append(f"{row['us']:.3g}")
    print(report.table(header, [[*key, *cells] for key, cells in rows.items()]))
    ratios = {}
    for (collective, form, size), measured_us in CHECKS.items():
        us = line_us * FORMS[collective][form](Node(FLAT_RANKS, arrival), size // LINE)
        ratios[f"vs_limit/{collective}/{report.size_label(size)}"] = us / measured_us
        what = f"{collective} of {report.size_label(size)}"
        print(f"16 ranks, {what}: {us:.3g} us, measured {measured_us:.3g}")
    limits = {ranks: break_even_bytes(Node(ranks, arrival)) for ranks in options.np}
    print(f"a line: {1000 * line_us:.1f} ns; an arrival: {1000 * line_us * arrival:.0f} ns")
    print("two steps are faster from:", *(f"{size} B ({n} ranks)" for n, size in limits.items()))
    if options.json:
        meta = {"line_us": line_us, "arrival_lines": arrival, "break_even_bytes": limits}
        report.write_json(options.json, {"meta": meta, "results": results, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
