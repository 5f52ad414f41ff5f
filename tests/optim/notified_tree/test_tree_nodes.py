"""NotifiedTree between nodes: equal to serial SGD, and no collective in the steady state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from test_tree import serial
from tiers import short_form
from toolkit.cluster import Cluster
from tree_programs import WITHIN_S

__all__: list[str] = []

pytestmark = pytest.mark.long

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PROGRAM = str(HERE / "tree_programs.py")


@pytest.fixture(scope="session")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that counts collectives of MPI, and is no part of hsgd."""
    library = tmp_path_factory.mktemp("counter") / "libcollectives.so"
    source = ROOT / "tests" / "mpi_programs" / "count_collectives.c"
    compiler = (os.environ.get("CC") or "cc").split()
    command = [*compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


TWO, FOUR = "node1:1,node2:1", "node1:2,node2:1,node3:1,node4:1"


@pytest.mark.parametrize(
    ("hosts", "network", "roots", "part_bytes"),
    short_form(
        "chaos",
        [
            (TWO, "mpi", "first", 0),
            (TWO, "sockets", "shared", 0),
            (FOUR, "mpi", "shared", 64),
            (FOUR, "sockets", "first", 64),
            (FOUR, "sockets", "shared", 64),
        ],
        keep=[0, 4],
    ),
)
def test_weights_between_nodes_are_those_of_serial_sgd_without_a_collective(
    cluster: Callable[..., Cluster],
    counter: Path,
    hosts: str,
    network: str,
    roots: str,
    part_bytes: int,
) -> None:
    size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    done = cluster(hosts.count(",") + 1).mpirun(
        size,
        [sys.executable, PROGRAM, "count", network, roots, str(part_bytes), str(counter)],
        hosts=hosts,
        env={"LD_PRELOAD": str(counter)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["equal"]
    assert report["counted"] == [0, 0]  # of MPI, and of hsgd's own
    assert report["momenta"] == 9  # rank 0 can save the state of all, wherever the roots are
    for mine, wanted in zip(report["weights"], serial("odd", "sgd", size), strict=True):
        torch.testing.assert_close(torch.tensor(mine), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "network", "kind"),
    [
        ("stalled", "mpi", "CollectiveTimeout"),
        ("stalled", "sockets", "CollectiveTimeout"),
        ("killed", "sockets", "PeerLost"),  # MPI ends the job
    ],
)
def test_a_rank_that_falls_on_another_node_ends_training_in_time(
    cluster: Callable[..., Cluster], tmp_path: Path, how: str, network: str, kind: str
) -> None:
    done = cluster(2).mpirun(
        3,
        [sys.executable, PROGRAM, how, network, str(tmp_path)],
        hosts="node1:2,node2:1",
        options=("--with-ft", "ulfm"),  # the others live
        timeout_s=2 * WITHIN_S,
    )
    assert done.returncode != 0
    report = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert report.keys() == {"0", "1"}, done.stderr
    for rank, outcome in report.items():
        line = outcome["line"]
        # A rank whose leader has given up before its own deadline is told so.
        told_by_leader = rank == "1" and "rank 0 gave up: " in line
        assert outcome["kind"] == ("PeerLost" if told_by_leader else kind), outcome
        # Who notices first: the program, which waits for weights, or the engine, which sends some.
        noticed = ("NotifiedTree: weights of layer", "put_notify: version")
        assert line.startswith(noticed) and "\n" not in line
        assert outcome["after_s"] < WITHIN_S
        assert rank == "1" or "rank 2" in line


def test_the_example_learns(mpirun: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    example = ROOT / "examples" / "train_tree.py"
    done = mpirun(2, example, "--epochs", "8", "--target-accuracy", "85")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks: ")
