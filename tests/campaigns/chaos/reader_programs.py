"""The program of ranks that read one data set, with a cache in the memory of each node."""

from __future__ import annotations

import numpy as np

from campaigns.chaos.fault_seat import FaultSeat
from campaigns.seat import WrongResult

__all__ = ["loader"]

_SAMPLES, _BATCH = 600, 4


def loader(seat: FaultSeat) -> None:
    """Epochs over a small file; each sample is its own number."""
    import h5py
    from hsgd.io import CacheOptions, PartitionedLoader

    path = seat.folder / "data.h5"
    with seat.communicator() as comm:
        if comm.rank == 0:
            with h5py.File(path, "w") as file:
                numbers = np.repeat(np.arange(_SAMPLES, dtype=np.float32)[:, None], 64, axis=1)
                file.create_dataset("x", data=numbers, chunks=(32, 64))
        comm.barrier()
        cache = CacheOptions(1 << 20, "comm" if seat.node_count > 1 else "files")
        batches = PartitionedLoader(
            path, _BATCH, comm.rank, comm.size, as_numpy=True, comm=comm, cache=cache
        )
        epoch, steps = 0, iter(batches)
        for _ in seat.loop():
            batch = next(steps, None)
            if batch is None:
                epoch += 1
                batches.set_epoch(epoch)
                steps = iter(batches)
                batch = next(steps)
            rows = batch["x"]
            if (rows != rows[:, :1]).any() or not ((rows >= 0) & (rows < _SAMPLES)).all():
                raise WrongResult(f"PartitionedLoader: rows {rows[:, :2].tolist()}")
        batches.close()
