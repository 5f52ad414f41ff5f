"""Networks for one-sided writes between nodes: MPI, or TCP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from hsgd.comm.communicator import Comm

__all__ = ["ChosenNetwork", "Network", "check_network", "choose_network", "rdma_adapters"]

ChosenNetwork = Literal["mpi", "sockets"]
Network = Literal["auto", "mpi", "sockets"]


def check_network(what: str, network: str) -> None:
    """Raise ValueError, which begins with `what`, if there is no such network."""
    if network not in get_args(Network):
        raise ValueError(f'{what}: network is {network!r}; give "auto", "mpi" or "sockets"')


def choose_network(
    comm: Comm, network: Network, what: str, *, any_thread: bool = False
) -> ChosenNetwork:
    """Resolve "auto"; it is then collective over `comm`, and the result equal on all ranks.

    "auto" is "mpi" if `comm` spans nodes that all have an RDMA adapter, which MPI uses without the
    kernel. Otherwise it is "sockets" (TCP), as MPI's one-sided calls then progress only while both
    ranks call MPI. With `any_thread`, "mpi" needs MPI_THREAD_MULTIPLE.
    """
    check_network(what, network)
    if network != "auto":
        return network
    if comm.cross_size == 1:
        return "sockets"
    suits = comm.mpi is not None and bool(rdma_adapters())
    if suits and any_thread:
        from mpi4py import MPI

        suits = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    agreed = comm.allreduce(np.array([suits], np.uint8), "min", name="network")
    return "mpi" if agreed[0] else "sockets"


def rdma_adapters(devices: Path = Path("/sys/class")) -> list[str]:
    """Return the RDMA adapters of this node with an active port; local.

    The kernel lists InfiniBand, RoCE, Omni-Path and EFA under `infiniband`, Slingshot under `cxi`.
    """
    active = [
        state.parents[2].name
        for state in sorted(devices.glob("infiniband/*/ports/*/state"))
        if "ACTIVE" in state.read_text().upper()
    ]
    return list(dict.fromkeys(active + sorted(path.name for path in devices.glob("cxi/*"))))
