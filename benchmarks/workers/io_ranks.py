"""The ranks of io_throughput.py: processes that stay, take turns of a candidate, or open data sets.

Samples and seconds are measured there, and the rows of a candidate are compared with those of the
HDF5 file. Candidates are in io_candidates.py.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from typing import Any

import h5py
import torch

from studies.io_candidates import CANDIDATES
from studies.io_files import BATCH, READ_BYTES, DataSet
from workers.staying_processes import START_S, StayingProcesses, orders

__all__ = ["Ranks", "check"]

_CHECKED_BATCHES = 4
_serial = itertools.count()


class Ranks:
    """The processes: each delivers its part of a candidate's samples when told."""

    def __init__(self, ranks: int) -> None:
        barrier = multiprocessing.get_context("spawn").Barrier(ranks)
        self._processes = StayingProcesses(
            _rank_main, [(rank, ranks, barrier) for rank in range(ranks)]
        )

    def turn(
        self, name: str, data: DataSet, epoch: int, budget_s: float, copy: bool = False
    ) -> dict[str, float]:
        """One pass over the data, or as far as the budget goes. copy: the loop copies batches."""
        found = self._processes.ask("deliver", name, data, epoch, budget_s, copy)
        return {
            "samples_per_s": sum(a["samples"] for a in found) / max(a["seconds"] for a in found),
            "first_s": max(a["first_s"] for a in found),
        }

    def check(self, name: str, data: DataSet) -> None:
        """Take the first batches and compare them. Raises RuntimeError for a wrong row."""
        self._processes.ask("check", name, data)

    def open(self, data: DataSet) -> dict[str, float]:
        """Make a loader on all ranks and take one batch: seconds until both."""
        path = f"@hsgd-io-{os.getpid()}-{next(_serial)}"
        found = self._processes.ask("open", data, path)
        return {name: max(a[name] for a in found) for name in ("open_s", "first_s")}

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _rank_main(rank: int, ranks: int, barrier: Any, pipe: Any) -> None:
    """Body of a process."""
    torch.set_num_threads(1)
    known = {candidate.name: candidate for candidate in CANDIDATES}

    def obey(order: str, *words: Any) -> dict[str, Any]:
        barrier.wait(START_S)
        if order == "open":
            data, path = words
            return _open(data, rank, ranks, path)
        if order == "check":
            name, data = words
            check(known[name].read(data, rank, ranks, 0), known[name].order, data)
            return {}
        name, data, epoch, budget_s, copy = words
        step_bytes = max(READ_BYTES, BATCH * data.sample_bytes) if copy else 0
        return _deliver(known[name].read(data, rank, ranks, epoch), budget_s, step_bytes)

    orders(pipe, obey)


def _open(data: DataSet, rank: int, ranks: int, path: str) -> dict[str, Any]:
    """Make a loader together with the other ranks, who meet at `path`, and take a batch."""
    from hsgd.io import PartitionedLoader

    from hsgd import Comm

    with Comm.local(path, rank, ranks) as comm:
        began = time.perf_counter()
        batch = min(BATCH, max(1, data.count // ranks))
        loader = PartitionedLoader(data.folder / "slabs", batch, rank, ranks, comm=comm)
        made_s = time.perf_counter() - began
        iteration = iter(loader)
        next(iteration)
        first_s = time.perf_counter() - began
        iteration.close()
    return {"open_s": made_s, "first_s": first_s}


def check(batches: Any, order: str, data: DataSet) -> None:
    """Raise ValueError unless the first rows are rows of the HDF5 file, each once, and follow one
    another where they are in order.
    """
    numbers: list[int] = []
    with h5py.File(data.folder / "one.h5", "r") as file:
        rows = file["data"]
        for batch in itertools.islice(batches, _CHECKED_BATCHES):
            for row in batch.numpy():
                number = int.from_bytes(row[:8].tobytes(), "little")
                if number >= data.count or (row != rows[number]).any():
                    raise ValueError(f"row {len(numbers)} is not row {number} of the file")
                numbers.append(number)
    if len(set(numbers)) != len(numbers) or not numbers:
        raise ValueError(f"of {len(numbers)} rows {len(set(numbers))} are different ones")
    steps = {later - earlier for earlier, later in itertools.pairwise(numbers)}
    if (steps <= {1}) != (order == "in-order"):
        raise ValueError(f"rows are not {order}: they begin with {numbers[:4]}")


def _deliver(batches: Any, budget_s: float, step_bytes: int) -> dict[str, float]:
    """Take batches, copy them into memory of `step_bytes` or touch their pages, and count."""
    step = torch.zeros(step_bytes, dtype=torch.uint8)
    began = time.perf_counter()
    first_s, samples, touched = 0.0, 0, 0
    for batch in batches:
        first_s = first_s or time.perf_counter() - began
        if step_bytes:
            step[: batch.numel()].copy_(batch.view(-1))
        else:
            touched += int(batch.view(-1)[::4096].sum())
        samples += len(batch)
        if time.perf_counter() - began > budget_s:
            break
    seconds = time.perf_counter() - began
    return {"samples": samples, "seconds": seconds, "first_s": first_s, "touched": touched}
