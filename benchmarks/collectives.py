"""Broadcast, allgather, reduce_scatter, alltoall, barrier: hsgd, MPI, oneCCL, gloo, in one run.

Sizes are chosen here; command.py says how it is measured.
"""

from __future__ import annotations

import sys

from harness.command import Benchmark, run

__all__ = ["COLLECTIVES"]

COLLECTIVES = Benchmark(
    name="collectives",
    about="Measure the other collectives on float32 on this machine: hsgd, MPI, oneCCL, gloo.",
    collectives=("broadcast", "allgather", "reduce_scatter", "alltoall", "barrier"),
    sizes=(8, *(64 * 8**k for k in range(8))),
    quick_sizes=(8, 64 << 10, 4 << 20),
    rounds=6,
    quick_rounds=2,
    quick_budget_s=0.06,
    notes="""\
SIZE is that of a rank's larger buffer: the data of a broadcast, the result of allgather, the input
of reduce_scatter, both of alltoall. Ratios are named vs_peer/broadcast/LAYOUT/SIZE and so on.
Calls follow one another, so a root of small broadcasts may run ahead of who receives them.

examples:
  python benchmarks/collectives.py --quick
  python benchmarks/collectives.py --collectives allgather alltoall --np 2 4 --json gather.json
""",
)

if __name__ == "__main__":
    sys.exit(run(COLLECTIVES))
