"""What carries writes between nodes, where the user leaves it open.

Run under mpirun, this file is the program of the ranks: it is told on which nodes an adapter is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsgd import Comm, NotifiedWindow
from hsgd.onesided import networks
from ranks import meeting_point
from toolkit.cluster import Cluster

__all__: list[str] = []


def add_port(devices: Path, adapter: str, state: str) -> None:
    port = devices / "infiniband" / adapter / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")


def test_adapters_for_rdma_are_those_with_an_active_port(tmp_path: Path) -> None:
    assert networks.rdma_adapters(tmp_path) == []
    add_port(tmp_path, "mlx5_0", "4: ACTIVE")
    add_port(tmp_path, "mlx5_1", "1: DOWN")
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    assert networks.rdma_adapters(tmp_path) == ["mlx5_0", "cxi0"]


def test_a_network_that_does_not_exist_is_refused() -> None:
    with (
        Comm.local(meeting_point(), 0, 1) as comm,
        pytest.raises(ValueError, match='network is \'infiniband\'; give "auto", "mpi" or'),
    ):
        NotifiedWindow(comm, 64, 1, network="infiniband")  # type: ignore[arg-type]


def test_on_one_node_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "rdma_adapters", lambda: ["mlx5_0"])
    with Comm.local(meeting_point(), 0, 1) as comm, NotifiedWindow(comm, 64, 1) as window:
        assert window.network == "sockets"


@pytest.mark.parametrize(
    ("adapters", "chosen"), [("both", "mpi"), ("first", "sockets"), ("none", "sockets")]
)
def test_mpi_is_chosen_where_all_nodes_have_an_adapter(
    cluster: Callable[..., Cluster], adapters: str, chosen: str
) -> None:
    done = cluster(2).mpirun(2, [sys.executable, __file__, adapters], hosts="node1:1,node2:1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [chosen, [1.0, 2.0, 3.0]]


def main() -> None:
    with Comm() as comm:
        has_adapter = sys.argv[1] == "both" or (sys.argv[1] == "first" and comm.rank == 0)
        networks.rdma_adapters = lambda: ["mlx5_0"] if has_adapter else []  # type: ignore[assignment]
        with NotifiedWindow(comm, 24, 1) as window:
            window.bind(0, 1 - comm.rank)
            window.put_notify(np.arange(1.0, 4.0), 1 - comm.rank, 0, 1)
            window.wait_any([0])
            came = window.segment().view(np.float64).tolist()
            comm.barrier()
            if comm.rank == 0:
                print(json.dumps([window.network, came]))


if __name__ == "__main__":
    main()
