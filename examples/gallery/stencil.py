"""Heat in a plate with mpi4py, a strip of rows on each rank: plain MPI, or with the interposer.

    mpirun -n 2 python examples/gallery/stencil.py
    hsgd run -np 2 python examples/gallery/stencil.py

The program does not know of hsgd: `hsgd run` preloads the interposer, which takes the reduction of
128 KB that follows each step, and leaves the exchange of border rows to MPI. Writes stencil.png.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

COLUMNS = 16384  # a profile of 128 KB


def exchange_borders(comm: MPI.Comm, strip: np.ndarray) -> None:
    """Neighbours' border rows into the first and the last row of the strip. Collective."""
    above = comm.rank - 1 if comm.rank else MPI.PROC_NULL
    below = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
    comm.Sendrecv(strip[1], above, recvbuf=strip[-1], source=below)
    comm.Sendrecv(strip[-2], below, recvbuf=strip[0], source=above)


def step(strip: np.ndarray) -> None:
    """Every inner point becomes the mean of its four neighbours."""
    inner = strip[:-2, 1:-1] + strip[2:, 1:-1] + strip[1:-1, :-2] + strip[1:-1, 2:]
    strip[1:-1, 1:-1] = inner / 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=8, help="of each rank")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of the plot")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    strip = np.zeros((options.rows + 2, COLUMNS))
    strip[:, 0] = 100.0  # the left edge is hot, the right one cold
    profile, profiles, reducing_s = np.empty(COLUMNS), [], 0.0
    begin = time.perf_counter()
    for number in range(options.steps):
        exchange_borders(comm, strip)
        step(strip)
        started = time.perf_counter()
        comm.Allreduce(strip[1:-1].sum(axis=0), profile)  # of all rows, on all ranks
        reducing_s += time.perf_counter() - started
        if number in (0, options.steps // 4, options.steps - 1):
            profiles.append((number + 1, profile / (options.rows * comm.size)))
    seconds = time.perf_counter() - begin
    if comm.rank == 0:
        print(
            f"{comm.size} ranks, {options.steps} steps: {seconds:.3f} s, {reducing_s:.3f} s of "
            f"them in reductions; mean temperature {profiles[-1][1].mean():.6f}"
        )
        plot(options.output, profiles)


def plot(folder: Path, profiles: list[tuple[int, np.ndarray]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for number, profile in profiles:
        axes.plot(profile[:100], label=f"step {number}")
    axes.set(title="mean temperature", xlabel="column")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "stencil.png", dpi=120)


if __name__ == "__main__":
    main()
