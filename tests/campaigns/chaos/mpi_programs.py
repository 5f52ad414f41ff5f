"""Programs of ranks that call MPI themselves, or Horovod over MPI: what the interposer serves, and
what runs without hsgd.
"""

from __future__ import annotations

import numpy as np

from campaigns.chaos.fault_seat import FaultSeat
from campaigns.seat import check

__all__ = ["collectives", "horovod"]

_COUNTS = (1, 100, 3000, 100_000, 300_000)  # float32


def collectives(seat: FaultSeat) -> None:
    """MPI's collectives on float32; errors are raised as mpi4py's exceptions."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    rank, size = comm.rank, comm.size
    total = float(sum(range(size)))
    comm.Barrier()  # the interposer's first collective makes a communicator by a call of MPI's own
    for step in seat.loop():
        count = seat.luck.choice(_COUNTS)
        given = np.full(count, rank, np.float32)
        found = np.empty_like(given)
        kind = seat.luck.randrange(6)
        if kind < 2:
            comm.Allreduce(given, found)
            check(found, total, "Allreduce")
        elif kind == 2:
            comm.Bcast(given, step % size)
            check(given, float(step % size), "Bcast")
        elif kind == 3:
            blocks = np.empty((size, count), np.float32)
            comm.Allgather(given, blocks)
            check(blocks.sum(0), total, "Allgather")
        elif kind == 4:
            blocks = np.full((size, count), rank, np.float32)
            comm.Reduce_scatter_block(blocks, found)
            check(found, total, "Reduce_scatter_block")
        else:
            comm.Barrier()


def horovod(seat: FaultSeat) -> None:
    """Horovod's own allreduce, of torch tensors."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = float(sum(range(hvd.size())))
    for step in seat.loop():
        count = seat.luck.choice(_COUNTS)
        given = torch.full((count,), float(hvd.rank()))
        found = hvd.allreduce(given, op=hvd.Sum, name=f"step {step}")
        check(found, total, "allreduce")
