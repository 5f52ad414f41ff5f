"""Where ranks run, on this machine or on virtual nodes made for the run, and their command.

Owns the spelling of layouts ("2x2@1gbit", "2x1t2") and the life of the nodes. jobs.py and
worker_jobs.py start ranks, with the hosts, the settings and the command that a place gives.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.pattern import MAX_RANKS
from hsgd.errors import LaunchError
from hsgd.jobs.launch import launch

if TYPE_CHECKING:
    from toolkit.cluster import Cluster

__all__ = [
    "BENCHMARKS",
    "JobLayout",
    "Testbed",
    "on_one_node",
    "open_testbed",
    "rank_command",
    "read_layout",
]

BENCHMARKS = Path(__file__).resolve().parents[1]


def rank_command(name: str, *words: str, python: str = sys.executable) -> list[str]:
    """The command of a rank that runs workers.NAME with these words."""
    return [python, str(BENCHMARKS / "rank.py"), name, *words]


@dataclass(frozen=True)
class JobLayout:
    """How many ranks each node has, and how fast its link is."""

    name: str  # in the JSON: "np2", "2x2@1gbit"
    ranks_of_nodes: tuple[int, ...]
    rate: str | None = None  # None on one node, or for links without a limit
    threads: int | None = None  # of each rank; None: the cores, shared out

    @property
    def ranks(self) -> int:
        return sum(self.ranks_of_nodes)

    @property
    def nodes(self) -> int:
        return len(self.ranks_of_nodes)

    @property
    def crowded(self) -> bool:
        """More threads than cores: virtual nodes share those of this machine."""
        return self.ranks * (self.threads or 1) > launch.cores()

    def __str__(self) -> str:
        if self.nodes == 1:
            return f"{self.ranks} ranks"
        rates = f" at {self.rate}/s" if self.rate else ""
        ranks = f"{' + '.join(map(str, self.ranks_of_nodes))} ranks"
        threads = f" with {self.threads} threads each" if self.threads else ""
        return f"{ranks}{threads} on {self.nodes} nodes{rates}"


def on_one_node(ranks: int) -> JobLayout:
    """`ranks` ranks on this machine. Raises ValueError."""
    if not 1 < ranks <= MAX_RANKS:
        raise ValueError(f"{ranks} ranks: 2 to {MAX_RANKS}")
    return JobLayout(f"np{ranks}", (ranks,))


def read_layout(text: str) -> JobLayout:
    """Read "2x2@1gbit" (2 nodes with 2 ranks each), "2+1@10gbit", "3x1", or "2x1t2" (with 2 threads
    for each rank). Raises ValueError.
    """
    ranks, _, rate = text.partition("@")
    shape, threaded, threads = ranks.partition("t")
    alike = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", shape)
    listed = re.fullmatch(r"[1-9][0-9]*(\+[1-9][0-9]*)+", shape)
    rated = "@" not in text or re.fullmatch(r"[0-9]+[kmg]bit", rate)
    counted = not threaded or re.fullmatch(r"[1-9][0-9]*", threads)
    if not ((alike or listed) and rated and counted):
        raise ValueError(f'"{text}" is no layout; write it like 2x2@1gbit, 2+1@10gbit or 2x1t2')
    counts = (int(alike[2]),) * int(alike[1]) if alike else tuple(map(int, shape.split("+")))
    if len(counts) < 2 or sum(counts) > MAX_RANKS:
        raise ValueError(f'"{text}": 2 nodes or more, and at most {MAX_RANKS} ranks')
    return JobLayout(text, counts, rate or None, int(threads) if threads else None)


class Testbed:
    """A layout that is ready for jobs."""

    def __init__(self, layout: JobLayout, cluster: Cluster | None = None) -> None:
        self.layout = layout
        self._cluster = cluster

    @property
    def hosts(self) -> str:
        """The ranks of each host, as launchers read them."""
        names = ["localhost"] if self._cluster is None else self._cluster.nodes
        pairs = zip(names, self.layout.ranks_of_nodes, strict=True)
        return ",".join(f"{name}:{count}" for name, count in pairs)

    @property
    def interface(self) -> str | None:
        """The network between the nodes."""
        return None if self._cluster is None else "eth0"

    @property
    def cores_of_a_host(self) -> int:
        """Cores that ranks of one host have to themselves: 0 when nodes share too few."""
        return 0 if self.layout.crowded else launch.cores()

    def command(self, words: Sequence[str]) -> list[str]:
        """What starts a command where launchers run."""
        return list(words) if self._cluster is None else self._cluster.command(words)

    def environment(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """The environment of such a command; `wanted` is all of it but for what nodes need."""
        if self._cluster is None:
            return dict(wanted)
        needed = self._cluster.environment()
        path = f"/run/bin:{wanted['PATH']}:{needed['PATH']}"  # the nodes' ssh comes first
        return {**wanted, "PATH": path, "TMPDIR": needed["TMPDIR"]}


@contextlib.contextmanager
def open_testbed(layout: JobLayout) -> Iterator[Testbed]:
    """Make what the layout needs, and take it down. Raises LaunchError saying why it cannot."""
    if layout.nodes == 1:
        yield Testbed(layout)
        return
    from toolkit.cluster import Cluster, ClusterError

    reason = Cluster.reason_unavailable()
    if reason:
        raise LaunchError(reason)
    try:
        cluster = Cluster(layout.nodes, layout.rate)
    except (ClusterError, OSError) as error:
        raise LaunchError(str(error)) from None
    with cluster:
        yield Testbed(layout, cluster)
