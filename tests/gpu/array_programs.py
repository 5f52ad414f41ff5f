"""What ranks do with arrays of CuPy and Numba, and with batches in pinned memory.

Each is a function of a Seat, a path that is new to the ranks, their number and the kind of a Place.
Imports the libraries only in the ranks: they are there where somebody has installed them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hsgd.io import PartitionedLoader, ReadOptions
from torch import Tensor

from hdf5_samples import arrays_of, make_slabs
from hsgd import Comm
from hsgd.config import Config
from places import Place
from ranks import Seat

__all__ = ["moved_batches", "pinned_batches", "with_cupy", "with_numba"]

COUNT = 500_000
SAMPLES = 1000


def _comm(seat: Seat, path: str, size: int) -> Comm:
    return Comm.local(path, seat.rank, size, Config(timeout_s=30.0, device_chunk_bytes=1 << 16))


def with_cupy(seat: Seat, path: str, size: int, kind: str) -> None:
    """Inputs that a stream makes late, results that it reads; results of CuPy's own making."""
    import cupy

    place, rank, everybody = Place(kind, seat.rank), seat.rank, sum(range(size))
    comm = _comm(seat, path, size)
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Device(place.device.index), stream:
        matrix = cupy.ones((4096, 4096), cupy.float32)
        for dtype in (np.float32, np.float16, np.float64, np.int64, np.uint8):
            base = cupy.arange(COUNT) % 5
            late = (matrix @ matrix)[0, 0] * 0
            mine = (base + rank + late).astype(dtype)
            total = comm.allreduce(mine)
            assert isinstance(total, cupy.ndarray) and total.dtype == dtype
            copy = total.copy()
            total.fill(77)
            assert bool((copy == (base * size + everybody).astype(dtype)).all()), dtype
            joined = comm.allgather(cupy.full((rank + 1, 2), rank, dtype))
            assert joined.tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]
            handle = comm.allreduce_async(mine, "max", out=mine)
            handle.wait()
            assert bool((mine == (base + size - 1).astype(dtype)).all()), dtype
    comm.close()


def with_numba(seat: Seat, path: str, size: int, kind: str) -> None:
    """In place and into a given array; without out= the call is refused."""
    from numba import cuda

    place, rank = Place(kind, seat.rank), seat.rank
    cuda.select_device(place.device.index)
    comm = _comm(seat, path, size)
    values = (np.arange(COUNT) % 5).astype(np.float32)
    stream = cuda.stream()
    for queue in (0, stream):
        mine = cuda.to_device(values + rank, stream=queue)
        comm.allreduce(mine, out=mine)
        found = mine.copy_to_host(stream=queue)
        if queue:
            stream.synchronize()
        assert np.array_equal(found, values * size + sum(range(size)))
    joined = cuda.device_array((size, 3), np.int64)
    comm.allgather(cuda.to_device(np.full((1, 3), rank, np.int64)), out=joined)
    assert joined.copy_to_host().tolist() == [[r] * 3 for r in range(size)]
    with pytest.raises(TypeError, match="give out="):
        comm.allreduce(cuda.to_device(values))
    comm.close()


def pinned_batches(seat: Seat, path: str, size: int, kind: str, folder: str) -> None:
    """Batches of the loader are page-locked, go to the device without a wait, and may be dropped
    while the device has not even begun to copy them.
    """
    place = Place(kind, seat.rank)
    source = make_slabs(Path(folder, f"slabs-{seat.rank}"), SAMPLES, 3)
    read = ReadOptions(pin_memory=True, window_bytes=1 << 12, block_bytes=1 << 10)
    parts: dict[str, list[Tensor]] = {}
    with PartitionedLoader(source, 8, 0, 1, "none", read=read) as loader:
        for batch in loader:
            place.sleep(1)
            for name, tensor in batch.items():
                assert tensor.is_pinned(), name
                halves = [half.to(place.device, non_blocking=True) for half in tensor.split(5)]
                parts.setdefault(name, []).extend(halves)
    _check(parts)


def moved_batches(seat: Seat, path: str, size: int, kind: str, folder: str) -> None:
    """Batches come on the device, without a wait of the host, and before what the loop computes
    earlier; what the loop computes with them comes after.
    """
    place = Place(kind, seat.rank)
    source = make_slabs(Path(folder, f"slabs-{seat.rank}"), SAMPLES, 3)
    read = ReadOptions(window_bytes=1 << 12, block_bytes=1 << 10)
    parts: dict[str, list[Tensor]] = {}
    with PartitionedLoader(source, 8, 0, 1, "none", device=place.device, read=read) as loader:
        batches = iter(loader)
        early = next(batches)
        place.wait()
        place.sleep(1000)
        slept = place.mark()
        batch = next(batches)
        transfer = loader._settings.to_device
        if transfer is not None and transfer._stream is not None:
            transfer._stream.synchronize()
            assert slept is not None and not slept.query(), "a copy waited for the loop's stream"
        for each in (early, batch):
            for name, tensor in each.items():
                parts.setdefault(name, []).append(tensor.clone())
        del early, each, tensor
        with place.no_waits():
            for batch in batches:
                place.sleep(0.2)
                for name, tensor in batch.items():
                    assert tensor.device == place.device
                    parts[name].append(tensor.clone())
    _check(parts)


def _check(parts: dict[str, list[Tensor]]) -> None:
    """Whether all samples have come, each once, with all their fields."""
    found = {name: torch.cat(each).cpu().numpy() for name, each in parts.items()}
    order = found["number"]
    assert sorted(order) == list(range(SAMPLES))
    for name, whole in arrays_of(SAMPLES).items():
        assert np.array_equal(found[name], whole[order]), name
