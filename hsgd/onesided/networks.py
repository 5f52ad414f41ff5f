"""What carries one-sided writes between nodes: MPI, or TCP.

Owns the choice where the user leaves it open. Never opens a connection.
"""

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
    """Raise ValueError, in the words of `what`, where there is no such network."""
    if network not in get_args(Network):
        raise ValueError(f'{what}: network is {network!r}; give "auto", "mpi" or "sockets"')


def choose_network(
    comm: Comm, network: Network, what: str, *, any_thread: bool = False
) -> ChosenNetwork:
    """The network, with "auto" decided; collective over `comm` then, and equal on all ranks.

    "auto" is "mpi" where `comm` spans nodes that all have an adapter for RDMA, which MPI uses
    without the kernel; elsewhere "sockets", which is TCP: there MPI's one-sided calls make progress
    only while both ranks call MPI. any_thread: of MPI only with MPI_THREAD_MULTIPLE.
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
    """Adapters of this node for RDMA with an active port; local.

    The kernel lists InfiniBand, RoCE, Omni-Path and EFA under `infiniband`, Slingshot under `cxi`.
    """
    active = [
        state.parents[2].name
        for state in sorted(devices.glob("infiniband/*/ports/*/state"))
        if "ACTIVE" in state.read_text().upper()
    ]
    return list(dict.fromkeys(active + sorted(path.name for path in devices.glob("cxi/*"))))
