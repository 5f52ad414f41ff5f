"""What is simulated: collectives on networks, at sizes, in several forms; and the rows that result.

runs.py runs the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report import size_label
from hsgd.config import Config

from . import runs
from .bounds import bound
from .platforms import Platform, fat_tree

__all__ = ["COLLECTIVES", "SIZES", "Found", "Selection", "measure"]

COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier")
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
_IN_BLOCKS = ("allgather", "reduce_scatter", "alltoall")
_LEAST_BLOCK = 8  # bytes


@dataclass(frozen=True)
class Selection:
    """What to simulate.

    run_limit_s: of one form of a collective on one network, at all sizes. limit_s: of everything;
    what is left then is left out. radix: of hsgd, HSGD_WIRE_RADIX.
    """

    nodes: Sequence[int]
    collectives: Sequence[str]
    sizes: Sequence[int]
    run_limit_s: float
    limit_s: float
    radix: int = Config().wire_radix

    def cases(self) -> Iterator[tuple[Platform, str]]:
        """Few nodes first: what is left out when time is up is what takes longest."""
        for nodes in sorted(self.nodes):
            for collective in self.collectives:
                yield fat_tree(nodes), collective

    def forms(self, collective: str) -> list[runs.Form]:
        """hsgd's and the peers'."""
        return [runs.hsgd_form(self.radix), *runs.peer_forms(collective)]

    def sizes_of(self, collective: str, nodes: int) -> list[int]:
        """Bytes of the whole vector; where it is cut into a block for each node, no block is
        smaller than 8 bytes."""
        if collective == "barrier":
            return [0]
        least = _LEAST_BLOCK * (nodes if collective in _IN_BLOCKS else 1)
        return sorted({max(size, least) for size in self.sizes})


@dataclass
class Found:
    """Rows, and what there is no row of."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def measure(selection: Selection, found: Found, say: Callable[[str], None]) -> Iterator[None]:
    """Everything that is selected, into `found`; yields after each form of a case."""
    begin = time.monotonic()
    cases = list(selection.cases())
    for number, (network, collective) in enumerate(cases, 1):
        case = f"{collective} on {network.kind}-{network.nodes}"
        if time.monotonic() - begin > selection.limit_s:
            found.left_out.append(f"{case}: {selection.limit_s:g} s were over")
            continue
        sizes = selection.sizes_of(collective, network.nodes)
        fitting = [size for size in sizes if runs.fits(network.nodes, size)]
        for size in sorted(set(sizes) - set(fitting)):
            found.left_out.append(f"{case}, {size_label(size)}: too much to simulate")
        found.rows += [_limit_row(network, collective, size) for size in fitting]
        for form in selection.forms(collective):
            say(f"{number}/{len(cases)} {case}: {form.label}")
            left_s = max(1.0, selection.limit_s - (time.monotonic() - begin))
            limit_s = min(selection.run_limit_s, left_s)
            _run(network, collective, form, fitting, limit_s, found)
            yield


def _run(
    network: Platform,
    collective: str,
    form: runs.Form,
    sizes: Sequence[int],
    limit_s: float,
    found: Found,
) -> None:
    case = f"{collective} on {network.kind}-{network.nodes}, {form.label}"
    done: list[int] = []
    try:
        for row in runs.simulate(network, collective, form, sizes, limit_s=limit_s):
            done.append(row["bytes"])
            found.rows.append(
                {
                    **_case(network, collective, row["bytes"]),
                    "candidate": form.name,
                    "label": form.label,
                    "kind": form.kind,
                    "time_us": float(f"{1e6 * row['seconds']:.6g}"),
                    "messages": row["messages"] if form.kind == "hsgd" else None,
                    "sent_bytes": row["sent"] if form.kind == "hsgd" else None,
                    "checked": row["right"] is not None,
                }
            )
    except TimeoutError as error:
        missing = ", ".join(size_label(size) for size in sizes if size not in done)
        found.left_out.append(f"{case}, {missing}: {error}")
    except RuntimeError as error:
        found.failures.append(f"{case}: {error}")


def _limit_row(network: Platform, collective: str, size: int) -> dict[str, Any]:
    least = bound(network, collective, size)
    return {
        **_case(network, collective, size),
        "candidate": "limit",
        "label": "bound",
        "kind": "limit",
        "time_us": float(f"{1e6 * least.seconds:.6g}"),
        "latency_us": float(f"{1e6 * least.latency_s:.6g}"),
        "bandwidth_us": float(f"{1e6 * least.bandwidth_s:.6g}"),
    }


def _case(network: Platform, collective: str, size: int) -> dict[str, Any]:
    place = {"network": network.kind, "nodes": network.nodes}
    return {**place, "collective": collective, "bytes": size}
