"""ParameterBox over several nodes: the same promises as inside one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import box_programs
from box_programs import CHECKS, FAULT_TIMEOUT_S
from tiers import short_form
from toolkit.cluster import Cluster

__all__: list[str] = []

PROGRAM = Path(box_programs.__file__)
NAMES = [check.__name__ for check in CHECKS]


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "shards", "network"),
    short_form(
        "chaos",
        [
            ("node1:2,node2:1", "node", "sockets"),
            ("node1:1,node2:2", "none", "mpi"),
            ("node1:1,node2:1,node3:1", "node", "sockets"),
        ],
        keep=[0, 1],
    ),
)
def test_a_box_over_nodes_keeps_the_same_promises(
    cluster: Callable[..., Cluster], hosts: str, shards: str, network: str
) -> None:
    nodes = hosts.count(",") + 1
    size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    argv = [sys.executable, str(PROGRAM), shards, network]
    done = cluster(nodes).mpirun(size, argv, hosts=hosts, timeout_s=180.0)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == NAMES


@pytest.mark.long
def test_an_owner_that_stalls_is_named_and_reads_go_on(cluster: Callable[..., Cluster]) -> None:
    done = cluster(2).mpirun(2, [sys.executable, str(PROGRAM), "missing"], timeout_s=60.0)
    report, reads = json.loads(done.stdout.splitlines()[0])
    kind, line = report["push"]
    assert kind == "CollectiveTimeout" and "\n" not in line
    assert line.startswith("ParameterBox: rank 0, which owns values from place 0, did not answer")
    assert f" {FAULT_TIMEOUT_S:g} s" in line
    line = "ParameterBox: rank 0 did not answer before; make a new box"
    assert report["count"] == ["HsgdError", line]
    assert reads
