"""Collectives on one node by its number of ranks: hsgd, Open MPI, MPICH and Intel MPI, in one run.

harness/command.py says how it is measured, harness/ranks_report.py shows it.
"""

from __future__ import annotations

import sys

from harness import ranks_report
from harness.command import Benchmark, run

__all__ = ["RANKS_PER_NODE"]

RANKS_PER_NODE = Benchmark(
    name="ranks_per_node",
    about="Measure collectives on this node with 2 to 256 ranks: hsgd and three MPIs, from C.",
    collectives=("allreduce", "broadcast", "allgather", "barrier"),
    sizes=(8, 1 << 10, 64 << 10, 1 << 20),
    quick_sizes=(8, 64 << 10),
    rounds=3,
    quick_rounds=3,
    quick_budget_s=0.06,
    ranks=(2, 4, 8, 16, 32, 64, 128, 256),
    quick_ranks=(2, 8, 32),
    candidates=("hsgd-c", "mpi-c", "mpich-c", "impi-c"),
    span=True,
    tables=ranks_report.tables,
    plot=ranks_report.plot,
    notes="""\
SIZE is that of a rank's larger buffer: the data of allreduce and broadcast, the result of
allgather, whose ranks have 4 bytes at least. The time of a batch is that from the first rank's
begin to the last one's end, as a rank that begins late finds all done. Calls follow one another, so
a root of small broadcasts may run ahead of who receives them.

"setup" in the JSON: hsgd's communicator over MPI, from a barrier on, and for comparison MPI_Init of
each MPI, from the start of the program on; hsgd's comes on top of Open MPI's. vs_goal/setup/LAYOUT
is 1 s + 5 ms per rank over the processor time that all ranks take for hsgd's.

With many ranks the three jobs, which stay side by side, need memory, descriptors (this program
raises its own soft limit) and, where cores are few, minutes to start.

examples:
  python benchmarks/ranks_per_node.py --quick
  python benchmarks/ranks_per_node.py --json ranks.json --png ranks.png
  python benchmarks/ranks_per_node.py --np 64 256 --collectives allreduce --sizes 8 --files 1024
""",
)

if __name__ == "__main__":
    sys.exit(run(RANKS_PER_NODE))
