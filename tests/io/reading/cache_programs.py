"""What the memory of several nodes promises: a program for ranks under mpirun.

    cache_programs.py FOLDER

FOLDER holds 120 samples of `number` and `tokens` (ragged) in slabs. Rank 0 prints one JSON object:
case -> figures summed over the ranks after each epoch, and how many files each rank opened with
HDF5.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from hsgd.io.format import opening

from hdf5_samples import tokens_of
from hsgd import Comm
from loaders import loader_of

__all__ = ["CASES", "COUNT", "EPOCHS"]

COUNT = 120
EPOCHS = 5
ALL, FEW = 1 << 20, 6000  # bytes of memory for slabs
CASES = {
    "files": {"shuffle": "slabs", "cache_bytes": ALL},
    "comm": {"shuffle": "slabs", "cache_bytes": ALL, "exchange": "comm", "verify": True},
    "few": {"shuffle": "slabs", "cache_bytes": FEW, "exchange": "comm"},
    "block": {"shuffle": "block", "cache_bytes": FEW, "exchange": "comm"},
}
FIGURES = ("cache_bytes", "exchanged_bytes", "bytes_read")


def read_epochs(comm: Comm, folder: str, options: dict[str, Any]) -> list[list[int]]:
    """Figures after each epoch; all samples came once, and whole."""
    loader = loader_of(
        folder, 7, comm.rank, comm.size, comm=comm, pad=False, as_numpy=True, threads=2,
        block_bytes=100, window_bytes=300, **options,
    )  # fmt: skip
    figures = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        seen = [np.empty(0, np.int64)]
        for batch in loader:
            seen.append(batch["number"])
            for number, tokens in zip(batch["number"].tolist(), batch["tokens"], strict=True):
                np.testing.assert_array_equal(tokens, tokens_of(number))
        everyone = comm.allgather(np.concatenate(seen))
        np.testing.assert_array_equal(np.sort(everyone), np.arange(COUNT))
        stats = loader.metrics()
        figures.append(comm.allreduce(np.array([stats[name] for name in FIGURES])).tolist())
    return figures


def main(folder: str) -> None:
    opened = []
    examine, opening.open_hdf5 = (
        opening.open_hdf5,
        lambda *a: (opened.append(a), examine(*a))[1],
    )
    comm = Comm()
    found: dict[str, Any] = {case: read_epochs(comm, folder, CASES[case]) for case in CASES}
    found["opened"] = comm.allgather(np.array([len(opened)])).tolist()
    if comm.rank == 0:
        print(json.dumps(found))
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
