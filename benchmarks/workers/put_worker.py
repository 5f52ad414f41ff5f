"""The ranks of overlap.py that time put_notify: in shared memory and over MPI, on one node.

Loads no torch, which takes longer than the measurement.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mpi4py import MPI

from hsgd import Comm, NotifiedWindow
from workers.serving import write_result

__all__: list[str] = []

SIZES = (8, 64 << 10, 1 << 20)  # bytes
PINGS = 50
ROUNDS = 7


def pings(window: NotifiedWindow, rank: int, first: int, buffer: Any) -> float:
    """Seconds of PINGS round trips, whose versions begin at `first`."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for version in range(first, first + PINGS):
        if rank == 0:
            window.put_notify(buffer, 1, 0, version)
        window.wait_any([0], version - 1)
        if rank == 1:
            window.put_notify(buffer, 0, 0, version)
    window.drain()
    return time.perf_counter() - begin


def main() -> None:
    comm = Comm()
    kinds = {"shared memory": False, "mpi": True}
    windows = {
        kind: NotifiedWindow(comm, max(SIZES), 1, remote_only=far) for kind, far in kinds.items()
    }
    rows, first = [], 1
    for size in SIZES:
        buffer = np.ones(size, np.uint8)
        took: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, window in windows.items():
                took[kind].append(pings(window, comm.rank, first, buffer) / 2 / PINGS)
            first += PINGS
        rows += [{"put_notify": kind, "bytes": size, "seconds": s} for kind, s in took.items()]
    for window in windows.values():
        window.close()
    if comm.rank == 0:
        write_result(rows)
    comm.close()


if __name__ == "__main__":
    main()
