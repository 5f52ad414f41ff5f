"""Allreduce of float32: hsgd, MPI, oneCCL, gloo, Horovod, DeepSpeed, and the limit, in one run.

Sizes are chosen here; command.py says how it is measured.
"""

from __future__ import annotations

import sys

from harness.command import Benchmark, run
from studies import device_allreduce

__all__ = ["ALLREDUCE"]

ALLREDUCE = Benchmark(
    name="allreduce",
    about="Measure allreduce of float32: hsgd, MPI, oneCCL, gloo, Horovod, DeepSpeed.",
    collectives=("allreduce",),
    sizes=(8, *(16 * 4**k for k in range(13))),
    quick_sizes=(8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 8 << 20, 32 << 20),
    rounds=8,
    quick_rounds=3,
    quick_budget_s=0.15,
    notes="""\
--device cuda measures CUDA tensors, with options of its own: --device cuda --help.

The limit up to 512 bytes is one transfer in a ping-pong of as many cache lines between two cores.
From 16 KB on it is a plain C loop that does the least loads and stores of a staged allreduce,
(5 - 2/ranks) bytes for each byte, with the same buffers, on all ranks at once, without waiting; for
buffers in shared memory (arena) 2 bytes for each byte. Both come with ordinary stores and with
stores past the cache, and the faster one counts. Between nodes it is the time that plain TCP
takes for 2 (nodes - 1) / nodes of the bytes, from each node to the next, all at once.

examples:
  python benchmarks/allreduce.py --quick
  python benchmarks/allreduce.py --json allreduce.json --png allreduce.png
  python benchmarks/allreduce.py --np 2 4 --sizes 1KB 1MB --candidates hsgd-c mpi-c
  python benchmarks/allreduce.py --nodes 2x2@1gbit 2+1@1gbit 3x1@1gbit --sizes 1MB 16MB
""",
)

if __name__ == "__main__":
    on_device = any(argument.partition("=")[0] == "--device" for argument in sys.argv)
    sys.exit(device_allreduce.main() if on_device else run(ALLREDUCE))
