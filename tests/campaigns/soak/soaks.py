"""The soaks: which program runs on which ranks, and how often it does what it does.

Owns the table. Never imports a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["LAYOUTS", "SOAKS", "Layout", "Soak"]


@dataclass(frozen=True)
class Layout:
    """How the ranks of a job find one another. nodes: the node of each rank, which is pretended."""

    by: Literal["path", "mpi", "store"]
    nodes: tuple[int, ...]
    about: str


LAYOUTS = {
    "node-2": Layout("path", (0, 0), "2 ranks of a node, Comm.local"),
    "node-3": Layout("path", (0, 0, 0), "3 ranks of a node, Comm.local"),
    "mpi-2": Layout("mpi", (0, 0), "2 ranks of a node over MPI"),
    "mpi-3": Layout("mpi", (0, 0, 0), "3 ranks of a node over MPI"),
    "tcp-2": Layout("store", (0, 1), "2 pretended nodes over TCP, Comm.over_store"),
    "tcp-3": Layout("store", (0, 0, 1), "2 + 1 ranks on pretended nodes over TCP"),
}


@dataclass(frozen=True)
class Soak:
    """What one job does again and again.

    program: module and function in campaigns.soak. counts: operations by layout, in the long
    form; 0: for as long as --minutes says. least: of operations, in any form. samples: of what each
    rank holds, over the run. runs: without being named; others are for tests of the judge.
    """

    name: str
    program: str
    about: str
    counts: dict[str, int]
    least: int = 200
    samples: int = 125
    runs: bool = True

    @property
    def uses_torch(self) -> bool:
        """Whether its ranks make process groups, which need a store."""
        return self.program.startswith("torch_soaks:")


def _counts(node: int, mpi: int, tcp: int) -> dict[str, int]:
    """The second rank of a node gets a core, the third shares one: it makes half as many."""
    of_two = {"node": node, "mpi": mpi, "tcp": tcp}
    return {f"{by}-{ranks}": of_two[by] * 2 // (2 * ranks - 2) for by in of_two for ranks in (2, 3)}


_OFTEN = _counts(10_000_000, 10_000_000, 1_000_000)
_AT_ONCE = _counts(100_000, 100_000, 100_000)
_MADE = _counts(10_000, 10_000, 2_000)
_WRITES = {"node-2": 1_000_000, "tcp-3": 100_000}
_ARRAYS = {"node-2": 10_000, "mpi-3": 10_000, "tcp-3": 10_000}
_ROUNDS = {"node-2": 20, "node-3": 10, "mpi-2": 10, "tcp-2": 10}
_WORKS = {"node-2": 100_000, "node-3": 50_000, "tcp-2": 100_000}
_TIMED = dict.fromkeys(("node-2", "mpi-2", "tcp-3"), 0)
_LEAKS: dict[str, Any] = {"counts": {"node-2": 1000, "node-3": 500}, "runs": False}
_ALL = (
    Soak("collectives", "core_soaks:collectives", "small ones, blocking", _OFTEN, 2000),
    Soak("async", "core_soaks:asynchronous", "asynchronous collectives", _AT_ONCE, 2000),
    Soak("communicators", "core_soaks:communicators", "made, used and closed", _MADE),
    Soak("splits", "core_soaks:splits", "parts of a communicator made, used and closed", _MADE),
    Soak("arrays", "core_soaks:arrays", "arrays of Comm.empty made, used and dropped", _ARRAYS),
    Soak(
        *("open", "core_soaks:opened", "rounds in which 1,000 communicators are open at once"),
        *(_ROUNDS, 10, 20),
    ),
    Soak("window", "core_soaks:window", "writes to a window, each acknowledged", _WRITES, 2000),
    Soak(
        *("windows", "core_soaks:windows", "NotifiedWindows made, used and closed"),
        {"node-2": 10_000, "tcp-3": 2_000},
    ),
    Soak("box", "core_soaks:box", "changes and reads of a ParameterBox", _WRITES, 2000),
    Soak(
        *("boxes", "core_soaks:boxes", "ParameterBoxes made, used and closed"),
        {"node-2": 10_000, "tcp-3": 1_000},
    ),
    Soak("works", "torch_soaks:works", "asynchronous works of torch.distributed", _WORKS, 2000),
    Soak(
        *("groups", "torch_soaks:groups", "process groups of torch made, used and destroyed"),
        {"node-2": 2_000, "tcp-3": 1_000},
    ),
    Soak("training", "training_soak:training", "with PartitionedLoader, for --minutes", _TIMED),
    Soak("leak-memory", "leaking_soaks:memory", "leaks 4 KiB each time", least=2000, **_LEAKS),
    Soak("leak-descriptors", "leaking_soaks:descriptors", "leaks one in the end", **_LEAKS),
    Soak("leak-threads", "leaking_soaks:threads", "leaks a thread in the end", **_LEAKS),
)

SOAKS = {soak.name: soak for soak in _ALL}
