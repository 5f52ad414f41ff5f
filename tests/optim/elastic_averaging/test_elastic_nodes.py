"""ElasticAveraging over several nodes: exact sums, an end to each worker, one centre for all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import elastic_programs
from tiers import short_form
from toolkit.cluster import Cluster

__all__: list[str] = []

pytestmark = pytest.mark.long

PROGRAM = Path(elastic_programs.__file__)


@pytest.mark.parametrize(
    "hosts", short_form("chaos", ["node1:2,node2:2", "node1:1,node2:1,node3:1"], keep=[1])
)
def test_workers_on_several_nodes_are_held_together_by_one_centre(
    cluster: Callable[..., Cluster], hosts: str
) -> None:
    nodes = hosts.count(",") + 1
    size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    argv = [sys.executable, str(PROGRAM)]
    done = cluster(nodes).mpirun(size, argv, hosts=hosts, timeout_s=180.0)
    assert done.returncode == 0, done.stderr
    names = [check.__name__ for check in elastic_programs.CHECKS]
    assert json.loads(done.stdout.splitlines()[-1]) == names
