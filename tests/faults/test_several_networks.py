"""Nodes with several networks, one of them dead or the same everywhere: the ranks still meet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toolkit.cluster import Cluster

__all__: list[str] = []

pytestmark = pytest.mark.long
SIZE = 2
WELL = ["2 3.0 2.0", "2 3.0 1.0"]
PROGRAM = """
import sys, numpy as np, torch.distributed as dist, hsgd
rank, path = int(sys.argv[1]), sys.argv[2]
with hsgd.Comm.over_store(dist.FileStore(path, 2), rank, 2) as comm:
    print(comm.cross_size, comm.allreduce(np.full(100_000, rank + 1.0))[-1])
    with hsgd.NotifiedWindow(comm, 64, 1, network="sockets") as window:
        window.put_notify(np.full(4, rank + 1.0), 1 - rank, 0, 1)
        window.wait_any([0])
        print(window.segment().view(np.float64)[3], flush=True)
        window.drain()
        comm.barrier()
"""


@pytest.fixture
def nodes(virtual_nodes: None) -> Iterator[Cluster]:
    with Cluster(SIZE, management=True) as cluster:
        yield cluster


def meet(nodes: Cluster, path: Path, **env: str) -> list[str]:
    """Return nodes, a sum and what the other rank wrote, by rank, or the last line of its error."""

    def run(rank: int) -> str:
        argv = [sys.executable, "-c", PROGRAM, str(rank), str(path)]
        done = nodes.run(argv, node=rank + 1, env=env, timeout_s=100)
        if done.returncode == 0:
            return " ".join(done.stdout.split())
        return done.stderr.strip().splitlines()[-1]

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(run, range(SIZE)))


def test_a_dead_network_is_passed_over(nodes: Cluster, tmp_path: Path) -> None:
    nodes.set_link(2, "down")
    assert meet(nodes, tmp_path / "store") == WELL


def test_a_firewall_that_drops_is_passed_over(nodes: Cluster, tmp_path: Path) -> None:
    for node in (1, 2):
        words = f"ip route add blackhole 10.99.0.{3 - node}/32"
        nodes.run(words.split(), node=node)
    assert meet(nodes, tmp_path / "store") == WELL


def test_an_address_that_all_nodes_have_leads_nowhere(nodes: Cluster, tmp_path: Path) -> None:
    for node in (1, 2):
        for words in (
            "ip link add docker0 type bridge",
            "ip addr add 172.17.0.1/16 dev docker0",
            "ip link set docker0 up",
        ):
            assert nodes.run(words.split(), node=node).returncode == 0
    for chosen in ("all", "docker0,eth0"):
        assert meet(nodes, tmp_path / chosen, HSGD_INTERFACES=chosen) == WELL


def test_an_error_names_each_address_that_was_tried(nodes: Cluster, tmp_path: Path) -> None:
    for node in (1, 2):
        for network in (98, 99):
            words = f"ip route add prohibit 10.{network}.0.{3 - node}/32"
            assert nodes.run(words.split(), node=node).returncode == 0
    said = meet(nodes, tmp_path / "store", HSGD_TIMEOUT_S="20")
    assert "10.99.0.1 (" in said[1] and "10.98.0.1 (" in said[1], said
    assert "did not accept a connection at TCP port" in said[1] and "HSGD_INTERFACES" in said[1]
    assert "rank 1 did not connect to rank 0" in said[0]
